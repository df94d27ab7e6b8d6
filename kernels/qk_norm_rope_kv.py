"""Norm, rotary positions and KV cache write between the projection of queries, keys and values and attention:

    q, k ← rope(norm(q), norm(k));  k and v into their pages, q in place

Without pages (attention that reads in both directions and keeps nothing), q and k are changed in place, and v is left
unchanged.

The norm is a root mean square or layer norm of each head, if the model has one (`kind`); rope rotates the first 2 ·
half elements of a head (kernels/rope.py). All is one pass with one rounding at the end.
"""

from typing import Literal

import torch
from torch import Tensor

from kernels.cpu import bodies
from kernels.jit import jit, launch, power_of_2, row_stride, tl
from kernels.op import Args, Case, Make, Op, nbytes

NormKind = Literal["rms", "layer"]
HEADS_AT_ONCE = 8
FP8_MAX = 448.0  # largest finite float8_e4m3fn


def _reference(
    qkv: Tensor,
    pages: Tensor | None,
    layer: int,
    slot_mapping: Tensor | None,
    heads: int,
    weight: Tensor | None,
    kind: NormKind,
    eps: float,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    bias: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """qkv: [tokens, heads + 2 · kv_heads, dim], whose q is changed in place (heads may be 0: cross-attention projects
    only keys and values of the encoder input); pages: [blocks, layers, 2, block_tokens, kv_heads, dim], of any type;
    slot_mapping: [tokens] int32, block · block_tokens + offset, negative for tokens that are not written; weight, bias
    (of a layer norm): [heads + kv_heads, dim] fp32 or None; cos, sin: [tokens, half] fp32 or None. Pages hold k /
    k_scale and v / v_scale. Values that are not finite are written as 0, because a later owner of the block reads the
    rest with weight 0. Pages and slot_mapping None: k is changed in place too. → qkv and pages, or qkv alone."""
    qk_heads = _num_qk_heads(qkv, heads)
    wide = qkv.float()
    qk, v = wide[:, :qk_heads], wide[:, qk_heads:]
    if weight is not None:
        centred = qk - qk.mean(-1, keepdim=True) if kind == "layer" else qk
        qk = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * weight
        qk = qk if bias is None else qk + bias
    if cos is not None and sin is not None:
        half = cos.shape[1]
        part = qk[..., : 2 * half]
        a, b = (part[..., ::2], part[..., 1::2]) if interleaved else part.chunk(2, -1)
        c, s = cos.unsqueeze(1), sin.unsqueeze(1)
        pair = a * c - b * s, b * c + a * s
        mixed = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
        qk = torch.cat((mixed, qk[..., 2 * half :]), -1)
    if pages is None or slot_mapping is None:
        qkv[:, :qk_heads] = qk.to(qkv.dtype)
        return qkv
    qkv[:, :heads] = qk[:, :heads].to(qkv.dtype)
    block_tokens = pages.shape[3]
    written = slot_mapping >= 0
    block, offset = slot_mapping[written].long() // block_tokens, slot_mapping[written].long() % block_tokens
    for plane, x, scale in ((0, qk[:, heads:], k_scale), (1, v, v_scale)):
        pages[block, layer, plane, offset] = _stored(x[written] / scale, pages.dtype)
    return qkv, pages


def _num_qk_heads(qkv: Tensor, heads: int) -> int:
    """Return the number of query heads plus key heads."""
    return heads + (qkv.shape[1] - heads) // 2


def _stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    x = torch.nan_to_num(x, 0.0, 0.0, 0.0)
    return (x.clamp(-FP8_MAX, FP8_MAX) if dtype.itemsize == 1 else x).to(dtype)


@jit
def _page_store(place, x, inverse, keep, FP8: tl.constexpr, MAX_VALUE: tl.constexpr):
    x = x * inverse
    x = tl.where(tl.abs(x) < float("inf"), x, 0.0)  # no NaN is less
    if FP8:
        x = tl.minimum(tl.maximum(x, -MAX_VALUE), MAX_VALUE)
    tl.store(place, x.to(place.dtype.element_ty), keep)


@jit(varying=("layer",))
def qk_norm_rope_kv_kernel(
    qkv,
    pages,
    slot_mapping,
    weight,
    bias,
    cos,
    sin,
    token_stride,
    layer,
    eps,
    k_inverse,
    v_inverse,
    LAYERS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    BIASED: tl.constexpr,
    PAGED: tl.constexpr,
    FP8: tl.constexpr,
    MAX_VALUE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
):
    """One program for a few heads of one token. Elements that rope rotates together are pairs a, b, PAIRS wide (without
    rope: the two halves of a head). The rest of the head, which rope leaves unchanged, is REST wide."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    is_q, is_v = head < HEADS, head >= HEADS + KV_HEADS
    real = head < HEADS + 2 * KV_HEADS
    SPAN: tl.constexpr = HALF if HALF > 0 else DIM // 2
    pair = tl.arange(0, PAIRS)
    if INTERLEAVED:
        at_a, at_b = 2 * pair, 2 * pair + 1
    else:
        at_a, at_b = pair, pair + SPAN
    pairs = real[:, None] & (pair < SPAN)[None, :]
    row = qkv + token * token_stride + head[:, None] * DIM
    a = tl.load(row + at_a[None, :], pairs, 0.0).to(tl.float32)
    b = tl.load(row + at_b[None, :], pairs, 0.0).to(tl.float32)
    if REST > 0:
        at_rest = 2 * SPAN + tl.arange(0, REST)
        rests = real[:, None] & (at_rest < DIM)[None, :]
        rest = tl.load(row + at_rest[None, :], rests, 0.0).to(tl.float32)
    is_qk = (head < HEADS + KV_HEADS)[:, None]
    if NORM != "none":
        if NORM == "layer":
            total = tl.sum(a, 1) + tl.sum(b, 1)
            if REST > 0:
                total += tl.sum(rest, 1)
            mean = tl.where(is_v, 0.0, total / DIM)[:, None]
            a = tl.where(pairs, a - mean, 0.0)
            b = tl.where(pairs, b - mean, 0.0)
            if REST > 0:
                rest = tl.where(rests, rest - mean, 0.0)
        square = tl.sum(a * a, 1) + tl.sum(b * b, 1)
        if REST > 0:
            square += tl.sum(rest * rest, 1)
        factor = tl.rsqrt(square / DIM + eps)[:, None]
        own = weight + head[:, None] * DIM
        a = tl.where(is_qk, a * factor * tl.load(own + at_a[None, :], pairs & is_qk, 0.0), a)
        b = tl.where(is_qk, b * factor * tl.load(own + at_b[None, :], pairs & is_qk, 0.0), b)
        if REST > 0:
            rest = tl.where(is_qk, rest * factor * tl.load(own + at_rest[None, :], rests & is_qk, 0.0), rest)
        if BIASED:
            added = bias + head[:, None] * DIM
            a += tl.load(added + at_a[None, :], pairs & is_qk, 0.0)
            b += tl.load(added + at_b[None, :], pairs & is_qk, 0.0)
            if REST > 0:
                rest += tl.load(added + at_rest[None, :], rests & is_qk, 0.0)
    if HALF > 0:
        c = tl.load(cos + token * HALF + pair, pair < HALF, 0.0)[None, :]
        s = tl.load(sin + token * HALF + pair, pair < HALF, 0.0)[None, :]
        rotated_a, rotated_b = a * c - b * s, b * c + a * s
        a, b = tl.where(is_qk, rotated_a, a), tl.where(is_qk, rotated_b, b)

    type = qkv.dtype.element_ty
    q = is_q[:, None]
    stays = q if PAGED else is_qk
    tl.store(row + at_a[None, :], a.to(type), pairs & stays)
    tl.store(row + at_b[None, :], b.to(type), pairs & stays)
    if REST > 0:
        tl.store(row + at_rest[None, :], rest.to(type), rests & stays)
    if PAGED:
        slot = tl.load(slot_mapping + token).to(tl.int64)
        if slot >= 0:
            block, offset = slot // BLOCK_TOKENS, slot % BLOCK_TOKENS
            plane = (block * LAYERS + layer) * 2 * BLOCK_TOKENS
            kv_head = tl.where(is_v, head - HEADS - KV_HEADS, head - HEADS)
            in_plane = tl.where(is_v, BLOCK_TOKENS, 0) + offset
            place = pages + ((plane + in_plane) * KV_HEADS + kv_head)[:, None] * DIM
            inverse = tl.where(is_v, v_inverse, k_inverse)[:, None]
            _page_store(place + at_a[None, :], a, inverse, pairs & ~q, FP8, MAX_VALUE)
            _page_store(place + at_b[None, :], b, inverse, pairs & ~q, FP8, MAX_VALUE)
            if REST > 0:
                _page_store(place + at_rest[None, :], rest, inverse, rests & ~q, FP8, MAX_VALUE)


def _triton(
    qkv: Tensor,
    pages: Tensor | None,
    layer: int,
    slot_mapping: Tensor | None,
    heads: int,
    weight: Tensor | None,
    kind: NormKind,
    eps: float,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    bias: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    tokens, all_heads, dim = qkv.shape
    qk_heads = _num_qk_heads(qkv, heads)
    half = 0 if cos is None else cos.shape[1]
    span = half or dim // 2
    rest = dim - 2 * span
    if qkv.stride(1) != dim:
        raise ValueError(f"heads: the heads of a token must be contiguous, not {qkv.stride(1)} apart")
    launch(
        qk_norm_rope_kv_kernel,
        (tokens, -(-(qk_heads if pages is None else all_heads) // HEADS_AT_ONCE)),
        qkv,
        qkv if pages is None else pages,
        qkv if slot_mapping is None else slot_mapping,
        qkv if weight is None else weight,
        qkv if bias is None else bias,
        qkv if cos is None else cos,
        qkv if sin is None else sin,
        row_stride(qkv, "qkv"),
        layer,
        eps,
        1.0 / k_scale,
        1.0 / v_scale,
        LAYERS=1 if pages is None else pages.shape[1],
        BLOCK_TOKENS=1 if pages is None else pages.shape[3],
        HEADS=heads,
        KV_HEADS=qk_heads - heads,
        DIM=dim,
        HALF=half,
        INTERLEAVED=interleaved,
        NORM="none" if weight is None else kind,
        BIASED=bias is not None,
        PAGED=pages is not None,
        FP8=pages is not None and pages.element_size() == 1,
        MAX_VALUE=FP8_MAX,
        AT_ONCE=HEADS_AT_ONCE,
        PAIRS=power_of_2(span),
        REST=power_of_2(rest) if rest else 0,
        warps=4 if dim >= 64 else 1,
    )
    return qkv if pages is None else (qkv, pages)


def _inputs(
    make: Make,
    tokens: int,
    heads: int,
    kv_heads: int,
    dim: int,
    half: int,
    norm: NormKind | None = None,
    interleaved: bool = False,
    pages: torch.dtype | None = None,
    block_tokens: int = 4,
    layers: int = 2,
    spoiled: bool = False,
    kept: bool = True,
    biased: bool = False,
) -> Args:
    blocks = tokens // block_tokens + 2
    slot_mapping = make.permutation(blocks * block_tokens)[:tokens].contiguous()
    if tokens > 2 and not make.meta:
        slot_mapping[1] = -1  # a padded token
    weight = None if norm is None else make.normal(heads + kv_heads, dim, dtype=torch.float32)
    angles = make.normal(tokens, half, dtype=torch.float32, scale=3.0) if half else None
    qkv = make.normal(tokens, heads + 2 * kv_heads, dim)
    if pages is not None and not half:
        # Numbers that fit into 8 bits, and some too large: the interpreter does not round to 8 bits as a GPU does.
        qkv = qkv.mul_(8).to(pages).to(make.dtype)
    if spoiled:
        qkv[0, heads, 0], qkv[-1, heads + kv_heads, 1], qkv[-1, -1, -1] = torch.nan, torch.inf, -torch.inf
    return (
        qkv,
        make.zeros(blocks, layers, 2, block_tokens, kv_heads, dim, dtype=pages) if kept else None,
        layers - 1,
        slot_mapping if kept else None,
        heads,
        weight,
        norm or "rms",
        1e-6,
        None if angles is None else angles.cos(),
        None if angles is None else angles.sin(),
        interleaved,
        1.0 if pages is None else 0.0625,
        1.0 if pages is None else 0.03125,
        make.normal(heads + kv_heads, dim, dtype=torch.float32) if biased else None,
    )


def _traffic(
    qkv: Tensor, pages: Tensor | None, layer: int, slot_mapping: Tensor | None, heads: int, *rest: object
) -> int:
    """q is read and written, k and v are read, and written in the pages' type. Without pages k is read and written, and
    v is not touched."""
    head, qk_heads = qkv[:, :1].nbytes, _num_qk_heads(qkv, heads)
    if pages is None:
        return 2 * qk_heads * head + nbytes(*rest[3:5])
    written = 2 * qkv.shape[0] * pages.shape[4] * qkv.shape[2] * pages.element_size()
    return qkv.nbytes + heads * head + written + nbytes(slot_mapping, *rest[3:5])


def _single_row(args: Args, row: int):
    """A token writes its own q and one place of the pages."""
    own = tuple(arg[row : row + 1] if at in (0, 3, 8, 9) and arg is not None else arg for at, arg in enumerate(args))
    if args[1] is None:
        return own, lambda outputs: (outputs[0][row : row + 1],)
    slot, pages = int(args[3][row]), args[1]
    block, offset = divmod(max(slot, 0), pages.shape[3])

    def pick(outputs):
        whole_qkv, whole_pages = outputs
        q, place = whole_qkv[row : row + 1], whole_pages[block, :, :, offset]
        expected = pages.clone()
        if slot >= 0:
            expected[block, :, :, offset] = place
        return q, expected

    return own, pick


_LLAMA = {"heads": 32, "kv_heads": 8, "dim": 128, "half": 64, "block_tokens": 16, "layers": 2}
_QWEN3 = {"heads": 16, "kv_heads": 8, "dim": 128, "half": 64, "norm": "rms", "block_tokens": 16, "layers": 2}
FP8 = torch.float8_e4m3fn

QK_NORM_ROPE_KV = Op(
    name="qk_norm_rope_kv",
    reference=_reference,
    triton=_triton,
    inputs=_inputs,
    cases=(
        Case("neox", {"tokens": 5, "heads": 6, "kv_heads": 2, "dim": 16, "half": 8}),
        Case("interleaved", {"tokens": 3, "heads": 4, "kv_heads": 4, "dim": 24, "half": 12, "interleaved": True}),
        Case("partial", {"tokens": 4, "heads": 7, "kv_heads": 1, "dim": 20, "half": 5}),
        Case(
            "partial-interleaved", {"tokens": 3, "heads": 2, "kv_heads": 1, "dim": 32, "half": 8, "interleaved": True}
        ),
        Case("qk-norm", {"tokens": 4, "heads": 8, "kv_heads": 4, "dim": 16, "half": 8, "norm": "rms"}),
        Case("layer-norm", {"tokens": 3, "heads": 3, "kv_heads": 1, "dim": 12, "half": 3, "norm": "layer"}),
        Case(
            "layer-norm-bias",
            {"tokens": 4, "heads": 3, "kv_heads": 2, "dim": 20, "half": 3, "norm": "layer", "biased": True},
        ),
        Case("norm-no-rope", {"tokens": 3, "heads": 4, "kv_heads": 2, "dim": 16, "half": 0, "norm": "rms"}),
        Case("no-rope", {"tokens": 3, "heads": 4, "kv_heads": 2, "dim": 16, "half": 0}),
        Case("fp8", {"tokens": 4, "heads": 4, "kv_heads": 2, "dim": 16, "half": 0, "pages": FP8}),
        Case("spoiled", {"tokens": 3, "heads": 4, "kv_heads": 2, "dim": 16, "half": 4, "spoiled": True}),
        Case("many-heads", {"tokens": 2, "heads": 24, "kv_heads": 2, "dim": 8, "half": 4}),
        Case("whole", {"tokens": 4, "heads": 5, "kv_heads": 5, "dim": 16, "half": 8, "kept": False}),
        Case(
            "whole-norm",
            {"tokens": 3, "heads": 6, "kv_heads": 2, "dim": 24, "half": 4, "norm": "rms", "kept": False},
        ),
        Case("source", {"tokens": 5, "heads": 0, "kv_heads": 3, "dim": 16, "half": 0}),
        Case("source-fp8", {"tokens": 4, "heads": 0, "kv_heads": 2, "dim": 16, "half": 0, "pages": FP8}),
        Case("empty", {"tokens": 0, "heads": 4, "kv_heads": 2, "dim": 16, "half": 8}),
        Case("llama-decode-256", {"tokens": 256, **_LLAMA}, bench=True),
        Case("llama-4096", {"tokens": 4096, **_LLAMA}, bench=True),
        Case("llama-fp8-4096", {"tokens": 4096, **_LLAMA, "pages": FP8}, bench=True, needs="fp8"),
        Case("qwen3-4096", {"tokens": 4096, **_QWEN3}, bench=True),
        Case(
            "partial-interleaved-4096",
            {
                "tokens": 4096,
                "heads": 32,
                "kv_heads": 2,
                "dim": 128,
                "half": 32,
                "interleaved": True,
                "block_tokens": 16,
            },
            bench=True,
        ),
        Case(
            "layer-norm-4096",
            {"tokens": 4096, "heads": 64, "kv_heads": 8, "dim": 128, "half": 64, "norm": "layer", "block_tokens": 16},
            bench=True,
        ),
        Case(
            "layer-norm-bias-4096",
            {"tokens": 4096, "heads": 64, "kv_heads": 64, "dim": 64, "half": 16, "norm": "layer", "biased": True},
            bench=True,
        ),
        Case(
            "modernbert-8192",
            {"tokens": 8192, "heads": 12, "kv_heads": 12, "dim": 64, "half": 32, "kept": False},
            bench=True,
        ),
    ),
    tolerance={torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2},
    traffic=_traffic,
    compiled=bodies.qk_norm_rope_kv,
    cpu_cases=(
        Case("qwen3-8", {"tokens": 8, **_QWEN3}),
        Case("qwen3-512", {"tokens": 512, **_QWEN3}),
    ),
    compiled_lacks=("fp8", "source-fp8", "whole", "whole-norm"),
    native_layout=bodies.native_layout,
    single_row=_single_row,
    strided=(0,),
)
