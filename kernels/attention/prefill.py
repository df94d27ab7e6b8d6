"""Attention of rows with several new tokens over their pages. kernels/attention/common.py defines the result.

The pages of a row hold the earlier tokens (a cached prefix, earlier chunks) and the new ones. Tokens of a span also see
each other in both directions (the patches of an image in a prefix language model): position p with the span (begin,
end) sees all positions begin … end - 1 that are computed so far, regardless of the window, but none before the first
position that its row reads.

A program computes a block of tokens for one KV head with its whole group of query heads, over tiles of keys that begin
at multiples of their size, in ascending order. A tile that a token does not see leaves its sums unchanged, so its
result depends neither on the other rows nor on how a prompt is cut into chunks, unless the schedule divides the keys of
few blocks among several programs. A second launch adds up their sums. Tiles that all tokens of the block see
are computed without a mask, in a separate loop.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels.attention.common import (
    FP8,
    INT4,
    INT8,
    LOG2_E,
    MIN_WIDTH,
    NO_WINDOW,
    add_scaled,
    attend,
    biased,
    causal,
    check_heads,
    check_options,
    check_pages,
    compute_type,
    final_factor,
    first_key,
    gather_kv,
    key_counts,
    page_elements,
    page_kind,
    paged_inputs,
    paged_traffic,
    slopes_of,
    soft_capped,
    softmax_weights,
    to_product_type,
    unpack_pair,
    with_biases,
)
from kernels.attention.prefill_schedule import PREFILL_SCHEDULE, empty_schedule, max_items, max_splits
from kernels.cpu import bodies
from kernels.jit import jit, launch, power_of_2, tl
from kernels.op import Args, Case, Make, Op
from kernels.tuning import LARGE_TILES, settings, shared_memory


def _reference(
    q: Tensor,
    pages: Tensor,
    layer: int,
    table: Tensor,
    slot: Tensor,
    query_start: Tensor,
    lengths: Tensor,
    out: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    spans: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    key_starts: Tensor | None = None,
    slopes: Tensor | None = None,
    chunk: int | None = None,
    biases: Tensor | None = None,
    schedule: Tensor | None = None,
) -> tuple[Tensor]:
    """q: [tokens, heads, dim]; pages: [blocks, layers, 2, block_tokens, kv_heads, dim] of q's type, or see common.py;
    table: [slots, blocks] int32, where line slot[i] belongs to row i of the step; slot, lengths: [rows] int32;
    query_start: [rows + 1] int32; sinks, slopes: [heads] fp32; spans: [tokens, 2] int32, begin and end of each token's
    span, equal for none; key_starts: [rows] int32, the first position that a row reads, not after the position of its
    first token, None: 0; biases: [heads, 2 · reach + 1] fp32, without slopes; schedule: from
    `prefill_schedule` for these rows, None: without splits → out: [tokens, heads, dim]. Only rows of
    several tokens are written."""
    bt = pages.shape[3]
    starts = query_start.tolist()
    for row, (first, stop) in enumerate(zip(starts, starts[1:], strict=False)):
        if stop - first < 2:
            continue
        length = int(lengths[row])
        position = torch.arange(length - (stop - first), length, device=q.device)
        lowest = 0 if key_starts is None else int(key_starts[row])
        begin = first_key(int(position[0]), window, chunk)
        if spans is not None:
            own = spans[first:stop]
            inside = own[own[:, 0] < own[:, 1]]
            begin = min([begin, *inside[:, 0].tolist()])
        begin = max(begin, lowest) // bt * bt
        k, v = gather_kv(pages, layer, table[slot[row], begin // bt : -(-length // bt)], k_scale, v_scale)
        key = torch.arange(begin, length, device=q.device)
        seen = causal(position, key, window, chunk)
        if spans is not None:
            seen |= (key >= own[:, :1]) & (key < own[:, 1:])
        seen &= key >= lowest
        read = k[: key.shape[0]], v[: key.shape[0]]
        out[first:stop] = attend(q[first:stop], *read, seen, scale, softcap, sinks, slopes, biases)
    return (out,)


@jit
def _load(place, index, keep, mask, DIM: tl.constexpr, KIND: tl.constexpr, TYPE: tl.constexpr):
    """Load keys or values in the type of products; for 8-bit and 4-bit pages the even and the odd dims. place: where
    each vector begins; keep: which vectors are read; mask: and which of their elements."""
    if KIND == "wide":
        return tl.load(place + index, mask, 0.0).to(TYPE), 0.0
    else:
        first, second = unpack_pair(tl.load(place + index, mask, 0), place, index, keep, KIND, DIM)
        return first.to(TYPE), second.to(TYPE)


@jit
def _tiles(
    acc,
    acc_2,
    top,
    total,
    q_1,
    q_2,
    pages,
    line,
    layer,
    kv_head,
    position,
    slope,
    biases,
    heads,
    span_begin,
    span_end,
    begin,
    end,
    lowest,
    length,
    scale,
    softcap,
    MASKED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    LAYERS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    KEY_STARTS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    REACH: tl.constexpr,
    SPANS: tl.constexpr,
    KIND: tl.constexpr,
    RECORD: tl.constexpr,
    TYPE: tl.constexpr,
    WIDE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Add the tiles from `begin` to `end`, multiples of TILE. Keys before `lowest` are not read."""
    PAIRS: tl.constexpr = KIND != "wide"
    ELEMENTS: tl.constexpr = 2 if PAIRS else 1  # numbers of the pages in each loaded element
    PAGE: tl.constexpr = BLOCK_TOKENS * KV_HEADS * RECORD
    dim = tl.arange(0, WIDE)[None, :]
    key = begin + tl.arange(0, TILE)
    # Block ids are loaded one tile ahead, so that the loads of several tiles can overlap.
    block = tl.load(line + key // BLOCK_TOKENS, key < length, 0)
    for tile in range(begin, end, TILE):
        key = tile + tl.arange(0, TILE)
        place = (block.to(tl.int64) * LAYERS + layer) * (2 * PAGE)
        place += (key % BLOCK_TOKENS * KV_HEADS + kv_head) * RECORD
        block = tl.load(line + (key + TILE) // BLOCK_TOKENS, key + TILE < length, 0)
        keep = (key < length)[:, None]
        if KEY_STARTS and MASKED:
            keep &= (key >= lowest)[:, None]
        mask = keep
        if WIDE != DIM // ELEMENTS:
            mask &= dim < DIM // ELEMENTS
        at_k = pages + place[:, None]
        k_1, k_2 = _load(at_k, dim, keep, mask, DIM, KIND, TYPE)
        v_1, v_2 = _load(at_k + PAGE, dim, keep, mask, DIM, KIND, TYPE)
        scores = tl.dot(q_1, tl.trans(k_1), input_precision="ieee")
        if PAIRS:
            scores = tl.dot(q_2, tl.trans(k_2), scores, input_precision="ieee")
        if SOFTCAP:
            scores = soft_capped(scores, scale, softcap)
        if ALIBI:
            scores = biased(scores, scale, slope, key, position, SOFTCAP)
        if REACH:
            scores = with_biases(scores, scale, biases, heads, heads >= 0, key, position, SOFTCAP, REACH)
        if MASKED:
            seen = (key[None, :] <= position[:, None]) & (key[None, :] > position[:, None] - WINDOW)
            if CHUNK:
                seen &= key[None, :] >= (position // CHUNK * CHUNK)[:, None]
            if SPANS:
                seen |= (key[None, :] >= span_begin[:, None]) & (key[None, :] < span_end[:, None])
            if KEY_STARTS:
                seen &= (key >= lowest)[None, :]
            scores = tl.where(seen & (key < length)[None, :], scores, float("-inf"))
        weight, top, fade = softmax_weights(scores, top, scale, SOFTCAP or ALIBI or REACH > 0)
        total = tl.fma(total, fade, tl.sum(weight, 1))
        acc = tl.dot(weight.to(TYPE), v_1, acc * fade[:, None], input_precision="ieee")
        if PAIRS:
            acc_2 = tl.dot(weight.to(TYPE), v_2, acc_2 * fade[:, None], input_precision="ieee")
    return acc, acc_2, top, total


@jit(varying=("layer", "table_row"))
def prefill_attention_kernel(
    q,
    pages,
    table,
    slot,
    query_start,
    lengths,
    key_starts,
    schedule,
    sinks,
    slopes,
    biases,
    spans,
    out,
    sums,
    stats,
    layer,
    q_row,
    out_row,
    table_row,
    scale,
    softcap,
    v_scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    LAYERS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    KEY_STARTS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    ALIBI: tl.constexpr,
    REACH: tl.constexpr,
    SPANS: tl.constexpr,
    KIND: tl.constexpr,
    RECORD: tl.constexpr,
    TYPE: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    DIVIDED: tl.constexpr,
):
    """One program for each item of the schedule and KV head."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    BLOCK_Q: tl.constexpr = BLOCK // GROUP
    item = tl.program_id(0)
    kv_head = tl.program_id(1)
    if item >= tl.load(schedule):
        return
    entry = schedule + (1 + item) * 4
    row = tl.load(entry)
    first = tl.load(entry + 1)
    start = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - start
    length = tl.load(lengths + row)
    line = table + tl.load(slot + row).to(tl.int64) * table_row
    member = tl.arange(0, BLOCK)
    token = first + member // GROUP
    live = (member < BLOCK_Q * GROUP) & (token < count)
    low = length - count + first
    high = tl.minimum(low + BLOCK_Q, length)  # of the positions of this block
    position = tl.minimum(length - count + token, high - 1)  # padding sees the keys of the last token
    begin = low // CHUNK * CHUNK if CHUNK else tl.maximum(low - WINDOW + 1, 0)
    end = high
    if SPANS:
        at_span = spans + (start + token) * 2
        span_begin = tl.load(at_span, live, 0)
        span_end = tl.load(at_span + 1, live, 0)
        some = span_begin < span_end
        begin = tl.minimum(begin, tl.min(tl.where(some, span_begin, begin), 0))
        end = tl.minimum(tl.maximum(end, tl.max(tl.where(some, span_end, end), 0)), length)
    else:
        span_begin = 0
        span_end = 0
    lowest = 0
    if KEY_STARTS:
        lowest = tl.load(key_starts + row)
        begin = tl.maximum(begin, lowest)
    begin = begin // TILE * TILE
    # Between these bounds, all tokens of the block see all keys. Every bound is the start of a tile.
    seen_from = (high - 1) // CHUNK * CHUNK if CHUNK else high - WINDOW
    full = tl.maximum(tl.cdiv(tl.maximum(seen_from, lowest), TILE) * TILE, begin)
    full_end = tl.maximum((low + 1) // TILE * TILE, full)
    if DIVIDED:
        splits = tl.load(entry + 3)
        own = tl.cdiv(tl.cdiv(end - begin, TILE), splits) * TILE
        begin = begin + tl.load(entry + 2) * own
        end = tl.minimum(begin + own, end)
        full = tl.minimum(tl.maximum(full, begin), tl.maximum(end, begin))
        full_end = tl.minimum(tl.maximum(full_end, begin), tl.maximum(end, begin))

    heads = kv_head * GROUP + member % GROUP
    slope = tl.load(slopes + heads) if ALIBI else 0.0
    PAIRS: tl.constexpr = KIND != "wide"
    ELEMENTS: tl.constexpr = 2 if PAIRS else 1
    dim = tl.arange(0, WIDE) * ELEMENTS
    spot = heads[:, None] * DIM + dim[None, :]
    mask = live[:, None] & (dim < DIM)[None, :]
    at_token = (start + token).to(tl.int64)[:, None]
    q_1 = to_product_type(tl.load(q + at_token * q_row + spot, mask, 0.0), TYPE)
    q_2 = to_product_type(tl.load(q + at_token * q_row + spot + 1, mask, 0.0), TYPE) if PAIRS else 0.0
    acc = tl.zeros([BLOCK, WIDE], tl.float32)
    acc_2 = tl.zeros([BLOCK, WIDE], tl.float32) if PAIRS else 0.0
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
        if (
            part != 0 or WINDOW < 1073741824 or CHUNK > 0 or KEY_STARTS
        ):  # without these all begins where nothing is masked
            acc, acc_2, top, total = _tiles(
                acc,
                acc_2,
                top,
                total,
                q_1,
                q_2,
                pages,
                line,
                layer,
                kv_head,
                position,
                slope,
                biases,
                heads,
                span_begin,
                span_end,
                tile,
                stop,
                lowest,
                length,
                scale,
                softcap,
                part != 1,
                KV_HEADS,
                DIM,
                LAYERS,
                BLOCK_TOKENS,
                WINDOW,
                CHUNK,
                KEY_STARTS,
                SOFTCAP,
                ALIBI,
                REACH,
                SPANS,
                KIND,
                RECORD,
                TYPE,
                WIDE,
                TILE,
            )
    if DIVIDED:  # noqa: SIM102  a kernel evaluates both sides of `and`
        if splits > 1:
            # [item, KV head]: sums [BLOCK, DIM], maximum and weights [BLOCK]. The reduction reads them.
            unit = (item * KV_HEADS + kv_head).to(tl.int64)
            place = sums + unit * (BLOCK * DIM) + member[:, None] * DIM + dim[None, :]
            tl.store(place, acc, mask)
            if PAIRS:
                tl.store(place + 1, acc_2, mask)
            tl.store(stats + unit * (2 * BLOCK) + member, top)
            tl.store(stats + unit * (2 * BLOCK) + BLOCK + member, total)
            return
    sink = tl.load(sinks + heads) if SINKS else 0.0
    factor = final_factor(top, total, sink, v_scale, SINKS)[:, None]
    at_out = out + at_token * out_row + spot
    tl.store(at_out, (acc * factor).to(out.dtype.element_ty), mask)
    if PAIRS:
        tl.store(at_out + 1, (acc_2 * factor).to(out.dtype.element_ty), mask)


@jit
def prefill_reduce_kernel(
    query_start,
    schedule,
    sinks,
    out,
    sums,
    stats,
    out_row,
    v_scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    SINKS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
):
    """Add up the splits of each block in order. One program for PART members of an item that is a block's first
    split."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    BLOCK_Q: tl.constexpr = BLOCK // GROUP
    item = tl.program_id(0)
    kv_head = tl.program_id(1)
    entry = schedule + (1 + item) * 4
    splits = tl.load(entry + 3)
    if (item >= tl.load(schedule)) | (splits < 2) | (tl.load(entry + 2) > 0):
        return
    row = tl.load(entry)
    first = tl.load(entry + 1)
    start = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - start
    member = tl.program_id(2) * PART + tl.arange(0, PART)
    token = first + member // GROUP
    live = (member < BLOCK_Q * GROUP) & (token < count)
    dim = tl.arange(0, WIDE)
    mask = live[:, None] & (dim < DIM)[None, :]
    acc = tl.zeros([PART, WIDE], tl.float32)
    top = tl.full([PART], -1.0e30, tl.float32)
    total = tl.zeros([PART], tl.float32)
    for split in range(0, splits):
        unit = ((item - split) * KV_HEADS + kv_head).to(tl.int64)  # later splits come before in the schedule
        part = tl.load(sums + unit * (BLOCK * DIM) + member[:, None] * DIM + dim[None, :], mask, 0.0)
        part_top = tl.load(stats + unit * (2 * BLOCK) + member)
        best = tl.maximum(top, part_top)
        keep = tl.exp2(top - best)
        add = tl.exp2(part_top - best)
        acc = add_scaled(acc, keep, part, add)
        total = tl.fma(total, keep, tl.load(stats + unit * (2 * BLOCK) + BLOCK + member) * add)
        top = best
    heads = kv_head * GROUP + member % GROUP
    sink = tl.load(sinks + heads) if SINKS else 0.0
    factor = final_factor(top, total, sink, v_scale, SINKS)[:, None]
    place = out + (start + token).to(tl.int64)[:, None] * out_row + heads[:, None] * DIM + dim[None, :]
    tl.store(place, (acc * factor).to(out.dtype.element_ty), mask)


def tokens_of_block(q: Tensor, pages: Tensor, window: int | None) -> int:
    """Return the tokens of a block, for the schedule. q: [tokens, heads, dim]."""
    block: int = _settings(q, pages, window)["block"]
    return block // (q.shape[1] // pages.shape[4])


def _settings(q: Tensor, pages: Tensor, window: int | None) -> dict[str, Any]:
    """Use tiles of 128 keys if registers and shared memory suffice, because each tile multiplies all previous sums once
    more."""
    dim = power_of_2(q.shape[2])
    size = pages.dtype.itemsize
    roomy = shared_memory(q.device) >= LARGE_TILES
    if q.dtype.itemsize == 4:
        tile = max(16, min(128, 4096 // dim))
        default = {"block": 64, "tile": tile, "warps": 8, "stages": 2 if roomy or dim <= 128 else 1}
    elif not roomy and dim > 128:
        default = {"block": 64, "tile": 32, "warps": 4, "stages": 2}
    elif dim == 128 and window is None and roomy:
        # With two stages, Hopper's pipeline would wait for the loads of each tile.
        default = {"block": 128, "tile": 128, "warps": 8, "stages": 3}
    else:
        default = {"block": 128, "tile": 32 if dim > 128 else 64, "warps": 8, "stages": 3 if roomy else 2}
    group = q.shape[1] // pages.shape[4]
    return settings("prefill_attention", default, q.device, dim=dim, size=size, group=group)


def _triton(
    q: Tensor,
    pages: Tensor,
    layer: int,
    table: Tensor,
    slot: Tensor,
    query_start: Tensor,
    lengths: Tensor,
    out: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    spans: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    key_starts: Tensor | None = None,
    slopes: Tensor | None = None,
    chunk: int | None = None,
    biases: Tensor | None = None,
    schedule: Tensor | None = None,
) -> tuple[Tensor]:
    check_options(window, softcap, scale, chunk)
    check_pages(q, pages)
    tokens, heads, dim = q.shape
    _, layers, _, block_tokens, kv_heads, _ = pages.shape
    rows = lengths.shape[0]
    kind, elements = page_kind(pages), page_elements(pages)
    chosen = _settings(q, pages, window)
    block = chosen["block"]
    programs = 0  # of the schedule, if it divides keys
    if schedule is None:
        schedule = PREFILL_SCHEDULE(query_start, lengths, tokens, block // (heads // kv_heads), 0)
    else:
        programs = len(schedule) - 1 - max_items(tokens, rows, block // (heads // kv_heads), 0)
    splits = max_splits(programs)
    sums = torch.empty((splits, kv_heads, block, dim), dtype=torch.float32, device=q.device)
    stats = torch.empty((splits, kv_heads, 2, block), dtype=torch.float32, device=q.device)
    grid = len(schedule) - 1 if rows else 0
    launch(
        prefill_attention_kernel,
        (grid, kv_heads),
        q,
        elements,
        table,
        slot,
        query_start,
        lengths,
        lengths if key_starts is None else key_starts,
        schedule,
        lengths if sinks is None else sinks,
        lengths if slopes is None else slopes,
        lengths if biases is None else biases,
        lengths if spans is None else spans,
        out,
        sums,
        stats,
        layer,
        check_heads(q, "q"),
        check_heads(out, "out"),
        table.stride(0),
        scale * k_scale * LOG2_E,
        softcap or 0.0,
        v_scale,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        LAYERS=layers,
        BLOCK_TOKENS=block_tokens,
        WINDOW=window or NO_WINDOW,
        CHUNK=chunk or 0,
        KEY_STARTS=key_starts is not None,
        SOFTCAP=softcap is not None,
        SINKS=sinks is not None,
        ALIBI=slopes is not None,
        REACH=0 if biases is None else biases.shape[1] // 2,
        SPANS=spans is not None,
        KIND=kind,
        RECORD=elements.shape[-1],
        TYPE=compute_type(q, pages),
        WIDE=max(MIN_WIDTH, power_of_2(dim) // (1 if kind == "wide" else 2)),
        BLOCK=block,
        TILE=chosen["tile"],
        DIVIDED=programs > 0,
        warps=chosen["warps"],
        stages=chosen["stages"],
    )
    if programs:
        part = max(1, min(block, 2048 // power_of_2(dim)))
        launch(
            prefill_reduce_kernel,
            (min(splits, grid), kv_heads, block // part),
            query_start,
            schedule,
            lengths if sinks is None else sinks,
            out,
            sums,
            stats,
            check_heads(out, "out"),
            v_scale,
            HEADS=heads,
            KV_HEADS=kv_heads,
            DIM=dim,
            SINKS=sinks is not None,
            WIDE=power_of_2(dim),
            BLOCK=block,
            PART=part,
        )
    return (out,)


def _inputs(
    make: Make,
    rows: Sequence[tuple[int, int]],
    heads: int,
    kv_heads: int,
    dim: int,
    block_tokens: int = 16,
    layers: int = 1,
    kept: torch.dtype | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    spans: Sequence[tuple[int, int, int]] = (),
    key_starts: Sequence[int] = (),
    alibi: bool = False,
    chunk: int | None = None,
    reach: int = 0,
    programs: int = 0,
) -> tuple:
    """spans: row, begin and end of each. key_starts: first position of each row; empty: all 0. programs: among which
    the keys of the step's blocks are divided."""
    q, pages, table, slot, query_start, lengths, out = paged_inputs(
        make, rows, heads, kv_heads, dim, block_tokens, layers, kept, *((None, None) if spans else (window, chunk))
    )
    inside = [[0, 0] for _ in range(q.shape[0])]
    for row, begin, end in spans:
        first = sum(count for count, _ in rows[:row]) - (rows[row][1] - rows[row][0])
        inside[first + begin : first + end] = [[begin, end]] * (end - begin)
    scales = (0.5, 2.0) if kept == FP8 else (1.0, 1.0)
    schedule = None
    if programs:
        sizes = q.shape[0], tokens_of_block(q, pages, window), programs
        if make.meta:
            schedule = empty_schedule(lengths, *sizes)
        else:
            schedule = PREFILL_SCHEDULE.reference(query_start, lengths, *sizes)
    return (
        *(q, pages, layers - 1, table, slot, query_start, lengths, out, dim**-0.5, window, softcap),
        *(make.normal(heads, dtype=torch.float32) if sinks else None, make.tensor(inside) if spans else None, *scales),
        make.tensor(key_starts) if key_starts else None,
        slopes_of(make, heads) if alibi else None,
        chunk,
        make.normal(heads, 2 * reach + 1, dtype=torch.float32) if reach else None,
        schedule,
    )


def _single_row(args: Args, row: int) -> tuple[Args, Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]]:
    q, pages, layer, table, slot, query_start, lengths, out, scale, window, softcap, sinks, spans, *rest = args
    *scales, key_starts, slopes, chunk, biases, schedule = rest
    tokens = slice(int(query_start[row]), int(query_start[row + 1]))
    start, length = query_start[row : row + 2] - query_start[row], lengths[row : row + 1]
    own_spans = None if spans is None else spans[tokens]
    begin = None if key_starts is None else key_starts[row : row + 1]
    own = (q[tokens], pages, layer, table, slot[row : row + 1], start, length, out[tokens], scale, window, softcap)
    if schedule is not None:
        items = schedule[1 : 1 + int(schedule[0, 0])]
        items = items[items[:, 0] == row].clone()
        items[:, 0] = 0
        block = tokens_of_block(q, pages, window)
        programs = len(schedule) - 1 - max_items(len(q), len(lengths), block, 0)
        schedule = schedule.new_zeros(1 + max_items(tokens.stop - tokens.start, 1, block, programs), 4)
        schedule[0, 0], schedule[1 : 1 + len(items)] = len(items), items
    more = begin, slopes, chunk, biases, schedule
    return (*own, sinks, own_spans, *scales, *more), lambda outputs: (outputs[0][tokens],)


def num_scores(query_start: Tensor, lengths: Tensor, window: int | None, chunk: int | None = None) -> int:
    """Return the number of pairs of a token and a key that it sees, in rows of several tokens. lengths: see
    `key_counts`."""
    pairs = 0
    for count, length in zip(query_start.diff().tolist(), lengths.tolist(), strict=True):
        if chunk is not None:
            pairs += sum(at % chunk + 1 for at in range(length - count, length)) if count > 1 else 0
            continue
        most = min(length, window or NO_WINDOW)  # of the last token
        growing = max(0, min(count, most - (length - count)))  # tokens before which the window does not begin
        first = length - count + 1
        if count > 1:
            pairs += growing * (2 * first + growing - 1) // 2 + (count - growing) * most
    return pairs


def _flops(q: Tensor, pages: Tensor, layer: int, table: Tensor, slot: Tensor, *rest: Any) -> int:
    query_start, lengths, _, _, window, *_, key_starts, _, chunk, _, _ = rest
    if lengths.is_meta:
        return 2 * q[:, :, 0].numel() * q.shape[0] * q.shape[2]
    return 4 * q.shape[1] * q.shape[2] * num_scores(query_start, key_counts(lengths, key_starts), window, chunk)


def _traffic(q: Tensor, pages: Tensor, layer: int, table: Tensor, slot: Tensor, *rest: Any) -> int:
    query_start, lengths, _, _, window, *_, key_starts, _, chunk, _, _ = rest
    return paged_traffic(q, pages, query_start, key_counts(lengths, key_starts), window, single=False, chunk=chunk)


def _peer(q: Tensor, pages: Tensor, layer: int, table: Tensor, slot: Tensor, *rest: Any) -> Tensor:
    """Compute with torch's attention over dense keys. The queries serve as keys, because only the time matters. Raise
    ValueError for rows of different sizes and for options that torch lacks."""
    query_start, lengths, out, scale, window, softcap, sinks, spans, _, _, *added, _ = rest
    rows, kv_heads = lengths.shape[0], pages.shape[4]
    count, length = q.shape[0] // rows, int(lengths[0])
    alike = bool((lengths == length).all()) and bool((query_start.diff() == count).all())
    limited = any(given is not None for given in (window, softcap, sinks, spans, *added))
    if not alike or limited:
        raise ValueError(
            "torch supports only rows of equal length, without window, chunk, softcap, sinks, spans, key_starts, "
            "slopes and biases"
        )
    query = q.unflatten(0, (rows, count)).transpose(1, 2)
    keys = query[:, :kv_heads]
    if length > count:
        keys = keys.repeat(1, 1, -(-length // count), 1)[:, :, :length]
    # Imported here because this module imports torch._dynamo, hence sympy, which would cost every engine 70 MB.
    from torch.nn.attention.bias import causal_lower_right

    mask = causal_lower_right(count, length)
    return scaled_dot_product_attention(query, keys, keys, attn_mask=mask, scale=scale, enable_gqa=True)


LLAMA = {"heads": 32, "kv_heads": 8, "dim": 128}
SMALL = {"heads": 4, "kv_heads": 2, "dim": 32, "block_tokens": 4, "layers": 2}

PREFILL_ATTENTION = Op(
    name="prefill_attention",
    reference=_reference,
    triton=_triton,
    inputs=_inputs,
    cases=(
        Case("one", SMALL | {"rows": ((2, 2),)}),
        Case("mixed", SMALL | {"rows": ((9, 40), (1, 30), (0, 0), (70, 70), (2, 131)), "heads": 6}),
        Case("narrow", SMALL | {"rows": ((50, 90), (3, 5)), "dim": 8}),
        Case("narrow-fp8", SMALL | {"rows": ((20, 30),), "dim": 16, "kept": FP8}),
        Case("window", SMALL | {"rows": ((50, 190), (3, 5)), "window": 20, "sinks": True, "dim": 80}),
        Case("group", SMALL | {"rows": ((33, 150),), "heads": 7, "kv_heads": 1, "softcap": 3.0, "block_tokens": 13}),
        Case("spans", SMALL | {"rows": ((60, 100), (5, 9)), "spans": ((0, 43, 50), (0, 60, 99), (1, 6, 8))}),
        Case("fp8", SMALL | {"rows": ((20, 90), (4, 4)), "dim": 96, "kept": FP8}),
        Case(
            "key-starts",
            SMALL
            | {"rows": ((9, 40), (1, 30), (0, 0), (70, 290), (2, 131), (70, 70))}
            | {"key_starts": (31, 3, 5, 133, 129, 0), "softcap": 3.0},
        ),
        Case(
            "key-starts-window",
            SMALL | {"rows": ((50, 190), (30, 160), (3, 5)), "key_starts": (135, 7, 2), "window": 20, "sinks": True},
        ),
        Case(
            "key-starts-spans",
            SMALL
            | {"rows": ((60, 100), (5, 9)), "key_starts": (35, 3), "spans": ((0, 43, 50), (0, 60, 99), (1, 5, 8))},
        ),
        Case("key-starts-fp8", SMALL | {"rows": ((20, 90), (4, 4)), "dim": 96, "kept": FP8, "key_starts": (66, 0)}),
        Case("alibi", SMALL | {"rows": ((9, 40), (1, 30), (0, 0), (70, 70), (2, 131)), "heads": 6, "alibi": True}),
        Case(
            "alibi-group",
            SMALL
            | {"rows": ((33, 150),), "heads": 7, "kv_heads": 1, "softcap": 3.0, "block_tokens": 13, "alibi": True},
        ),
        Case("alibi-fp8", SMALL | {"rows": ((20, 90), (4, 4)), "dim": 96, "kept": FP8, "alibi": True, "sinks": True}),
        Case("biases", SMALL | {"rows": ((9, 40), (1, 30), (0, 0), (70, 70), (2, 131)), "heads": 6, "reach": 20}),
        Case(
            "biases-group",
            SMALL
            | {"rows": ((33, 150),), "heads": 7, "kv_heads": 1, "softcap": 3.0, "block_tokens": 13, "reach": 100}
            | {"key_starts": (75,)},
        ),
        Case("biases-fp8", SMALL | {"rows": ((20, 90), (4, 4)), "dim": 96, "kept": FP8, "reach": 7}),
        Case("chunk", SMALL | {"rows": ((70, 300), (40, 40), (3, 66), (1, 9)), "chunk": 33, "sinks": True}),
        Case("chunk-tiles", SMALL | {"rows": ((70, 300), (9, 700)), "chunk": 256, "block_tokens": 13}),
        Case("chunk-fp8", SMALL | {"rows": ((50, 90), (4, 4)), "dim": 96, "kept": FP8, "chunk": 20}),
        Case("empty", SMALL | {"rows": ()}),
        Case("split", SMALL | {"rows": ((9, 1100), (1, 30), (3, 700)), "programs": 9}),
        Case("split-window", SMALL | {"rows": ((5, 1100), (3, 5)), "window": 600, "sinks": True, "programs": 7}),
        Case("split-fp8", SMALL | {"rows": ((20, 1290),), "dim": 96, "kept": FP8, "softcap": 3.0, "programs": 5}),
        Case("8192", LLAMA | {"rows": ((8192, 8192),)}, bench=True),
        Case("4x2048", LLAMA | {"rows": ((2048, 2048),) * 4}, bench=True),
        Case("2048-of-32768", LLAMA | {"rows": ((2048, 32768),)}, bench=True),
        Case("50-of-20050", LLAMA | {"rows": ((50, 20050),), "programs": 33}, bench=True),
        Case("50-of-20050-fp8", LLAMA | {"rows": ((50, 20050),), "programs": 33, "kept": FP8}, bench=True),
        Case("2048-of-32768-fp8", LLAMA | {"rows": ((2048, 32768),), "kept": FP8}, bench=True),
        Case("int8", SMALL | {"rows": ((20, 90), (4, 4)), "dim": 96, "kept": INT8}),
        Case("narrow-int8", SMALL | {"rows": ((20, 30),), "dim": 8, "kept": INT8}),
        Case("int4", SMALL | {"rows": ((20, 90), (1, 5), (4, 4)), "heads": 6, "dim": 64, "kept": INT4}),
        Case("int4-partial-group", SMALL | {"rows": ((20, 90),), "dim": 80, "kept": INT4, "window": 20}),
        Case("narrow-int4", SMALL | {"rows": ((20, 30),), "dim": 16, "kept": INT4, "softcap": 3.0}),
        Case("2048-of-32768-int8", LLAMA | {"rows": ((2048, 32768),), "kept": INT8}, bench=True),
        Case("2048-of-32768-int4", LLAMA | {"rows": ((2048, 32768),), "kept": INT4}, bench=True),
        Case("8192-gpt-oss", LLAMA | {"rows": ((8192, 8192),), "heads": 64, "dim": 64, "sinks": True}, bench=True),
        Case(
            "8192-gpt-oss-window",
            LLAMA | {"rows": ((8192, 8192),), "heads": 64, "dim": 64, "sinks": True, "window": 128},
            bench=True,
        ),
        Case(
            "8192-of-16384-llama4",
            LLAMA | {"rows": ((8192, 16384),), "heads": 40, "chunk": 8192},
            bench=True,
        ),
        Case("2048-mpt", LLAMA | {"rows": ((2048, 2048),), "kv_heads": 32, "alibi": True}, bench=True),
        Case("8192-d64", LLAMA | {"rows": ((8192, 8192),), "dim": 64}, bench=True),
        Case("8192-d256", LLAMA | {"rows": ((8192, 8192),), "heads": 16, "dim": 256}, bench=True),
        Case(
            "16x64-bart",
            {"rows": ((64, 1088),) * 16, "key_starts": (1024,) * 16, "heads": 16, "kv_heads": 16, "dim": 64},
            bench=True,
        ),
        Case(
            "16x64-t5",
            {
                "rows": ((64, 576),) * 16,
                "key_starts": (512,) * 16,
                "heads": 64,
                "kv_heads": 64,
                "dim": 64,
                "reach": 128,
            },
            bench=True,
        ),
        Case(
            "8192-gemma-window",
            LLAMA | {"rows": ((8192, 8192),), "heads": 16, "dim": 256, "softcap": 50.0, "window": 4096},
            bench=True,
        ),
    ),
    tolerance={torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2},
    traffic=_traffic,
    flops=_flops,
    compiled=bodies.prefill_attention,
    compiled_lacks=(
        "spans",
        "fp8",
        "narrow-fp8",
        "alibi-fp8",
        "chunk-fp8",
        "biases-fp8",
        "key-starts-spans",
        "key-starts-fp8",
        "split-fp8",
    ),
    native_layout=bodies.native_layout,
    single_row=_single_row,
    rows=lambda args: args[6].shape[0],
    strided=(0, 7),
    peer=_peer,
    tunable={"block": (64, 128), "tile": (32, 64, 128), "warps": (4, 8), "stages": (2, 3)},
    may_spill=True,  # a few bytes at a few sizes, where a smaller tile would be slower
)
