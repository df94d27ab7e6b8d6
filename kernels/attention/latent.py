"""Latent attention over pages, with absorbed matrices (arXiv:2405.04434, section 2.1):

    out[t, h] = softmax(scale · q[t, h] kᵀ) k[:, : rank]

A key k is a token's latent of `rank` elements, followed by its rotated key; the latent is also the value. All heads
read the same keys. Position p sees positions 0 … p. Pages: [blocks, layers, 1, block_tokens, 1, dim].

A program has up to 16 or 32 heads of a token, and each tile of keys is loaded once for both products. LATENT_DECODE
computes rows with one token, divided into the items of DECODE_SCHEDULE as in kernels/attention/decode.py, where blocks
of heads take the place of KV heads. LATENT_PREFILL computes the other rows: each token by itself, over all of its keys
in order.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.attention.common import (
    LOG2_E,
    SCORE_ELEMENTS,
    add_scaled,
    check_heads,
    final_factor,
    page_inputs,
    row_of_token,
    softmax_weights,
)
from kernels.attention.decode import decode_reduce_kernel
from kernels.attention.schedule import CHUNKS, DECODE_SCHEDULE, empty_schedule
from kernels.jit import jit, launch, power_of_2, resident_programs, tl
from kernels.op import Args, Case, Make, Op
from kernels.tuning import settings, shared_memory

# Heads of a program. The sums of twice as many would not fit into the registers; decode has two sums of each.
DECODE_HEADS, PREFILL_HEADS = 16, 32
MAX_RANK = 512


def head_blocks(heads: int) -> int:
    """Return the number of programs that share a token's heads, which DECODE_SCHEDULE takes as KV heads."""
    return -(-heads // DECODE_HEADS)


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
    *,
    single: bool,
) -> tuple[Tensor]:
    """single: rows with one token are computed, else those with several."""
    rank, block_tokens = out.shape[2], pages.shape[3]
    for row, (first, stop) in enumerate(zip(query_start.tolist(), query_start.tolist()[1:], strict=False)):
        length = int(lengths[row])
        if stop == first or (stop - first == 1) != single or not length:
            continue
        blocks = table[slot[row], : -(-length // block_tokens)].long()
        keys = pages[blocks, layer, 0, :, 0].flatten(0, 1)[:length].float()
        step = max(1, SCORE_ELEMENTS // (q.shape[1] * length))
        for at in range(first, stop, step):
            end = min(at + step, stop)
            scores = torch.einsum("thd,ld->thl", q[at:end].float(), keys) * scale
            position = length - stop + torch.arange(at, end, device=q.device)
            hidden = torch.arange(length, device=q.device) > position[:, None, None]
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            out[at:end] = (weights @ keys[:, :rank]).to(out.dtype)
    return (out,)


def _decode_reference(
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
) -> tuple[Tensor]:
    """q: [tokens, heads, dim]; pages: [blocks, layers, 1, block_tokens, 1, dim] of q's type; table: [slots, blocks]
    int32, where line slot[i] belongs to row i of the step; slot, lengths: [rows] int32; query_start: [rows + 1] int32;
    schedule: from DECODE_SCHEDULE for these rows and `head_blocks` KV heads → out: [tokens, heads, rank]. Only rows
    with one token are written."""
    return _reference(q, pages, layer, table, slot, query_start, lengths, out, scale, single=True)


def _prefill_reference(
    q: Tensor,
    pages: Tensor,
    layer: int,
    table: Tensor,
    slot: Tensor,
    query_start: Tensor,
    lengths: Tensor,
    out: Tensor,
    scale: float,
) -> tuple[Tensor]:
    """Arguments are those of LATENT_DECODE. Only rows with several tokens are written."""
    return _reference(q, pages, layer, table, slot, query_start, lengths, out, scale, single=False)


@jit
def load_queries(
    at_q, heads, HEADS: tl.constexpr, DIM: tl.constexpr, RANK: tl.constexpr, WIDE: tl.constexpr, KEY: tl.constexpr
):
    """Return the absorbed and the rotated parts of a token's queries."""
    at, at_key = tl.arange(0, WIDE), tl.arange(0, KEY)
    place = at_q + heads[:, None] * DIM
    live = (heads < HEADS)[:, None]
    first = tl.load(place + at[None, :], live & (at < RANK)[None, :], 0.0)
    second = tl.load(place + RANK + at_key[None, :], live & (at_key < DIM - RANK)[None, :], 0.0)
    return first, second


@jit
def attend_tile(q, q_key, place, seen, part, top, weights, scale, DIM: tl.constexpr, RANK: tl.constexpr):
    """Attend to the keys at these places of the pages, if they are seen → sums of weighted latents, the largest score,
    and sums of weights for each key of a tile."""
    at, at_key = tl.arange(0, q.shape[1]), tl.arange(0, q_key.shape[1])
    latent = tl.load(place[:, None] + at[None, :], seen[:, None] & (at < RANK)[None, :], 0.0)
    rotated = tl.load(place[:, None] + RANK + at_key[None, :], seen[:, None] & (at_key < DIM - RANK)[None, :], 0.0)
    scores = tl.dot(q, tl.trans(latent), input_precision="ieee")
    scores = tl.dot(q_key, tl.trans(rotated), scores, input_precision="ieee")
    scores = tl.where(seen[None, :], scores, float("-inf"))
    weight, top, fade = softmax_weights(scores, top, scale, False)
    weights = tl.fma(weights, fade[:, None], weight)
    part = tl.dot(weight.to(latent.dtype), latent, part * fade[:, None], input_precision="ieee")
    return part, top, weights


@jit
def store_outputs(out, heads, part, factor, HEADS: tl.constexpr, RANK: tl.constexpr):
    """Store the outputs of a token's heads."""
    at = tl.arange(0, part.shape[1])
    mask = (heads < HEADS)[:, None] & (at < RANK)[None, :]
    spot = heads[:, None] * RANK + at[None, :]
    tl.store(out + spot, (part * factor[:, None]).to(out.dtype.element_ty), mask)


@jit
def _attend(
    q,
    q_key,
    pages,
    line,
    start,
    stop,
    layer,
    scale,
    LAYERS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    DIM: tl.constexpr,
    RANK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Attend to the keys from `start` to `stop` of a row → sums of weighted latents, the largest score, and the sum of
    weights (kernels/attention/common.py)."""
    GROUP: tl.constexpr = q.shape[0]
    WIDE: tl.constexpr = q.shape[1]
    part = tl.zeros([GROUP, WIDE], tl.float32)
    top = tl.full([GROUP], -1.0e30, tl.float32)
    weights = tl.zeros([GROUP, TILE], tl.float32)  # summed over the tiles, and over their keys at the end
    key = start + tl.arange(0, TILE)
    # Block ids are loaded one tile ahead, so that the loads of several tiles can overlap.
    block = tl.load(line + key // BLOCK_TOKENS, key < stop, 0)
    for tile in range(start, stop, TILE):
        key = tile + tl.arange(0, TILE)
        seen = key < stop
        place = pages + ((block.to(tl.int64) * LAYERS + layer) * BLOCK_TOKENS + key % BLOCK_TOKENS) * DIM
        block = tl.load(line + (key + TILE) // BLOCK_TOKENS, key + TILE < stop, 0)
        part, top, weights = attend_tile(q, q_key, place, seen, part, top, weights, scale, DIM, RANK)
    return part, top, tl.sum(weights, 1)


@jit(varying=("layer", "first_item", "table_row"))
def latent_decode_kernel(
    q,
    pages,
    table,
    slot,
    query_start,
    lengths,
    schedule,
    out,
    sums,
    stats,
    layer,
    first_item,
    q_row,
    out_row,
    table_row,
    scale,
    HEADS: tl.constexpr,
    BLOCKS: tl.constexpr,
    DIM: tl.constexpr,
    RANK: tl.constexpr,
    LAYERS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDE: tl.constexpr,
    KEY: tl.constexpr,
    TILE: tl.constexpr,
):
    """Take pairs of an item and a block of heads until the list is empty."""
    at = tl.arange(0, WIDE)
    units = tl.load(schedule) * BLOCKS
    unit = tl.program_id(0)
    while unit < units:
        item = unit // BLOCKS
        entry = schedule + (first_item + item) * 4
        row = tl.load(entry)
        begin = tl.load(entry + 1)
        end = tl.load(entry + 2)
        split = tl.load(entry + 3)
        token = tl.load(query_start + row).to(tl.int64)
        line = table + tl.load(slot + row).to(tl.int64) * table_row
        heads = unit % BLOCKS * GROUP + tl.arange(0, GROUP)
        q_latent, q_key = load_queries(q + token * q_row, heads, HEADS, DIM, RANK, WIDE, KEY)
        acc = tl.zeros([GROUP, WIDE], tl.float32)
        top = tl.full([GROUP], -1.0e30, tl.float32)
        total = tl.zeros([GROUP], tl.float32)
        for start in range(begin, end, split):
            stop = tl.minimum(start + split, end)
            part, part_top, part_total = _attend(
                q_latent, q_key, pages, line, start, stop, layer, scale, LAYERS, BLOCK_TOKENS, DIM, RANK, TILE
            )
            best = tl.maximum(top, part_top)
            keep = tl.exp2(top - best)
            add = tl.exp2(part_top - best)
            acc = add_scaled(acc, keep, part, add)
            total = tl.fma(total, keep, part_total * add)
            top = best
        live = heads < HEADS
        mask = live[:, None] & (at < RANK)[None, :]
        spot = heads[:, None] * RANK + at[None, :]
        if end - begin == tl.load(lengths + row):
            factor = final_factor(top, total, 0.0, 1.0, False)
            store_outputs(out + token * out_row, heads, acc, factor, HEADS, RANK)
        else:
            tl.store(sums + item.to(tl.int64) * (HEADS * RANK) + spot, acc, mask)
            at_stats = stats + item.to(tl.int64) * (2 * HEADS)
            tl.store(at_stats + heads, top, live)
            tl.store(at_stats + HEADS + heads, total, live)
        unit = tl.num_programs(0) + tl.atomic_add(schedule + 2, 1, sem="relaxed")


@jit(varying=("layer", "rows", "tokens", "table_row"))
def latent_prefill_kernel(
    q,
    pages,
    table,
    slot,
    query_start,
    lengths,
    out,
    layer,
    rows,
    tokens,
    q_row,
    out_row,
    table_row,
    scale,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    RANK: tl.constexpr,
    LAYERS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDE: tl.constexpr,
    KEY: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program for each token and block of heads. The last tokens of a row read the most keys, so they start
    first."""
    token = tokens - 1 - tl.program_id(1)
    row = row_of_token(token, query_start, rows)
    row_end = tl.load(query_start + row + 1)
    if (token < row_end) & (row_end - tl.load(query_start + row) > 1):
        keys = tl.load(lengths + row) - (row_end - 1 - token)
        line = table + tl.load(slot + row).to(tl.int64) * table_row
        heads = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
        at_token = token.to(tl.int64)
        q_latent, q_key = load_queries(q + at_token * q_row, heads, HEADS, DIM, RANK, WIDE, KEY)
        part, top, total = _attend(
            q_latent, q_key, pages, line, 0, keys, layer, scale, LAYERS, BLOCK_TOKENS, DIM, RANK, TILE
        )
        factor = final_factor(top, total, 0.0, 1.0, False)
        store_outputs(out + at_token * out_row, heads, part, factor, HEADS, RANK)


def check_latents(q: Tensor, pages: Tensor, out: Tensor) -> None:
    dim, rank = q.shape[2], out.shape[2]
    if pages.dtype != q.dtype:
        raise ValueError(f"pages: {pages.dtype} where q is {q.dtype}; both must have the same type")
    if not pages.is_contiguous() or pages.shape[2] != 1 or pages.shape[4] != 1 or pages.shape[5] != dim:
        raise ValueError(
            f"pages {tuple(pages.shape)}: must be contiguous, [blocks, layers, 1, block_tokens, 1, dim], with the dim "
            f"of q, {dim}"
        )
    if not rank < dim or rank > MAX_RANK:
        raise ValueError(f"out: latents of {rank} elements; must be fewer than {dim} and at most {MAX_RANK}")


def kernel_sizes(q: Tensor, pages: Tensor, out: Tensor, group: int) -> dict[str, int]:
    _, heads, dim = q.shape
    rank = out.shape[2]
    return {
        "HEADS": heads,
        "DIM": dim,
        "RANK": rank,
        "LAYERS": pages.shape[1],
        "BLOCK_TOKENS": pages.shape[3],
        "GROUP": group,
        "WIDE": max(16, power_of_2(rank)),
        "KEY": max(16, power_of_2(dim - rank)),
    }


def latent_settings(name: str, q: Tensor, out: Tensor, group: int) -> dict[str, Any]:
    """32 KiB of latents in a tile, and one or two more on their way, if they fit into the shared memory."""
    rank, size, room = power_of_2(out.shape[2]), q.element_size(), shared_memory(q.device)
    tile = max(16, min(64, 32768 // (rank * size)))
    needed = (2 * tile + group) * q.shape[2] * size  # two tiles and the queries
    default = {"tile": tile, "warps": 8, "stages": 3 if needed <= room else 2}
    return settings(name, default, q.device, rank=rank, size=size, group=group)


def _decode(
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
) -> tuple[Tensor]:
    check_latents(q, pages, out)
    heads, rank, rows = q.shape[1], out.shape[2], lengths.shape[0]
    items, chosen = schedule.shape[0] - 1 - rows, latent_settings("latent_decode", q, out, DECODE_HEADS)
    sums = torch.empty((items, heads, rank), dtype=torch.float32, device=q.device)
    stats = torch.empty((items, 2, heads), dtype=torch.float32, device=q.device)
    launch(
        latent_decode_kernel,
        (resident_programs(q.device, 1),),
        q,
        pages,
        table,
        slot,
        query_start,
        lengths,
        schedule,
        out,
        sums,
        stats,
        layer,
        1 + rows,
        check_heads(q, "q"),
        check_heads(out, "out"),
        table.stride(0),
        scale * LOG2_E,
        BLOCKS=head_blocks(heads),
        **kernel_sizes(q, pages, out, DECODE_HEADS),
        TILE=chosen["tile"],
        warps=chosen["warps"],
        stages=chosen["stages"],
    )
    launch(
        decode_reduce_kernel,
        (resident_programs(q.device, each=8),),
        query_start,
        schedule,
        stats,
        out,
        sums,
        stats,
        out.stride(0),
        1.0,
        HEADS=heads,
        DIM=rank,
        SINKS=False,
        WIDE=power_of_2(rank),
        CHUNKS=CHUNKS,
        warps=4,
    )
    return (out,)


def _prefill(
    q: Tensor,
    pages: Tensor,
    layer: int,
    table: Tensor,
    slot: Tensor,
    query_start: Tensor,
    lengths: Tensor,
    out: Tensor,
    scale: float,
) -> tuple[Tensor]:
    check_latents(q, pages, out)
    group = min(PREFILL_HEADS, max(16, power_of_2(q.shape[1])))
    chosen = latent_settings("latent_prefill", q, out, group)
    launch(
        latent_prefill_kernel,
        (-(-q.shape[1] // group) if len(lengths) else 0, q.shape[0]),
        q,
        pages,
        table,
        slot,
        query_start,
        lengths,
        out,
        layer,
        lengths.shape[0],
        q.shape[0],
        check_heads(q, "q"),
        check_heads(out, "out"),
        table.stride(0),
        scale * LOG2_E,
        **kernel_sizes(q, pages, out, group),
        TILE=chosen["tile"],
        warps=chosen["warps"],
        stages=chosen["stages"],
    )
    return (out,)


def _inputs(
    make: Make,
    rows: Sequence[tuple[int, int]],
    heads: int,
    rank: int,
    key: int,
    block_tokens: int = 4,
    layers: int = 2,
) -> tuple[Any, ...]:
    """rows: tokens to compute and length of each; (0, 0) is a padded one. key: size of the rotated key."""
    places, tokens = page_inputs(make, rows, rank + key, block_tokens, layers), sum(count for count, _ in rows)
    q = make.normal(tokens, heads, rank + key)
    return q, *places, make.normal(tokens, heads, rank), (rank + key) ** -0.5


def _decode_inputs(make: Make, **sizes: Any) -> Args:
    *before, out, scale = _inputs(make, **sizes)
    start, lengths, blocks = before[5], before[6], head_blocks(sizes["heads"])
    if make.meta:
        return *before, empty_schedule(len(sizes["rows"]), blocks, make.device), out, scale
    return *before, DECODE_SCHEDULE.reference(start, lengths, blocks), out, scale


def _single_row(args: Args, row: int) -> tuple[Args, Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]]:
    """Return the arguments of one row, of either operation."""
    q, pages, layer, table, slot, query_start, lengths, *schedule, out, scale = args
    tokens = slice(int(query_start[row]), int(query_start[row + 1]))
    start, length = query_start[row : row + 2] - query_start[row], lengths[row : row + 1]
    if schedule:
        schedule = [DECODE_SCHEDULE.reference(start, length, head_blocks(q.shape[1]))]
    own = (q[tokens], pages, layer, table, slot[row : row + 1], start, length, *schedule, out[tokens], scale)
    return own, lambda outputs: (outputs[0][tokens],)


def _traffic(args: Sequence[Any], single: bool) -> int:
    q, pages, _, _, _, query_start, lengths, *_, out, _ = args
    if lengths.is_meta:
        return int(pages.nbytes // pages.shape[1] + q.nbytes + out.nbytes)
    counts = query_start.diff().tolist()
    keys = sum(
        length for count, length in zip(counts, lengths.tolist(), strict=True) if count and (count == 1) == single
    )
    return int(keys * pages[0, 0, 0, 0].nbytes + q.nbytes + out.nbytes)


def _operations(args: Sequence[Any]) -> int:
    """Return the operations of both products, of rows of several tokens."""
    q, pages, _, _, _, query_start, lengths, *_, out, _ = args
    total = 0
    for count, length in zip(query_start.diff().tolist(), lengths.tolist(), strict=True):
        total += count * length - count * (count - 1) // 2 if count > 1 else 0
    return int(2 * total * q.shape[1] * (q.shape[2] + out.shape[2]))


DEEPSEEK = {"heads": 128, "rank": 512, "key": 64, "block_tokens": 16, "layers": 1}
LITE = DEEPSEEK | {"heads": 16}  # V2-Lite, and a share of 8 ranks of V3
MINICPM = {"heads": 40, "rank": 256, "key": 32, "block_tokens": 16, "layers": 1}
SMALL = {"heads": 4, "rank": 32, "key": 8}

LATENT_DECODE = Op(
    name="latent_decode",
    reference=_decode_reference,
    triton=_decode,
    inputs=_decode_inputs,
    cases=(
        Case("one", SMALL | {"rows": ((1, 1),)}),
        Case("mixed", SMALL | {"rows": ((1, 37), (3, 9), (0, 0), (1, 300), (1, 64)), "heads": 7}),
        Case("splits", SMALL | {"rows": ((1, 700), (1, 3)), "block_tokens": 16}),
        Case("chunks", SMALL | {"rows": ((1, 540),) * 2, "heads": 41, "block_tokens": 13}),
        Case("odd", {"rows": ((1, 50), (1, 17)), "heads": 5, "rank": 19, "key": 6}),
        Case("empty", SMALL | {"rows": ()}),
        Case("32x8192", DEEPSEEK | {"rows": ((1, 8192),) * 32}, bench=True),
        Case("1x32768", DEEPSEEK | {"rows": ((1, 32768),)}, bench=True),
        Case("64x8192-16-heads", LITE | {"rows": ((1, 8192),) * 64}, bench=True),
        Case("64x4096-minicpm3", MINICPM | {"rows": ((1, 4096),) * 64}, bench=True),
    ),
    tolerance={torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2},
    traffic=lambda *args: _traffic(args, True),
    single_row=_single_row,
    rows=lambda args: args[6].shape[0],
    strided=(0, 8),
    tunable={"tile": (16, 32, 64), "warps": (4, 8, 16), "stages": (2, 3, 4)},
)

LATENT_PREFILL = Op(
    name="latent_prefill",
    reference=_prefill_reference,
    triton=_prefill,
    inputs=_inputs,
    cases=(
        Case("prompt", SMALL | {"rows": ((9, 9),)}),
        Case("mixed", SMALL | {"rows": ((1, 37), (3, 9), (0, 0), (5, 70), (1, 64), (2, 2)), "heads": 7}),
        Case("odd", {"rows": ((3, 50), (4, 4)), "heads": 5, "rank": 19, "key": 6}),
        Case("blocks", SMALL | {"rows": ((2, 21),), "heads": 40}),
        Case("empty", SMALL | {"rows": ()}),
        Case("4096", DEEPSEEK | {"rows": ((4096, 4096),)}, bench=True),
        Case("2048-of-8192-16-heads", LITE | {"rows": ((2048, 8192),)}, bench=True),
    ),
    tolerance={torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2},
    traffic=lambda *args: _traffic(args, False),
    flops=lambda *args: 0 if args[6].is_meta else _operations(args),
    single_row=_single_row,
    rows=lambda args: args[6].shape[0],
    strided=(0, 7),
    tunable={"tile": (16, 32, 64), "warps": (4, 8, 16), "stages": (2, 3, 4)},
)
