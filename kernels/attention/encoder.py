"""Attention of whole sequences over their own keys and values, without a cache: encoders, embedding models, image
towers. kernels/attention/common.py defines the result.

Without `causal` a position sees positions before and after it; a window limits the distance on both sides. A program
computes a block of tokens for one KV head with its whole group of query heads.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels.attention.common import (
    LOG2_E,
    MIN_WIDTH,
    NO_WINDOW,
    attend,
    check_group,
    check_heads,
    check_options,
    final_factor,
    row_of,
    soft_capped,
    softmax_weights,
    with_biases,
)
from kernels.jit import jit, launch, power_of_2, tl
from kernels.op import Args, Case, Make, Op
from kernels.tuning import LARGE_TILES, settings, shared_memory


def _reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start: Tensor,
    out: Tensor,
    scale: float,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    biases: Tensor | None = None,
) -> tuple[Tensor]:
    """q: [tokens, heads, dim]; k, v: [tokens, kv_heads, dim]; query_start: [rows + 1] int32; biases: [heads, 2 ·
    reach + 1] fp32 → out: [tokens, heads, dim]."""
    starts = query_start.tolist()
    for first, stop in zip(starts, starts[1:], strict=False):
        position = torch.arange(stop - first, device=q.device)
        distance = position.unsqueeze(1) - position
        seen = distance.abs() < (window or NO_WINDOW)
        if causal:
            seen &= distance >= 0
        own = q[first:stop], k[first:stop], v[first:stop]
        out[first:stop] = attend(*own, seen, scale, softcap, None, None, biases)
    return (out,)


@jit
def _tiles(
    acc,
    top,
    total,
    q,
    k,
    v,
    k_row,
    v_row,
    position,
    biases,
    heads,
    begin,
    end,
    count,
    scale,
    softcap,
    MASKED: tl.constexpr,
    DIM: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    REACH: tl.constexpr,
    WIDE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Add the tiles from `begin` to `end`. k, v: addresses of the row and head."""
    dim = tl.arange(0, WIDE)[None, :]
    for tile in range(begin, end, TILE):
        key = tile + tl.arange(0, TILE)
        mask = (key < count)[:, None]
        if WIDE != DIM:
            mask &= dim < DIM
        place = key.to(tl.int64)[:, None]
        keys = tl.load(k + place * k_row + dim, mask, 0.0)
        values = tl.load(v + place * v_row + dim, mask, 0.0)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
        if SOFTCAP:
            scores = soft_capped(scores, scale, softcap)
        if REACH:
            scores = with_biases(scores, scale, biases, heads, heads >= 0, key, position, SOFTCAP, REACH)
        if MASKED:
            distance = position[:, None] - key[None, :]
            seen = (distance < WINDOW) & (key < count)[None, :]
            if CAUSAL:
                seen &= distance >= 0
            else:
                seen &= distance > -WINDOW
            scores = tl.where(seen, scores, float("-inf"))
        weight, top, fade = softmax_weights(scores, top, scale, SOFTCAP or REACH > 0)
        total = tl.fma(total, fade, tl.sum(weight, 1))
        acc = tl.dot(weight.to(values.dtype), values, acc * fade[:, None], input_precision="ieee")
    return acc, top, total


