"""Norm, rotary positions and page write of the key of an indexer (sparse attention), and rotation of its queries:

    page ← rope(layer norm(key));  q ← rope(q)

The first 2 · half elements of the key and of each query are rotated. All is one pass with one rounding at the end.
Source: arXiv:2512.02556, section 2.1.
"""

import torch
from torch import Tensor

from kernels.jit import jit, launch, power_of_2, row_stride, tl
from kernels.op import Args, Case, Make, Op, nbytes

HEADS_AT_ONCE = 8


def _reference(
    key: Tensor,
    q: Tensor,
    pages: Tensor,
    layer: int,
    slot_mapping: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
) -> tuple[Tensor, Tensor]:
    """key: [tokens, dim]; q: [tokens, heads, dim]; pages: [blocks, layers, 1, block_tokens, 1, dim]; slot_mapping:
    [tokens] int32, block · block_tokens + offset, negative for tokens that are not written; weight, bias: [dim] fp32,
    of the layer norm; cos, sin: [tokens, half] fp32. Values that are not finite are written to pages as 0. → q and
    pages."""
    both = 2 * cos.shape[1]
    wide = torch.nn.functional.layer_norm(key.float(), weight.shape, weight, bias, eps)
    wide[:, :both] = _rotated(wide[:, :both], cos, sin, interleaved)
    rotated = _rotated(q[..., :both].float(), cos.unsqueeze(1), sin.unsqueeze(1), interleaved)
    q[..., :both] = rotated.to(q.dtype)
    written = slot_mapping >= 0
    block, offset = slot_mapping[written].long() // pages.shape[3], slot_mapping[written].long() % pages.shape[3]
    pages[block, layer, 0, offset, 0] = torch.nan_to_num(wide[written], 0.0, 0.0, 0.0).to(pages.dtype)
    return q, pages


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    pair = a * cos - b * sin, b * cos + a * sin
    return torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)


@jit
def _finite(x):
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)  # no NaN is less


