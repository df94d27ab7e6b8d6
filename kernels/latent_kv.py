"""Norm, rotary positions and KV cache write of latent attention, between its projections and its products:

    latent, key ← norm(latent), rope(key);  both into their page;  the rotated part of q into y

All is one pass with one rounding at the end. Source: arXiv:2405.04434, section 2.1.
"""

import torch
from torch import Tensor

from kernels.jit import jit, launch, power_of_2, row_stride, tl
from kernels.op import Args, Case, Make, Op, nbytes

HEADS_AT_ONCE = 8


def _reference(
    latent: Tensor,
    q: Tensor,
    pages: Tensor,
    layer: int,
    slot_mapping: Tensor,
    weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    y: Tensor,
) -> tuple[Tensor, Tensor]:
    """latent: [tokens, dim], a latent of weight's size, then a key of 2 · half elements; q: [tokens, heads, query_dim],
    whose last 2 · half elements are rotated; pages: [blocks, layers, 1, block_tokens, 1, dim]; slot_mapping: [tokens]
    int32, block · block_tokens + offset, negative for tokens that are not written; weight: [rank] fp32, of the RMS
    norm; cos, sin: [tokens, half] fp32. Values that are not finite are written to pages as 0. → y: [tokens, heads,
    dim], whose heads end with the rotated part of q, and pages."""
    rank, wide = len(weight), latent.float()
    c = wide[:, :rank]
    c = c * torch.rsqrt(c.square().mean(-1, keepdim=True) + eps) * weight
    key = _rotated(wide[:, rank:], cos, sin, interleaved)
    rotated = q[..., q.shape[2] - key.shape[1] :].float()
    y[..., rank:] = _rotated(rotated, cos.unsqueeze(1), sin.unsqueeze(1), interleaved).to(y.dtype)
    written = slot_mapping >= 0
    block, offset = slot_mapping[written].long() // pages.shape[3], slot_mapping[written].long() % pages.shape[3]
    state = torch.cat((c, key), 1)[written]
    pages[block, layer, 0, offset, 0] = torch.nan_to_num(state, 0.0, 0.0, 0.0).to(pages.dtype)
    return y, pages


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    pair = a * cos - b * sin, b * cos + a * sin
    return torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)


@jit
def _finite(x):
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)  # no NaN is less