@jit(varying=("rows",))
def encoder_attention_kernel(
    q,
    k,
    v,
    query_start,
    biases,
    out,
    rows,
    q_row,
    k_row,
    v_row,
    out_row,
    scale,
    softcap,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    REACH: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program for each block of tokens and KV head."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    BLOCK_Q: tl.constexpr = BLOCK // GROUP
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    row = row_of(block, query_start, rows, BLOCK_Q)
    start = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - start
    low = (block - start // BLOCK_Q - row) * BLOCK_Q
    if low >= count:
        return
    high = tl.minimum(low + BLOCK_Q, count)
    if CAUSAL:
        end = high
        full_end = low + 1
    else:
        end = tl.minimum(high - 1 + WINDOW, count)
        full_end = tl.minimum(low + WINDOW, count)
    begin = tl.maximum(low - WINDOW + 1, 0) // TILE * TILE
    # Between these bounds, all tokens of the block see all keys. Every bound is the start of a tile.
    full = tl.maximum(tl.cdiv(tl.maximum(high - WINDOW, 0), TILE) * TILE, begin)
    full_end = tl.maximum(full_end // TILE * TILE, full)

    member = tl.arange(0, BLOCK)
    live = (member < BLOCK_Q * GROUP) & (low + member // GROUP < count)
    position = tl.minimum(low + member // GROUP, high - 1)  # padding sees the keys of the last token
    dim = tl.arange(0, WIDE)
    mask = live[:, None] & (dim < DIM)[None, :]
    heads = kv_head * GROUP + member % GROUP
    spot = heads[:, None] * DIM + dim[None, :]
    at_token = (start + position).to(tl.int64)[:, None]
    queries = tl.load(q + at_token * q_row + spot, mask, 0.0)
    at_k = k + start.to(tl.int64) * k_row + kv_head * DIM
    at_v = v + start.to(tl.int64) * v_row + kv_head * DIM
    acc = tl.zeros([BLOCK, WIDE], tl.float32)
    top = tl.full([BLOCK], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(3):
        if part == 0:
            tile = begin
            stop = tl.minimum(full, end)
        elif part == 1:
            tile = full
            stop = full_end
        else:
            tile = full_end
            stop = end
        if part != 0 or WINDOW < 1073741824:  # without a window the first masked part is empty
            acc, top, total = _tiles(
                acc,
                top,
                total,
                queries,
                at_k,
                at_v,
                k_row,
                v_row,
                position,
                biases,
                heads,
                tile,
                stop,
                count,
                scale,
                softcap,
                part != 1,
                DIM,
                CAUSAL,
                WINDOW,
                SOFTCAP,
                REACH,
                WIDE,
                TILE,
            )
    result = acc * final_factor(top, total, 0.0, 1.0, False)[:, None]
    tl.store(out + at_token * out_row + spot, result.to(out.dtype.element_ty), mask)


def _settings(q: Tensor, kv_heads: int) -> dict[str, Any]:
    dim = power_of_2(q.shape[2])
    roomy = shared_memory(q.device) >= LARGE_TILES
    if q.dtype.itemsize == 4:
        tile = max(16, min(128, 4096 // dim))
        default = {"block": 64, "tile": tile, "warps": 8, "stages": 2 if roomy or dim <= 128 else 1}
    elif not roomy and dim > 128:
        default = {"block": 64, "tile": 32, "warps": 4, "stages": 2}
    else:
        default = {"block": 128, "tile": 32 if dim > 128 else 64, "warps": 8, "stages": 2 if dim == 128 else 3}
    return settings("encoder_attention", default, q.device, dim=dim, group=q.shape[1] // kv_heads)


def _triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start: Tensor,
    out: Tensor,
    scale: float,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    biases: Tensor | None = None,
) -> tuple[Tensor]:
    check_options(window, softcap, scale)
    tokens, heads, dim = q.shape
    kv_heads = k.shape[1]
    check_group(heads, kv_heads)
    if k.shape != v.shape or k.shape[2] != dim or not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q {tuple(q.shape)} {q.dtype}, k {tuple(k.shape)} {k.dtype}, v {tuple(v.shape)} {v.dtype}")
    rows = query_start.shape[0] - 1
    chosen = _settings(q, kv_heads)
    blocks = tokens // (chosen["block"] // (heads // kv_heads)) + rows
    launch(
        encoder_attention_kernel,
        (blocks if rows else 0, kv_heads),
        q,
        k,
        v,
        query_start,
        query_start if biases is None else biases,
        out,
        rows,
        check_heads(q, "q"),
        check_heads(k, "k"),
        check_heads(v, "v"),
        check_heads(out, "out"),
        scale * LOG2_E,
        softcap or 0.0,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        CAUSAL=causal,
        WINDOW=window or NO_WINDOW,
        SOFTCAP=softcap is not None,
        REACH=0 if biases is None else biases.shape[1] // 2,
        WIDE=max(MIN_WIDTH, power_of_2(dim)),
        BLOCK=chosen["block"],
        TILE=chosen["tile"],
        warps=chosen["warps"],
        stages=chosen["stages"],
    )
    return (out,)


def _inputs(
    make: Make,
    lengths: Sequence[int],
    heads: int,
    kv_heads: int,
    dim: int,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    reach: int = 0,
) -> tuple:
    tokens = sum(lengths)
    q, k, v = (make.normal(tokens, count, dim) for count in (heads, kv_heads, kv_heads))
    start = make.tensor(list(accumulate(lengths, initial=0)))
    biases = make.normal(heads, 2 * reach + 1, dtype=torch.float32) if reach else None
    return q, k, v, start, make.normal(tokens, heads, dim), dim**-0.5, causal, window, softcap, biases


def _single_row(args: Args, row: int) -> tuple[Args, Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]]:
    q, k, v, start, out, *rest = args
    tokens = slice(int(start[row]), int(start[row + 1]))
    own = start[row : row + 2] - start[row]
    return (q[tokens], k[tokens], v[tokens], own, out[tokens], *rest), lambda outputs: (outputs[0][tokens],)


def _flops(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start: Tensor,
    out: Tensor,
    scale: float,
    causal: bool,
    window: int | None,
    *_,
) -> int:
    """Return the operations of the products. On the meta device, without values, all tokens count as one row."""
    counts = [q.shape[0]] if q.is_meta else query_start.diff().tolist()
    pairs = 0
    for count in counts:
        reach = min(count, window or NO_WINDOW)
        below = reach * (reach - 1) // 2 + (count - reach) * (reach - 1)  # of the keys before their token
        pairs += count + below * (1 if causal else 2)
    return 4 * q.shape[1] * q.shape[2] * pairs


def _peer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start: Tensor,
    out: Tensor,
    scale: float,
    causal: bool,
    window: int | None,
    softcap: float | None,
    biases: Tensor | None,
) -> Tensor:
    """Compute with torch's attention. Raise ValueError for rows of different lengths, windows and biases."""
    rows = query_start.shape[0] - 1
    count = q.shape[0] // rows
    if window or biases is not None or not bool((query_start.diff() == count).all()):
        raise ValueError("torch supports only rows of equal length, without a window and without biases")
    dense = (x.unflatten(0, (rows, count)).transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(*dense, is_causal=causal, scale=scale, enable_gqa=True)


BERT = {"heads": 16, "kv_heads": 16, "dim": 64}

ENCODER_ATTENTION = Op(
    name="encoder_attention",
    reference=_reference,
    triton=_triton,
    inputs=_inputs,
    cases=(
        Case("one", {"lengths": (1,), "heads": 2, "kv_heads": 2, "dim": 64}),
        Case("mixed", {"lengths": (7, 0, 64, 129), "heads": 2, "kv_heads": 1, "dim": 32}),
        Case("causal", {"lengths": (65, 3), "heads": 3, "kv_heads": 1, "dim": 80, "causal": True}),
        Case("window", {"lengths": (150, 30), "heads": 2, "kv_heads": 2, "dim": 32, "window": 21}),
        Case("causal-window", {"lengths": (140,), "heads": 2, "kv_heads": 2, "dim": 32, "causal": True, "window": 9}),
        Case("narrow", {"lengths": (5, 20), "heads": 4, "kv_heads": 2, "dim": 8}),
        Case("softcap", {"lengths": (33,), "heads": 2, "kv_heads": 2, "dim": 32, "softcap": 2.0}),
        Case("biases", {"lengths": (7, 0, 64, 129), "heads": 6, "kv_heads": 2, "dim": 32, "reach": 30}),
        Case("biases-window", {"lengths": (150,), "heads": 2, "kv_heads": 2, "dim": 80, "window": 33, "reach": 8}),
        Case("empty", {"lengths": (), "heads": 2, "kv_heads": 2, "dim": 32}),
        Case("64x512", BERT | {"lengths": (512,) * 64}, bench=True),
        Case("16x512-t5", {"lengths": (512,) * 16, "heads": 64, "kv_heads": 64, "dim": 64, "reach": 128}, bench=True),
        Case("ragged", BERT | {"lengths": tuple(range(16, 512, 8))}, bench=True),
        Case("4x8192-window", BERT | {"lengths": (8192,) * 4, "window": 65}, bench=True),
        Case("image-4096", {"lengths": (4096,), "heads": 16, "kv_heads": 16, "dim": 80}, bench=True),
    ),
    tolerance={torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2},
    traffic=lambda q, k, v, *rest: 2 * q.nbytes + k.nbytes + v.nbytes,
    flops=_flops,
    single_row=_single_row,
    rows=lambda args: args[3].shape[0] - 1,
    strided=(0, 1, 2, 4),
    peer=_peer,
    tunable={"block": (64, 128), "tile": (32, 64, 128), "warps": (4, 8), "stages": (2, 3)},
    may_spill=True,  # a few bytes at a few sizes, where a smaller tile would be slower
)
