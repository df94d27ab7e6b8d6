"""Attention of rows with one new token over their pages. kernels/attention/common.py defines the result.

`decode_schedule` determines which keys are read and how they are divided into items, once for all layers with the same
window or chunk. Rows of one sequence may share a line of the table: cross-attention makes each decoder token a row of
its own, whose length is the number of tokens of the encoder input.

A program takes items until the list is empty, so a row's result depends neither on the other rows nor on the number of
programs. A second kernel sums up rows of several items. The tile of a program is the whole group of query heads of one
KV head, padded to 16: keys and values are read once, in the order of memory by neighbouring programs, and multiplied by
the small matrix instructions, which take less than a third of a Hopper's issue slots here (S = q kᵀ; the transposed
product k qᵀ, for the large ones, needs no fewer instructions and four times the memory of a tile).

The dims of a head are split into two tensors: the lower and the upper half, or for 8-bit pages the even and the odd
dims (of 4-bit pages too), which are loaded as pairs and converted within registers.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

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
    keys_in_chunk,
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
from kernels.attention.schedule import CHUNKS, DECODE_SCHEDULE, empty_schedule
from kernels.cpu import bodies
from kernels.jit import jit, launch, power_of_2, resident_programs, tl
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
    schedule: Tensor,
    out: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    key_starts: Tensor | None = None,
    slopes: Tensor | None = None,
    chunk: int | None = None,
    biases: Tensor | None = None,
) -> tuple[Tensor]:
    """q: [tokens, heads, dim]; pages: [blocks, layers, 2, block_tokens, kv_heads, dim] of q's type, or see common.py;
    table: [slots, blocks] int32, where line slot[i] belongs to row i of the step; slot, lengths: [rows] int32;
    query_start: [rows + 1] int32; schedule: from decode_schedule for these rows, this window and these key_starts;
    sinks, slopes: [heads] fp32; key_starts: [rows] int32, the first position that a row reads, None: 0; biases: [heads,
    2 · reach + 1] fp32, without slopes → out: [tokens, heads, dim]. Only rows with one token and at least one key are
    written."""
    bt = pages.shape[3]
    for row, (first, stop) in enumerate(zip(query_start.tolist(), query_start.tolist()[1:], strict=False)):
        if stop - first != 1:
            continue
        length, lowest = int(lengths[row]), 0 if key_starts is None else int(key_starts[row])
        if lowest >= length:
            continue
        begin = max(lowest, first_key(length - 1, window, chunk)) // bt * bt
        blocks = table[slot[row], begin // bt : -(-length // bt)]
        k, v = gather_kv(pages, layer, blocks, k_scale, v_scale)
        key = torch.arange(begin, length, device=q.device)
        seen = causal(key[-1:], key, window, chunk) & (key >= lowest)
        read = k[: key.shape[0]], v[: key.shape[0]]
        out[first:stop] = attend(q[first:stop], *read, seen, scale, softcap, sinks, slopes, biases)
    return (out,)


@jit
def _load(place, half, seen, DIM: tl.constexpr, KIND: tl.constexpr, TYPE: tl.constexpr):
    """Load both halves of a head's dims for each key, in the type of products. place: where each vector begins; half:
    numbers of the elements."""
    HALF: tl.constexpr = half.shape[1]
    keep = seen[:, None]
    if KIND == "wide":
        first = tl.load(place + half, keep if DIM >= HALF else keep & (half < DIM), 0.0)
        more = keep if DIM == 2 * HALF else keep & (half < DIM - HALF)
        second = tl.load(place + half + HALF, more, 0.0)
    else:
        pairs = tl.load(place + half, keep if DIM == 2 * HALF else keep & (half < DIM // 2), 0)
        first, second = unpack_pair(pairs, place, half, keep, KIND, DIM)
    return first.to(TYPE), second.to(TYPE)


@jit(varying=("layer", "first_item", "table_row"))
def decode_attention_kernel(
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
    out,
    sums,
    stats,
    layer,
    first_item,
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
    KIND: tl.constexpr,
    RECORD: tl.constexpr,
    TYPE: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    TILE: tl.constexpr,
):
    """Take pairs of an item and a KV head until the list is empty. RECORD: elements of a key or value in the pages."""
    PAIRS: tl.constexpr = KIND != "wide"
    ELEMENTS: tl.constexpr = 2 if PAIRS else 1  # numbers of the pages in each loaded element
    PAGE: tl.constexpr = BLOCK_TOKENS * KV_HEADS * RECORD
    half = tl.arange(0, HALF)
    dim = half * ELEMENTS
    dim_2 = dim + (1 if PAIRS else HALF)
    units = tl.load(schedule) * KV_HEADS
    unit = tl.program_id(0)
    while unit < units:
        item = unit // KV_HEADS
        kv_head = unit % KV_HEADS
        entry = schedule + (first_item + item) * 4
        row = tl.load(entry)
        begin = tl.load(entry + 1)
        end = tl.load(entry + 2)
        split = tl.load(entry + 3)
        token = tl.load(query_start + row).to(tl.int64)
        line = table + tl.load(slot + row).to(tl.int64) * table_row
        heads = kv_head * (HEADS // KV_HEADS) + tl.arange(0, GROUP)
        live = heads < (kv_head + 1) * (HEADS // KV_HEADS)
        mask = live[:, None] & (dim < DIM)[None, :]
        mask_2 = live[:, None] & (dim_2 < DIM)[None, :]
        spot = heads[:, None] * DIM + dim[None, :]
        spot_2 = heads[:, None] * DIM + dim_2[None, :]
        at_q = q + token * q_row
        q_1 = to_product_type(tl.load(at_q + spot, mask, 0.0), TYPE)
        q_2 = to_product_type(tl.load(at_q + spot_2, mask_2, 0.0), TYPE)
        if ALIBI:
            slope = tl.load(slopes + heads, live, 0.0)
        if ALIBI or REACH:
            query = tl.zeros([GROUP], tl.int32) + (tl.load(lengths + row) - 1)
        acc = tl.zeros([GROUP, HALF], tl.float32)
        acc_2 = tl.zeros([GROUP, HALF], tl.float32)
        top = tl.full([GROUP], -1.0e30, tl.float32)
        total = tl.zeros([GROUP], tl.float32)
        for start in range(begin, end, split):
            stop = tl.minimum(start + split, end)
            part = tl.zeros([GROUP, HALF], tl.float32)
            part_2 = tl.zeros([GROUP, HALF], tl.float32)
            part_top = tl.full([GROUP], -1.0e30, tl.float32)
            weights = tl.zeros([GROUP, TILE], tl.float32)  # summed over the tiles, and over their keys at the end
            key = start + tl.arange(0, TILE)
            # Block ids are loaded one tile ahead, so that the loads of several tiles can overlap.
            block = tl.load(line + key // BLOCK_TOKENS, key < stop, 0)
            for tile in range(start, stop, TILE):
                key = tile + tl.arange(0, TILE)
                seen = key < stop
                place = (block.to(tl.int64) * LAYERS + layer) * (2 * PAGE)
                place += (key % BLOCK_TOKENS * KV_HEADS + kv_head) * RECORD
                block = tl.load(line + (key + TILE) // BLOCK_TOKENS, key + TILE < stop, 0)
                at_k = pages + place[:, None]
                k_1, k_2 = _load(at_k, half[None, :], seen, DIM, KIND, TYPE)
                v_1, v_2 = _load(at_k + PAGE, half[None, :], seen, DIM, KIND, TYPE)
                scores = tl.dot(q_1, tl.trans(k_1), input_precision="ieee")
                scores = tl.dot(q_2, tl.trans(k_2), scores, input_precision="ieee")
                if SOFTCAP:
                    scores = soft_capped(scores, scale, softcap)
                if ALIBI:
                    scores = biased(scores, scale, slope, key, query, SOFTCAP)
                if REACH:
                    scores = with_biases(scores, scale, biases, heads, live, key, query, SOFTCAP, REACH)
                scores = tl.where(seen[None, :], scores, float("-inf"))
                weight, part_top, fade = softmax_weights(scores, part_top, scale, SOFTCAP or ALIBI or REACH > 0)
                weights = tl.fma(weights, fade[:, None], weight)
                part = tl.dot(weight.to(TYPE), v_1, part * fade[:, None], input_precision="ieee")
                part_2 = tl.dot(weight.to(TYPE), v_2, part_2 * fade[:, None], input_precision="ieee")
            best = tl.maximum(top, part_top)
            keep = tl.exp2(top - best)
            add = tl.exp2(part_top - best)
            acc = add_scaled(acc, keep, part, add)
            acc_2 = add_scaled(acc_2, keep, part_2, add)
            total = tl.fma(total, keep, tl.sum(weights, 1) * add)
            top = best
        # Loaded again, because keeping these values in registers until here would spill others.
        row = tl.load(entry, volatile=True)
        keys = tl.load(entry + 2, volatile=True) - tl.load(entry + 1, volatile=True)
        token = tl.load(query_start + row).to(tl.int64)
        reach = tl.load(lengths + row)
        most = keys_in_chunk(reach, CHUNK) if CHUNK else WINDOW
        if KEY_STARTS:
            reach -= tl.load(key_starts + row)
        if keys == tl.minimum(reach, most):
            sink = tl.load(sinks + heads, live, 0.0) if SINKS else 0.0
            factor = final_factor(top, total, sink, v_scale, SINKS)[:, None]
            at_out = out + token * out_row
            tl.store(at_out + spot, (acc * factor).to(out.dtype.element_ty), mask)
            tl.store(at_out + spot_2, (acc_2 * factor).to(out.dtype.element_ty), mask_2)
        else:
            at_sums = sums + item.to(tl.int64) * (HEADS * DIM)
            tl.store(at_sums + spot, acc, mask)
            tl.store(at_sums + spot_2, acc_2, mask_2)
            at_stats = stats + item.to(tl.int64) * (2 * HEADS)
            tl.store(at_stats + heads, top, live)
            tl.store(at_stats + HEADS + heads, total, live)
        unit = tl.num_programs(0) + tl.atomic_add(schedule + 2, 1, sem="relaxed")


@jit
def decode_reduce_kernel(
    query_start,
    schedule,
    sinks,
    out,
    sums,
    stats,
    out_row,
    v_scale,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    SINKS: tl.constexpr,
    WIDE: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Sum up rows of several items: first the splits of each chunk in order, for all chunks at once, then the
    chunks."""
    chunk = tl.arange(0, CHUNKS)
    dim = tl.arange(0, WIDE)
    live = dim < DIM
    units = tl.load(schedule + 1) * HEADS
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        head = unit % HEADS
        entry = schedule + (1 + unit // HEADS) * 4
        row = tl.load(entry)
        first = tl.load(entry + 1)
        count = tl.load(entry + 2)
        each = tl.load(entry + 3)
        acc = tl.zeros([CHUNKS, WIDE], tl.float32)
        top = tl.full([CHUNKS], -1.0e30, tl.float32)
        total = tl.zeros([CHUNKS], tl.float32)
        for at in range(0, each):
            number = chunk * each + at
            real = number < count
            item = (first + number).to(tl.int64)
            at_sums = sums + (item * HEADS + head)[:, None] * DIM
            part = tl.load(at_sums + dim[None, :], real[:, None] & live[None, :], 0.0)
            part_top = tl.load(stats + item * (2 * HEADS) + head, real, -1.0e30)
            part_total = tl.load(stats + item * (2 * HEADS) + HEADS + head, real, 0.0)
            best = tl.maximum(top, part_top)
            keep = tl.exp2(top - best)
            add = tl.exp2(part_top - best)
            acc = add_scaled(acc, keep, part, add)
            total = tl.fma(total, keep, part_total * add)
            top = best
        best = tl.max(top, 0)
        add = tl.exp2(top - best)
        acc = tl.sum(acc * add[:, None], 0)
        total = tl.sum(total * add, 0)
        sink = tl.load(sinks + head) if SINKS else 0.0
        result = acc * final_factor(best, total, sink, v_scale, SINKS)
        token = tl.load(query_start + row).to(tl.int64)
        tl.store(out + token * out_row + head * DIM + dim, result.to(out.dtype.element_ty), live)
    if tl.program_id(0) == 0:
        tl.store(schedule + 2, 0)  # for the next layer


def _settings(q: Tensor, pages: Tensor, *, biased: bool) -> dict[str, Any]:
    """16 KiB of keys and as many of values in a tile, 8 of 8-bit ones, and two to three tiles on their way while one is
    used. each: programs for each multiprocessor, no more than can run there at the same time."""
    dim = power_of_2(q.shape[2])
    size = pages.dtype.itemsize
    group = q.shape[1] // pages.shape[4]
    # Biases of distances take registers of their own: tiles of the whole size would spill.
    tile = (8192 if size < 4 else 4096) // dim // (1 if group <= 16 and not biased else 2)
    wide = q.dtype.itemsize == 4  # 8-bit pages too take this much room then
    default = {
        "tile": max(16, min(64 if dim <= 32 else 128, tile)),
        "warps": 8,
        "stages": 2 if wide and shared_memory(q.device) < LARGE_TILES else 4 if size == 1 else 3,
        "each": 2,
    }
    return settings("decode_attention", default, q.device, dim=dim, size=size, group=group)


def _triton(
    q: Tensor,
    pages: Tensor,
    layer: int,
    table: Tensor,
    slot: Tensor,
    query_start: Tensor,
    lengths: Tensor,
    schedule: Tensor,
    out: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    key_starts: Tensor | None = None,
    slopes: Tensor | None = None,
    chunk: int | None = None,
    biases: Tensor | None = None,
) -> tuple[Tensor]:
    check_options(window, softcap, scale, chunk)
    check_pages(q, pages)
    _, heads, dim = q.shape
    _, layers, _, block_tokens, kv_heads, _ = pages.shape
    rows = lengths.shape[0]
    items = schedule.shape[0] - 1 - rows
    elements = page_elements(pages)
    chosen = _settings(q, pages, biased=biases is not None)
    sums = torch.empty((items, heads, dim), dtype=torch.float32, device=q.device)
    stats = torch.empty((items, 2, heads), dtype=torch.float32, device=q.device)
    launch(
        decode_attention_kernel,
        (resident_programs(q.device, chosen["each"]),),
        q,
        elements,
        table,
        slot,
        query_start,
        lengths,
        lengths if key_starts is None else key_starts,
        schedule,
        stats if sinks is None else sinks,
        stats if slopes is None else slopes,
        stats if biases is None else biases,
        out,
        sums,
        stats,
        layer,
        1 + rows,
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
        KIND=page_kind(pages),
        RECORD=elements.shape[-1],
        TYPE=compute_type(q, pages),
        GROUP=max(16, power_of_2(heads // kv_heads)),
        HALF=max(MIN_WIDTH, power_of_2(dim) // 2),
        TILE=chosen["tile"],
        warps=chosen["warps"],
        stages=chosen["stages"],
    )
    launch(
        decode_reduce_kernel,
        (resident_programs(q.device, each=8),),
        query_start,
        schedule,
        stats if sinks is None else sinks,
        out,
        sums,
        stats,
        out.stride(0),
        v_scale,
        HEADS=heads,
        DIM=dim,
        SINKS=sinks is not None,
        WIDE=power_of_2(dim),
        CHUNKS=CHUNKS,
        warps=2,
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
    key_starts: Sequence[int] = (),
    alibi: bool = False,
    chunk: int | None = None,
    reach: int = 0,
) -> tuple:
    """key_starts: first position of each row; empty: all 0."""
    q, pages, table, slot, query_start, lengths, out = paged_inputs(
        make, rows, heads, kv_heads, dim, block_tokens, layers, kept, window, chunk
    )
    first = make.tensor(key_starts) if key_starts else None
    if make.meta:
        schedule = empty_schedule(len(rows), kv_heads, make.device)
    else:
        schedule = DECODE_SCHEDULE.reference(query_start, lengths, kv_heads, window, first, chunk)
    scales = (0.5, 2.0) if kept == FP8 else (1.0, 1.0)
    return (
        *(q, pages, layers - 1, table, slot, query_start, lengths),
        *(schedule, out, dim**-0.5, window, softcap),
        *(make.normal(heads, dtype=torch.float32) if sinks else None, *scales, first),
        slopes_of(make, heads) if alibi else None,
        chunk,
        make.normal(heads, 2 * reach + 1, dtype=torch.float32) if reach else None,
    )


def _single_row(args: Args, row: int) -> tuple[Args, Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]]:
    q, pages, layer, table, slot, query_start, lengths, _, out, scale, window, *rest = args
    *rest, key_starts, slopes, chunk, biases = rest
    tokens = slice(int(query_start[row]), int(query_start[row + 1]))
    start, length = query_start[row : row + 2] - query_start[row], lengths[row : row + 1]
    begin = None if key_starts is None else key_starts[row : row + 1]
    schedule = DECODE_SCHEDULE.reference(start, length, pages.shape[4], window, begin, chunk)
    own = (
        q[tokens],
        pages,
        layer,
        table,
        slot[row : row + 1],
        start,
        length,
        schedule,
        out[tokens],
        scale,
        window,
        *rest,
    )
    return (*own, begin, slopes, chunk, biases), lambda outputs: (outputs[0][tokens],)


def _traffic(q: Tensor, pages: Tensor, layer: int, table: Tensor, slot: Tensor, *rest: Any) -> int:
    query_start, lengths, _, _, _, window, *_, key_starts, _, chunk, _ = rest
    return paged_traffic(q, pages, query_start, key_counts(lengths, key_starts), window, single=True, chunk=chunk)


LLAMA = {"heads": 64, "kv_heads": 8, "dim": 128}  # 70B; a share of two of its tensor-parallel ranks has the same group
QWEN3 = {"heads": 16, "kv_heads": 8, "dim": 128}  # 0.6B
GPT_OSS = {"heads": 64, "kv_heads": 8, "dim": 64, "sinks": True}
GEMMA = {"heads": 16, "kv_heads": 8, "dim": 256, "softcap": 50.0}
BART = {"heads": 16, "kv_heads": 16, "dim": 64}  # large; after sources of 1,024 tokens
T5 = {"heads": 64, "kv_heads": 64, "dim": 64, "reach": 128}  # XXL; after sources of 512 tokens
MPT = {"heads": 32, "kv_heads": 32, "dim": 128, "alibi": True}  # 7B
SMALL = {"heads": 4, "kv_heads": 2, "dim": 32, "block_tokens": 4, "layers": 2}

DECODE_ATTENTION = Op(
    name="decode_attention",
    reference=_reference,
    triton=_triton,
    inputs=_inputs,
    cases=(
        Case("one", SMALL | {"rows": ((1, 1),)}),
        Case("mixed", SMALL | {"rows": ((1, 37), (3, 9), (0, 0), (1, 300), (1, 64)), "heads": 6}),
        Case("splits", SMALL | {"rows": ((1, 2600), (1, 3)), "block_tokens": 16}),
        Case("chunks", SMALL | {"rows": ((1, 1100),) * 7, "heads": 2, "kv_heads": 1, "block_tokens": 13}),
        Case("window", SMALL | {"rows": ((1, 100), (1, 5), (2, 30)), "dim": 80, "window": 20, "sinks": True}),
        Case("group", SMALL | {"rows": ((1, 70),), "heads": 40, "kv_heads": 2, "dim": 64, "softcap": 3.0}),
        Case("wide", SMALL | {"rows": ((1, 50), (1, 17)), "heads": 7, "kv_heads": 1, "dim": 192}),
        Case("narrow", SMALL | {"rows": ((1, 50), (1, 300)), "dim": 8}),
        Case("narrow-fp8", SMALL | {"rows": ((1, 50),), "dim": 16, "kept": FP8}),
        Case("fp8", SMALL | {"rows": ((1, 300), (1, 40)), "dim": 96, "kept": FP8}),
        Case(
            "key-starts",
            SMALL
            | {"rows": ((1, 37), (1, 9), (0, 0), (1, 60), (3, 9), (1, 64))}
            | {"key_starts": (13, 8, 7, 0, 2, 61), "softcap": 3.0},
        ),
        Case(
            "key-starts-window",
            SMALL | {"rows": ((1, 100), (1, 40), (1, 21)), "key_starts": (70, 39, 5), "window": 20, "sinks": True},
        ),
        Case("key-starts-splits", SMALL | {"rows": ((1, 2700), (1, 300), (1, 3)), "key_starts": (101, 298, 1)}),
        Case("key-starts-fp8", SMALL | {"rows": ((1, 300), (1, 40)), "dim": 96, "kept": FP8, "key_starts": (7, 33)}),
        Case("alibi", SMALL | {"rows": ((1, 37), (3, 9), (0, 0), (1, 300), (1, 64)), "heads": 6, "alibi": True}),
        Case("alibi-splits", SMALL | {"rows": ((1, 2600), (1, 3)), "block_tokens": 16, "softcap": 3.0, "alibi": True}),
        Case("alibi-fp8", SMALL | {"rows": ((1, 300), (1, 40)), "dim": 96, "kept": FP8, "alibi": True, "sinks": True}),
        Case("biases", SMALL | {"rows": ((1, 37), (3, 9), (0, 0), (1, 300), (1, 64)), "heads": 6, "reach": 20}),
        Case(
            "biases-splits",
            SMALL | {"rows": ((1, 1100), (1, 3)), "block_tokens": 16, "reach": 500, "key_starts": (70, 1)},
        ),
        Case("biases-fp8", SMALL | {"rows": ((1, 300), (1, 40)), "dim": 96, "kept": FP8, "reach": 128}),
        Case("chunk", SMALL | {"rows": ((1, 100), (1, 33), (1, 34), (0, 0), (2, 70)), "chunk": 33, "sinks": True}),
        Case("chunk-splits", SMALL | {"rows": ((1, 4600), (1, 2001), (1, 900)), "block_tokens": 13, "chunk": 2000}),
        Case("empty", SMALL | {"rows": ()}),
        Case("64x8192", LLAMA | {"rows": ((1, 8192),) * 64}, bench=True),
        Case("64x8192-fp8", LLAMA | {"rows": ((1, 8192),) * 64, "kept": FP8}, bench=True),
        Case("int8", SMALL | {"rows": ((1, 300), (1, 40)), "dim": 96, "kept": INT8}),
        Case("narrow-int8", SMALL | {"rows": ((1, 50),), "dim": 8, "kept": INT8, "sinks": True}),
        Case("int4", SMALL | {"rows": ((1, 300), (3, 9), (1, 40)), "heads": 6, "dim": 64, "kept": INT4}),
        Case("int4-partial-group", SMALL | {"rows": ((1, 70),), "dim": 80, "kept": INT4, "window": 20}),
        Case("narrow-int4", SMALL | {"rows": ((1, 50),), "dim": 16, "kept": INT4}),
        Case("64x8192-int8", LLAMA | {"rows": ((1, 8192),) * 64, "kept": INT8}, bench=True),
        Case("64x8192-int4", LLAMA | {"rows": ((1, 8192),) * 64, "kept": INT4}, bench=True),
        Case("1x8192", LLAMA | {"rows": ((1, 8192),)}, bench=True),
        Case("1x131072", LLAMA | {"rows": ((1, 131072),)}, bench=True),
        Case("256x1024-group4", LLAMA | {"rows": ((1, 1024),) * 256, "heads": 32}, bench=True),
        Case("64x4096-qwen3", QWEN3 | {"rows": ((1, 4096),) * 64}, bench=True),
        Case("64x8192-gpt-oss", GPT_OSS | {"rows": ((1, 8192),) * 64}, bench=True),
        Case("64x8192-gpt-oss-window", GPT_OSS | {"rows": ((1, 8192),) * 64, "window": 128}, bench=True),
        Case("64x8192-gemma-window", GEMMA | {"rows": ((1, 8192),) * 64, "window": 4096}, bench=True),
        Case("64x12288-llama4", LLAMA | {"rows": ((1, 12288),) * 64, "heads": 40, "chunk": 8192}, bench=True),
        Case("64x2048-mpt", MPT | {"rows": ((1, 2048),) * 64}, bench=True),
        Case("256x128-t5", T5 | {"rows": ((1, 640),) * 256, "key_starts": (512,) * 256}, bench=True),
        Case("256x128-bart", BART | {"rows": ((1, 1152),) * 256, "key_starts": (1024,) * 256}, bench=True),
    ),
    tolerance={torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2},
    traffic=_traffic,
    compiled=bodies.decode_attention,
    compiled_lacks=(*("fp8", "narrow-fp8", "alibi-fp8", "biases-fp8", "key-starts-fp8"),),
    native_layout=bodies.native_layout,
    single_row=_single_row,
    rows=lambda args: args[6].shape[0],
    strided=(0, 8),
    tunable={"tile": (16, 32, 64, 128), "warps": (4, 8), "stages": (2, 3, 4), "each": (2, 3, 4)},
)