@jit(varying=("layer",))
def index_kv_kernel(
    key,
    q,
    pages,
    slot_mapping,
    weight,
    bias,
    cos,
    sin,
    key_row,
    q_row,
    layer,
    eps,
    LAYERS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    AT_ONCE: tl.constexpr,
    WIDE: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """The first program of a token has its key, the others a few heads of its query each."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    pair = tl.arange(0, PAIRS)
    if INTERLEAVED:
        at_a, at_b = 2 * pair, 2 * pair + 1
    else:
        at_a, at_b = pair, pair + HALF
    keep = pair < HALF
    c = tl.load(cos + token * HALF + pair, keep, 0.0)
    s = tl.load(sin + token * HALF + pair, keep, 0.0)
    if part == 0:
        slot = tl.load(slot_mapping + token).to(tl.int64)
        if slot >= 0:
            at = tl.arange(0, WIDE)
            row = key + token * key_row
            x = tl.load(row + at, at < DIM, 0.0).to(tl.float32)
            mean = tl.sum(x, 0) / DIM
            apart = tl.where(at < DIM, x - mean, 0.0)
            factor = tl.rsqrt(tl.sum(apart * apart, 0) / DIM + eps)
            a = tl.load(row + at_a, keep, 0.0).to(tl.float32) - mean
            b = tl.load(row + at_b, keep, 0.0).to(tl.float32) - mean
            a = a * factor * tl.load(weight + at_a, keep, 0.0) + tl.load(bias + at_a, keep, 0.0)
            b = b * factor * tl.load(weight + at_b, keep, 0.0) + tl.load(bias + at_b, keep, 0.0)
            y = apart * factor * tl.load(weight + at, at < DIM, 0.0) + tl.load(bias + at, at < DIM, 0.0)
            block, offset = slot // BLOCK_TOKENS, slot % BLOCK_TOKENS
            place = pages + ((block * LAYERS + layer) * BLOCK_TOKENS + offset) * DIM
            tl.store(place + at, _finite(y).to(pages.dtype.element_ty), (at >= 2 * HALF) & (at < DIM))
            tl.store(place + at_a, _finite(a * c - b * s).to(pages.dtype.element_ty), keep)
            tl.store(place + at_b, _finite(b * c + a * s).to(pages.dtype.element_ty), keep)
    else:
        # Other names than above: Triton joins the types of equal ones.
        head = (part - 1) * AT_ONCE + tl.arange(0, AT_ONCE)
        some = (head < HEADS)[:, None] & keep[None, :]
        at_q = q + token * q_row + (head * DIM)[:, None]
        q_a = tl.load(at_q + at_a[None, :], some, 0.0).to(tl.float32)
        q_b = tl.load(at_q + at_b[None, :], some, 0.0).to(tl.float32)
        rotated_a = q_a * c[None, :] - q_b * s[None, :]
        rotated_b = q_b * c[None, :] + q_a * s[None, :]
        tl.store(at_q + at_a[None, :], rotated_a.to(q.dtype.element_ty), some)
        tl.store(at_q + at_b[None, :], rotated_b.to(q.dtype.element_ty), some)


def _triton(
    key: Tensor,
    q: Tensor,
    pages: Tensor,
    layer: int,
    slot_mapping: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
) -> tuple[Tensor, Tensor]:
    tokens, heads, dim = q.shape
    half = cos.shape[1]
    if q.stride(1) != dim:
        raise ValueError(f"q: the heads of a token must be contiguous, not {q.stride(1)} apart")
    if pages.shape[2] != 1 or pages.shape[-1] != dim or not pages.is_contiguous():
        raise ValueError(f"pages {tuple(pages.shape)}: must be contiguous, with one plane of {dim} elements")
    launch(
        index_kv_kernel,
        (tokens, 1 + -(-heads // HEADS_AT_ONCE)),
        key,
        q,
        pages,
        slot_mapping,
        weight,
        bias,
        cos,
        sin,
        row_stride(key, "key"),
        q.stride(0),
        layer,
        eps,
        LAYERS=pages.shape[1],
        BLOCK_TOKENS=pages.shape[3],
        HEADS=heads,
        DIM=dim,
        HALF=half,
        INTERLEAVED=interleaved,
        AT_ONCE=HEADS_AT_ONCE,
        WIDE=power_of_2(dim),
        PAIRS=power_of_2(half),
        warps=1,
    )
    return q, pages


def _inputs(
    make: Make,
    tokens: int,
    heads: int,
    dim: int,
    half: int,
    interleaved: bool = False,
    block_tokens: int = 4,
    layers: int = 2,
    spoiled: bool = False,
) -> Args:
    blocks = tokens // block_tokens + 2
    slot_mapping = make.permutation(blocks * block_tokens)[:tokens].contiguous()
    key = make.normal(tokens, dim)
    if tokens > 2 and not make.meta:
        slot_mapping[1] = -1  # a padded token
    if spoiled:
        key[0, 1], key[2, -1] = torch.nan, torch.inf
    angles = make.normal(tokens, half, dtype=torch.float32, scale=3.0)
    return (
        key,
        make.normal(tokens, heads, dim),
        make.zeros(blocks, layers, 1, block_tokens, 1, dim),
        layers - 1,
        slot_mapping,
        make.normal(dim, dtype=torch.float32),
        make.normal(dim, dtype=torch.float32),
        1e-6,
        angles.cos(),
        angles.sin(),
        interleaved,
    )


def _traffic(key: Tensor, q: Tensor, pages: Tensor, layer: int, *rest: object) -> int:
    """The key is read and written, and so is the rotated part of q."""
    _, weight, bias, _, cos, sin, *_ = rest
    assert isinstance(cos, Tensor)
    rotated = q.shape[0] * q.shape[1] * 2 * cos.shape[1] * q.element_size()
    return 2 * nbytes(key) + 2 * rotated + nbytes(weight, bias, cos, sin)


DEEPSEEK = {"heads": 64, "dim": 128, "half": 32, "block_tokens": 16}

INDEX_KV = Op(
    name="index_kv",
    reference=_reference,
    triton=_triton,
    inputs=_inputs,
    cases=(
        Case("one", {"tokens": 1, "heads": 1, "dim": 16, "half": 4}),
        Case("odd", {"tokens": 5, "heads": 9, "dim": 19, "half": 3, "interleaved": True}),
        Case("whole", {"tokens": 6, "heads": 16, "dim": 10, "half": 5}),
        Case("spoiled", {"tokens": 4, "heads": 3, "dim": 33, "half": 2, "spoiled": True}),
        Case("empty", {"tokens": 0, "heads": 2, "dim": 16, "half": 4}),
        Case("deepseek-1", {"tokens": 1, **DEEPSEEK}, bench=True),
        Case("deepseek-4096", {"tokens": 4096, **DEEPSEEK}, bench=True),
        Case("glm-4096", {"tokens": 4096, **DEEPSEEK, "heads": 32, "interleaved": True}, bench=True),
    ),
    tolerance={torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2},
    traffic=_traffic,
)
