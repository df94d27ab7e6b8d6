"""Norm, rotary positions and KV cache write between the projection of queries, keys and values and attention:

    q, k ← rope(norm(q), norm(k));  k and v into their pages, q in place

Without pages (attention that reads in both directions and keeps nothing), q and k are changed in place, and v is left
unchanged.

Pages of 8 and 4 bits (kernels/page_codes.py) are written by a kernel of their own, because the smallest and the largest
element of a group are needed before the first is stored, and because 4 bits pair neighbouring dims.

The norm is a root mean square or layer norm of each head, if the model has one (`kind`); rope rotates the first 2 ·
half elements of a head (kernels/rope.py). All is one pass with one rounding at the end.
"""

from typing import Literal

import torch
from torch import Tensor

from kernels.cpu import bodies
from kernels.jit import jit, launch, power_of_2, row_stride, tl
from kernels.op import Args, Case, Make, Op, nbytes
from kernels.page_codes import LIMIT, encode, is_coded, vector_bytes

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
    if is_coded(dtype):
        return encode(x, dtype)
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
    WHOLE: tl.constexpr,
    FP8: tl.constexpr,
    MAX_VALUE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
):
    """One program for a few heads of one token. PAGED: write keys and values to pages. WHOLE: there are no pages, and
    keys are changed in place. Neither: only queries are changed. Elements that rope rotates together are pairs a, b,
    PAIRS wide (without rope: the two halves of a head). The rest of the head, which rope leaves unchanged, is REST
    wide."""
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
    stays = is_qk if WHOLE else q
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


@jit
def _element(row, own, added, at, real, keys, mean, factor, NORM: tl.constexpr, BIASED: tl.constexpr):
    """Load elements of a head. keys: all of them if it is a key, whose norm is computed, else none."""
    x = tl.load(row + at, real, 0.0).to(tl.float32)
    if NORM != "none":
        changed = (x - mean) * factor * tl.load(own + at, real & keys, 0.0)
        if BIASED:
            changed += tl.load(added + at, real & keys, 0.0)
        x = tl.where(keys, changed, x)
    return x


@jit
def _rounded(x):
    """Round to the nearest integer, ties to even, for |x| < 2^22."""
    return (x + 12582912.0) - 12582912.0