@jit(varying=("layer",))
def latent_kv_kernel(
    latent,
    q,
    pages,
    slot_mapping,
    weight,
    cos,
    sin,
    y,
    latent_row,
    q_row,
    y_row,
    layer,
    eps,
    LAYERS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    QUERY_DIM: tl.constexpr,
    RANK: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    AT_ONCE: tl.constexpr,
    LATENT: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """The first program of a token has its latent and key, the others a few heads of its query each."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    DIM: tl.constexpr = RANK + 2 * HALF
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
            at = tl.arange(0, LATENT)
            row = latent + token * latent_row
            x = tl.load(row + at, at < RANK, 0.0).to(tl.float32)
            x = x * tl.rsqrt(tl.sum(x * x, 0) / RANK + eps) * tl.load(weight + at, at < RANK, 0.0)
            a = tl.load(row + RANK + at_a, keep, 0.0).to(tl.float32)
            b = tl.load(row + RANK + at_b, keep, 0.0).to(tl.float32)
            block, offset = slot // BLOCK_TOKENS, slot % BLOCK_TOKENS
            place = pages + ((block * LAYERS + layer) * BLOCK_TOKENS + offset) * DIM
            tl.store(place + at, _finite(x).to(pages.dtype.element_ty), at < RANK)
            tl.store(place + RANK + at_a, _finite(a * c - b * s).to(pages.dtype.element_ty), keep)
            tl.store(place + RANK + at_b, _finite(b * c + a * s).to(pages.dtype.element_ty), keep)
    else:
        # Other names than above: Triton joins the types of equal ones.
        head = (part - 1) * AT_ONCE + tl.arange(0, AT_ONCE)
        some = (head < HEADS)[:, None] & keep[None, :]
        at_q = q + token * q_row + (head * QUERY_DIM + QUERY_DIM - 2 * HALF)[:, None]
        q_a = tl.load(at_q + at_a[None, :], some, 0.0).to(tl.float32)
        q_b = tl.load(at_q + at_b[None, :], some, 0.0).to(tl.float32)
        at_y = y + token * y_row + (head * DIM + RANK)[:, None]
        rotated_a = q_a * c[None, :] - q_b * s[None, :]
        rotated_b = q_b * c[None, :] + q_a * s[None, :]
        tl.store(at_y + at_a[None, :], rotated_a.to(y.dtype.element_ty), some)
        tl.store(at_y + at_b[None, :], rotated_b.to(y.dtype.element_ty), some)


def _triton(
    latent: Tensor,
    q: Tensor,
    pages: Tensor,
    layer: int,
    slot_mapping: Tensor,
    weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    y: Tensor,
) -> tuple[Tensor, Tensor]:
    tokens, heads, query_dim = q.shape
    rank, half = weight.shape[0], cos.shape[1]
    for x, name in ((q, "q"), (y, "y")):
        if x.stride(1) != x.shape[2]:
            raise ValueError(f"{name}: the heads of a token must be contiguous, not {x.stride(1)} apart")
    if pages.shape[2] != 1 or pages.shape[-1] != rank + 2 * half or not pages.is_contiguous():
        raise ValueError(
            f"pages {tuple(pages.shape)}: must be contiguous, with one plane of {rank + 2 * half} elements"
        )
    launch(
        latent_kv_kernel,
        (tokens, 1 + -(-heads // HEADS_AT_ONCE)),
        latent,
        q,
        pages,
        slot_mapping,
        weight,
        cos,
        sin,
        y,
        row_stride(latent, "latent"),
        q.stride(0),
        y.stride(0),
        layer,
        eps,
        LAYERS=pages.shape[1],
        BLOCK_TOKENS=pages.shape[3],
        HEADS=heads,
        QUERY_DIM=query_dim,
        RANK=rank,
        HALF=half,
        INTERLEAVED=interleaved,
        AT_ONCE=HEADS_AT_ONCE,
        LATENT=power_of_2(rank),
        PAIRS=power_of_2(half),
        warps=4 if rank >= 256 else 1,
    )
    return y, pages


def _inputs(
    make: Make,
    tokens: int,
    heads: int,
    rank: int,
    nope: int,
    half: int,
    interleaved: bool = True,
    block_tokens: int = 4,
    layers: int = 2,
    spoiled: bool = False,
) -> Args:
    blocks, dim = tokens // block_tokens + 2, rank + 2 * half
    slot_mapping = make.permutation(blocks * block_tokens)[:tokens].contiguous()
    latent = make.normal(tokens, dim)
    if tokens > 2 and not make.meta:
        slot_mapping[1] = -1  # a padded token
    if spoiled:
        latent[0, 1], latent[2, -1] = torch.nan, torch.inf
    angles = make.normal(tokens, half, dtype=torch.float32, scale=3.0)
    return (
        latent,
        make.normal(tokens, heads, nope + 2 * half),
        make.zeros(blocks, layers, 1, block_tokens, 1, dim),
        layers - 1,
        slot_mapping,
        make.normal(rank, dtype=torch.float32),
        1e-6,
        angles.cos(),
        angles.sin(),
        interleaved,
        make.normal(tokens, heads, dim),
    )


def _traffic(latent: Tensor, q: Tensor, pages: Tensor, layer: int, *rest: object) -> int:
    """The latent is read and written, and so is the rotated part of q."""
    _, weight, _, cos, sin, *_ = rest
    assert isinstance(cos, Tensor)
    rotated = q.shape[0] * q.shape[1] * 2 * cos.shape[1] * q.element_size()
    return 2 * nbytes(latent) + 2 * rotated + nbytes(weight, cos, sin)


DEEPSEEK = {"heads": 128, "rank": 512, "nope": 128, "half": 32, "block_tokens": 16}

LATENT_KV = Op(
    name="latent_kv",
    reference=_reference,
    triton=_triton,
    inputs=_inputs,
    cases=(
        Case("one", {"tokens": 1, "heads": 1, "rank": 16, "nope": 8, "half": 4}),
        Case("odd", {"tokens": 5, "heads": 9, "rank": 19, "nope": 7, "half": 3}),
        Case("halves", {"tokens": 6, "heads": 16, "rank": 24, "nope": 9, "half": 5, "interleaved": False}),
        Case("spoiled", {"tokens": 4, "heads": 3, "rank": 33, "nope": 8, "half": 2, "spoiled": True}),
        Case("empty", {"tokens": 0, "heads": 2, "rank": 16, "nope": 8, "half": 4}),
        Case("deepseek-1", {"tokens": 1, **DEEPSEEK}, bench=True),
        Case("deepseek-4096", {"tokens": 4096, **DEEPSEEK}, bench=True),
    ),
    tolerance={torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2},
    traffic=_traffic,
)