@jit(varying=("layer",))
def coded_kv_kernel(
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
    LAYERS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    BIASED: tl.constexpr,
    INT4: tl.constexpr,
    RECORD: tl.constexpr,
    LIMIT: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """One program for the key or value of one head of one token, as even and odd dims, [GROUPS, 16] pairs."""
    token = tl.program_id(0).to(tl.int64)
    unit = tl.program_id(1)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot < 0:
        return
    is_k = unit < KV_HEADS
    group = tl.arange(0, GROUPS)
    pair = group[:, None] * 16 + tl.arange(0, 16)[None, :]
    real = pair < DIM // 2
    keys = pair < tl.where(is_k, DIM // 2, 0)
    row = qkv + token * token_stride + (HEADS + unit) * DIM
    own = weight + (HEADS + unit) * DIM
    added = bias + (HEADS + unit) * DIM
    mean = 0.0
    factor = 1.0
    if NORM != "none":
        even = tl.load(row + 2 * pair, real, 0.0).to(tl.float32)
        odd = tl.load(row + 2 * pair + 1, real, 0.0).to(tl.float32)
        if NORM == "layer":
            mean = tl.sum(tl.sum(even + odd, 1), 0) / DIM
            even = tl.where(real, even - mean, 0.0)
            odd = tl.where(real, odd - mean, 0.0)
        factor = tl.rsqrt(tl.sum(tl.sum(even * even + odd * odd, 1), 0) / DIM + eps)
    even = _element(row, own, added, 2 * pair, real, keys, mean, factor, NORM, BIASED)
    odd = _element(row, own, added, 2 * pair + 1, real, keys, mean, factor, NORM, BIASED)
    if HALF > 0:
        if INTERLEAVED:
            turned = pair < HALF
            c = tl.load(cos + token * HALF + pair, turned, 1.0)
            s = tl.load(sin + token * HALF + pair, turned, 0.0)
            rotated_even = even * c - odd * s
            rotated_odd = odd * c + even * s
            turned &= keys
            even = tl.where(turned, rotated_even, even)
            odd = tl.where(turned, rotated_odd, odd)
        else:
            for side in tl.static_range(2):
                dim = 2 * pair + side
                turned = keys & (dim < 2 * HALF)
                angle = dim % HALF
                other = tl.where(dim < HALF, dim + HALF, dim - HALF)
                partner = _element(row, own, added, other, turned, keys, mean, factor, NORM, BIASED)
                c = tl.load(cos + token * HALF + angle, turned, 1.0)
                s = tl.load(sin + token * HALF + angle, turned, 0.0)
                s = tl.where(dim < HALF, -s, s)
                if side == 0:
                    even = even * c + partner * s
                else:
                    odd = odd * c + partner * s
    even = tl.where(tl.abs(even) < float("inf"), even, 0.0)  # no NaN is less
    odd = tl.where(tl.abs(odd) < float("inf"), odd, 0.0)

    block, offset = slot // BLOCK_TOKENS, slot % BLOCK_TOKENS
    plane = ((block * LAYERS + layer) * 2 + tl.where(is_k, 0, 1)) * BLOCK_TOKENS + offset
    place = pages + (plane * KV_HEADS + tl.where(is_k, unit, unit - KV_HEADS)) * RECORD
    if INT4:
        even = tl.minimum(tl.maximum(even, -LIMIT), LIMIT)
        odd = tl.minimum(tl.maximum(odd, -LIMIT), LIMIT)
        least = tl.min(tl.where(real, tl.minimum(even, odd), LIMIT), 1)
        most = tl.max(tl.where(real, tl.maximum(even, odd), -LIMIT), 1)
        scale = tl.div_rn(most - least, 15.0).to(tl.float16)
        minimum = least.to(tl.float16)
        inverse = tl.where(scale > 0.0, tl.div_rn(1.0, scale.to(tl.float32)), 0.0)[:, None]
        low = tl.maximum(tl.minimum(_rounded((even - minimum.to(tl.float32)[:, None]) * inverse), 15.0), 0.0)
        high = tl.maximum(tl.minimum(_rounded((odd - minimum.to(tl.float32)[:, None]) * inverse), 15.0), 0.0)
        tl.store(place + pair, (low.to(tl.int32) | (high.to(tl.int32) << 4)).to(tl.uint8), real)
        factors = (place + DIM // 2).to(tl.pointer_type(tl.float16)) + group
        tl.store(factors, scale, group < (DIM + 31) // 32)
        tl.store(factors + (DIM + 31) // 32, minimum, group < (DIM + 31) // 32)
    else:
        most = tl.max(tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), 1), 0)
        scale = tl.where(most < 1e-30, 0.0, tl.div_rn(most, 127.0))
        divisor = tl.where(scale > 0.0, scale, 1.0)
        even = tl.maximum(tl.minimum(_rounded(tl.div_rn(even, divisor)), 127.0), -127.0)
        odd = tl.maximum(tl.minimum(_rounded(tl.div_rn(odd, divisor)), 127.0), -127.0)
        tl.store(place + 2 * pair, tl.where(scale > 0.0, even, 0.0).to(tl.int8), real)
        tl.store(place + 2 * pair + 1, tl.where(scale > 0.0, odd, 0.0).to(tl.int8), real)
        tl.store((place + DIM).to(tl.pointer_type(tl.float32)), scale)


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
    norm = "none" if weight is None else kind
    coded = pages is not None and is_coded(pages.dtype)
    given = (
        qkv if pages is None else pages,
        qkv if slot_mapping is None else slot_mapping,
        qkv if weight is None else weight,
        qkv if bias is None else bias,
        qkv if cos is None else cos,
        qkv if sin is None else sin,
        row_stride(qkv, "qkv"),
        layer,
        eps,
    )
    sizes = {
        "LAYERS": 1 if pages is None else pages.shape[1],
        "BLOCK_TOKENS": 1 if pages is None else pages.shape[3],
        "HEADS": heads,
        "KV_HEADS": qk_heads - heads,
        "DIM": dim,
        "HALF": half,
        "INTERLEAVED": interleaved,
        "NORM": norm,
        "BIASED": bias is not None,
    }
    if coded and pages is not None:
        if dim % 4 or (k_scale, v_scale) != (1.0, 1.0):
            raise ValueError(f"pages of 8 and 4 bits need a multiple of 4 dims, not {dim}, and no scales of their own")
        launch(
            coded_kv_kernel,
            (tokens, all_heads - heads),
            qkv,
            *given,
            **sizes,
            INT4=pages.dtype == torch.uint8,
            RECORD=pages.shape[-1],
            LIMIT=LIMIT,
            GROUPS=power_of_2(-(-dim // 32)),
            warps=1,
        )
    changed = qk_heads if pages is None else heads if coded else all_heads
    if changed:
        launch(
            qk_norm_rope_kv_kernel,
            (tokens, -(-changed // HEADS_AT_ONCE)),
            qkv,
            *given,
            1.0 / k_scale,
            1.0 / v_scale,
            **sizes,
            PAGED=pages is not None and not coded,
            WHOLE=pages is None,
            FP8=pages is not None and pages.dtype == torch.float8_e4m3fn,
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
    blocks, size = tokens // block_tokens + 2, vector_bytes(dim, pages or make.dtype)
    slot_mapping = make.permutation(blocks * block_tokens)[:tokens].contiguous()
    if tokens > 2 and not make.meta:
        slot_mapping[1] = -1  # a padded token
    weight = None if norm is None else make.normal(heads + kv_heads, dim, dtype=torch.float32)
    angles = make.normal(tokens, half, dtype=torch.float32, scale=3.0) if half else None
    qkv = make.normal(tokens, heads + 2 * kv_heads, dim)
    if pages == FP8 and not half:
        # Numbers that fit into 8 bits, and some too large: the interpreter does not round to 8 bits as a GPU does.
        qkv = qkv.mul_(8).to(pages).to(make.dtype)
    if spoiled:
        qkv[0, heads, 0], qkv[-1, heads + kv_heads, 1], qkv[-1, -1, -1] = torch.nan, torch.inf, -torch.inf
    return (
        qkv,
        make.zeros(blocks, layers, 2, block_tokens, kv_heads, size, dtype=pages) if kept else None,
        layers - 1,
        slot_mapping if kept else None,
        heads,
        weight,
        norm or "rms",
        1e-6,
        None if angles is None else angles.cos(),
        None if angles is None else angles.sin(),
        interleaved,
        0.0625 if pages == FP8 else 1.0,
        0.03125 if pages == FP8 else 1.0,
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
    written = 2 * qkv.shape[0] * pages[0, 0, 0, 0].nbytes
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
_CODED = {
    "plain": {"kv_heads": 2, "dim": 16, "half": 0},
    "neox": {"kv_heads": 2, "dim": 64, "half": 32, "norm": "rms"},
    "partial": {"kv_heads": 1, "dim": 80, "half": 5, "norm": "layer", "biased": True},
    "interleaved": {"kv_heads": 3, "dim": 24, "half": 8, "interleaved": True, "spoiled": True},
}

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
        *(
            Case(f"{name}-{pages}", {"tokens": 4, "heads": 5, **sizes, "pages": dtype})
            for pages, dtype in (("int8", torch.int8), ("int4", torch.uint8))
            for name, sizes in _CODED.items()
        ),
        Case("empty", {"tokens": 0, "heads": 4, "kv_heads": 2, "dim": 16, "half": 8}),
        Case("llama-decode-256", {"tokens": 256, **_LLAMA}, bench=True),
        Case("llama-4096", {"tokens": 4096, **_LLAMA}, bench=True),
        Case("llama-fp8-4096", {"tokens": 4096, **_LLAMA, "pages": FP8}, bench=True, needs="fp8"),
        Case("llama-int8-4096", {"tokens": 4096, **_LLAMA, "pages": torch.int8}, bench=True),
        Case("llama-int4-4096", {"tokens": 4096, **_LLAMA, "pages": torch.uint8}, bench=True),
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
