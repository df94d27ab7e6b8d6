"""Schedule of decode attention for one step (split-KV): a list of items that programs take one by one.

The cut of a row's keys into splits, and of its splits into chunks, depends on the number of keys alone. The result of a
row is therefore the same in every step: the sum, in a fixed order, of its chunks, each the sum of its splits. The step
only determines the size of an item:

    split    `base` keys in a row of up to 16 · base; in longer ones 2 · base, doubled until there are at most 128
    chunk    8 splits, or as many as leave a row with 8 chunks
    item     a chunk, which is the whole row if there is no second chunk; or one split, if a chunk exceeds half of the
             average number of the step's keys for each program: few or unequally long rows then keep all programs busy

The keys of a row are the keys from its `key_starts` on, or with a window the last `window` of these, or with a chunk
those in the chunk of the last one. Rows without a key and rows that compute no token or several have no item. One list
serves all layers with the same window or chunk.
"""

import random
from itertools import accumulate

import torch
from torch import Tensor

from kernels.attention.common import NO_WINDOW, check_options, first_key, keys_in_chunk
from kernels.jit import jit, launch, resident_programs, tl
from kernels.op import Case, Make, Op, nbytes
from kernels.tuning import settings

SPLITS = 128  # of a row, at most
CHUNKS = 8  # of a row, at most; and splits of a chunk, at least
COUNTED = 256  # rows that are counted at once


def _base(kv_heads: int, device: torch.device) -> int:
    """Return the number of keys of the shortest splits. It is lower if few KV heads must occupy a GPU with one row."""
    return settings("decode_schedule", {"base": 256 if kv_heads > 2 else 128}, device, kv_heads=kv_heads)["base"]


def _num_programs(device: torch.device) -> int:
    """Return about how many programs of decode attention run at the same time."""
    return resident_programs(device, each=2)


def _max_single_splits(kv_heads: int, device: torch.device) -> int:
    """Return the maximum number of items that are single splits. It always suffices for one row. If it does not suffice
    for all rows, a chunk has at most the average number of the step's keys for each program."""
    return max(SPLITS, 16 * _num_programs(device) // kv_heads)


def decode_items(rows: int, kv_heads: int, device: torch.device) -> int:
    """Return the maximum number of items of a step, for which decode attention allocates memory."""
    return CHUNKS * rows + _max_single_splits(kv_heads, device)


def empty_schedule(rows: int, kv_heads: int, device: torch.device) -> Tensor:
    return torch.empty((1 + rows + decode_items(rows, kv_heads, device), 4), dtype=torch.int32, device=device)


def split_keys(keys: int, base: int) -> tuple[int, int, int]:
    """Return how `keys` keys are cut: keys of a split, splits of a chunk, number of splits."""
    split = base if keys <= 16 * base else 2 * base
    while keys > SPLITS * split:
        split *= 2
    splits = -(-keys // split)
    return split, max(CHUNKS, -(-splits // CHUNKS)), splits


def _reference(
    query_start: Tensor,
    lengths: Tensor,
    kv_heads: int,
    window: int | None = None,
    key_starts: Tensor | None = None,
    chunk: int | None = None,
) -> Tensor:
    """query_start: [rows + 1], lengths: [rows] int32, of a step; key_starts: [rows] int32, the first position that a
    row reads, None: 0 → [1 + rows + decode_items(rows), 4] int32, 0 where unused:

    schedule[0]              items, rows with several items, 0 (where programs count the items they took), 0
    schedule[1 + i]          such a row, its first item, its items, how many of them are a chunk
    schedule[1 + rows + i]   an item's row, first key, end of its keys, keys of a split
    """
    check_options(window, None, 1.0, chunk)
    rows, base, num_programs = lengths.shape[0], _base(kv_heads, lengths.device), _num_programs(lengths.device)
    ends = [
        length if count == 1 else 0 for count, length in zip(query_start.diff().tolist(), lengths.tolist(), strict=True)
    ]
    firsts = [0] * rows if key_starts is None else key_starts.tolist()
    keys = [
        max(0, end - max(first, first_key(end - 1, window, chunk))) for end, first in zip(ends, firsts, strict=True)
    ]
    capacity = _max_single_splits(kv_heads, lengths.device)
    chunked: list[int] = []
    single_splits: list[int] = []
    for row in range(rows):
        split, chunk, splits = split_keys(keys[row], base)
        large = 2 * num_programs * min(keys[row], chunk * split) > kv_heads * sum(keys)
        if large and splits > 1:
            capacity -= splits
        (single_splits if large and splits > 1 and capacity >= 0 else chunked).append(row)
    items: list[tuple[int, int, int, int]] = []
    several: list[tuple[int, int, int, int]] = []
    for row in chunked + single_splits:
        split, chunk, _ = split_keys(keys[row], base)
        step = split if row in single_splits else split * chunk
        starts = range(ends[row] - keys[row], ends[row], step)
        if len(starts) > 1:
            several.append((row, len(items), len(starts), chunk if row in single_splits else 1))
        items += [(row, start, min(start + step, ends[row]), split) for start in starts]
    schedule = empty_schedule(rows, kv_heads, lengths.device).cpu().zero_()
    schedule[0, :2] = torch.tensor([len(items), len(several)])
    for at, entries in ((1, sorted(several)), (1 + rows, items)):
        if entries:
            schedule[at : at + len(entries)] = torch.tensor(entries)
    return schedule.to(lengths.device)


@jit
def _ends(query_start, lengths, row, rows):
    """Return where the keys of these rows end, or 0 for rows without an item."""
    real = row < rows
    start = tl.load(query_start + row, real, 0)
    count = tl.load(query_start + row + 1, real, 0) - start
    return tl.where(count == 1, tl.load(lengths + row, real, 0), 0)


@jit
def _keys(ends, key_starts, row, rows, WINDOW: tl.constexpr, CHUNK: tl.constexpr, KEY_STARTS: tl.constexpr):
    """Return the number of keys that rows with these ends read."""
    most = keys_in_chunk(ends, CHUNK) if CHUNK else WINDOW
    if KEY_STARTS:
        return tl.maximum(tl.minimum(ends - tl.load(key_starts + row, row < rows, 0), most), 0)
    else:
        return tl.minimum(ends, most)


@jit
def _split_keys(keys, BASE: tl.constexpr):
    split = tl.where(keys <= 16 * BASE, BASE, 2 * BASE)
    for _ in tl.static_range(20):
        split = tl.where((keys + 127) // 128 > split, split * 2, split)
    splits = (keys + split - 1) // split
    return split, tl.maximum(8, (splits + 7) // 8), splits


@jit
def _large(keys, split, chunk, splits, limit, num_programs):
    return (tl.minimum(keys, chunk * split).to(tl.int64) * (2 * num_programs) > limit) & (splits > 1)


@jit
def _write(place, first, second, third, fourth, keep):
    tl.store(place, first, keep)
    tl.store(place + 1, second, keep)
    tl.store(place + 2, third, keep)
    tl.store(place + 3, fourth, keep)


@jit(varying=("rows", "capacity", "items"))
def decode_schedule_kernel(
    query_start,
    lengths,
    key_starts,
    schedule,
    rows,
    capacity,
    items,
    num_programs,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    KEY_STARTS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BASE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for each row: counts the items of all earlier rows, then writes the items of its own."""
    own = tl.program_id(0)
    limit = tl.full([], 0, tl.int64)
    for at in range(0, rows, BLOCK):
        row = at + tl.arange(0, BLOCK)
        keys = _keys(_ends(query_start, lengths, row, rows), key_starts, row, rows, WINDOW, CHUNK, KEY_STARTS)
        limit += tl.sum(keys.to(tl.int64), 0)
    limit *= KV_HEADS
    # Counts over all rows so far: splits of rows that should be cut up, chunks that are items, splits that are items,
    # and rows of several items. The last three are also counted over the rows before the own one.
    requested = 0
    chunked = 0
    single_splits = 0
    several = 0
    chunked_before = 0
    single_splits_before = 0
    several_before = 0
    own_is_split = 0
    for at in range(0, rows, BLOCK):
        row = at + tl.arange(0, BLOCK)
        keys = _keys(_ends(query_start, lengths, row, rows), key_starts, row, rows, WINDOW, CHUNK, KEY_STARTS)
        split, chunk, splits = _split_keys(keys, BASE)
        requested_here = tl.where(_large(keys, split, chunk, splits, limit, num_programs), splits, 0)
        is_split = (requested_here > 0) & (requested + tl.cumsum(requested_here, 0) <= capacity)
        singles = tl.where(is_split, splits, 0)
        wholes = tl.where(is_split, 0, (splits + chunk - 1) // chunk)
        many = (singles + wholes > 1).to(tl.int32)
        before = (row < own).to(tl.int32)
        chunked_before += tl.sum(wholes * before, 0)
        single_splits_before += tl.sum(singles * before, 0)
        several_before += tl.sum(many * before, 0)
        own_is_split += tl.sum((is_split & (row == own)).to(tl.int32), 0)
        requested += tl.sum(requested_here, 0)
        chunked += tl.sum(wholes, 0)
        single_splits += tl.sum(singles, 0)
        several += tl.sum(many, 0)

    end = _ends(query_start, lengths, own, rows)
    keys = _keys(end, key_starts, own, rows, WINDOW, CHUNK, KEY_STARTS)
    split, chunk, splits = _split_keys(keys, BASE)
    step = tl.where(own_is_split > 0, split, split * chunk)
    first = tl.where(own_is_split > 0, chunked + single_splits_before, chunked_before)
    count = (keys + step - 1) // step
    number = tl.arange(0, 128)
    begin = end - keys + number * step
    _write(schedule + (1 + rows + first + number) * 4, own, begin, tl.minimum(begin + step, end), split, number < count)
    per_chunk = tl.where(own_is_split > 0, chunk, 1)
    _write(schedule + (1 + several_before) * 4, own, first, count, per_chunk, count > 1)
    _write(schedule, chunked + single_splits, several, 0, 0, own == 0)
    _write(schedule + (1 + own) * 4, 0, 0, 0, 0, (own >= several) & (own < rows))
    for at in range(own * 128, items, tl.num_programs(0) * 128):
        unused = (at + number >= chunked + single_splits) & (at + number < items)
        _write(schedule + (1 + rows + at + number) * 4, 0, 0, 0, 0, unused)


def _triton(
    query_start: Tensor,
    lengths: Tensor,
    kv_heads: int,
    window: int | None = None,
    key_starts: Tensor | None = None,
    chunk: int | None = None,
) -> Tensor:
    check_options(window, None, 1.0, chunk)
    rows, device = lengths.shape[0], lengths.device
    schedule = empty_schedule(rows, kv_heads, device)
    launch(
        decode_schedule_kernel,
        (max(1, rows),),
        query_start,
        lengths,
        lengths if key_starts is None else key_starts,
        schedule,
        rows,
        _max_single_splits(kv_heads, device),
        schedule.shape[0] - 1 - rows,
        _num_programs(device),
        WINDOW=window or NO_WINDOW,
        CHUNK=chunk or 0,
        KEY_STARTS=key_starts is not None,
        KV_HEADS=kv_heads,
        BASE=_base(kv_heads, device),
        BLOCK=COUNTED,
    )
    return schedule


def _inputs(
    make: Make,
    rows: int,
    kv_heads: int,
    longest: int,
    window: int | None = None,
    other: int = 0,
    shortest: int = 1,
    key_starts: bool = False,
    chunk: int | None = None,
) -> tuple:
    """other: every `other`-th row computes 0 or 2 tokens. key_starts: out of four rows one begins at 0, one with its
    last key, one has no key, and one begins at a random position."""
    if make.meta:
        first = make.tensor([0] * rows) if key_starts else None
        return make.tensor([0] * (rows + 1)), make.tensor([1] * rows), kv_heads, window, first, chunk
    draw = random.Random(make.seed)
    counts = [draw.choice((0, 2)) if other and row % other == 0 else 1 for row in range(rows)]
    # as many short rows as long ones, on a logarithmic scale
    lengths = [int(shortest * (longest / shortest) ** draw.random()) + 1 for _ in range(rows)]
    start, first = make.tensor(list(accumulate(counts, initial=0))), None
    if key_starts:
        places = ((0, length - 1, length, draw.randrange(length)) for length in lengths)
        first = make.tensor([place[(row + 3) % 4] for row, place in enumerate(places)])
    return start, make.tensor(lengths), kv_heads, window, first, chunk


DECODE_SCHEDULE = Op(
    name="decode_schedule",
    reference=_reference,
    triton=_triton,
    inputs=_inputs,
    cases=(
        Case("one", {"rows": 1, "kv_heads": 8, "longest": 5000}),
        Case("mixed", {"rows": 13, "kv_heads": 2, "longest": 40000, "other": 4}),
        Case("long", {"rows": 5, "kv_heads": 1, "longest": 1 << 22, "shortest": 1 << 17}),
        Case("window", {"rows": 6, "kv_heads": 4, "longest": 9000, "window": 700}),
        Case("key-starts", {"rows": 17, "kv_heads": 2, "longest": 40000, "other": 5, "key_starts": True}),
        Case("key-starts-window", {"rows": 9, "kv_heads": 4, "longest": 9000, "window": 700, "key_starts": True}),
        Case("key-starts-split", {"rows": 4, "kv_heads": 2, "longest": 3100, "shortest": 2900, "key_starts": True}),
        Case("chunk", {"rows": 8, "kv_heads": 2, "longest": 40000, "shortest": 300, "chunk": 6000, "other": 4}),
        Case("equal", {"rows": 5, "kv_heads": 8, "longest": 4100, "shortest": 4095}),
        Case("none", {"rows": 3, "kv_heads": 8, "longest": 4100, "other": 1}),
        Case("empty", {"rows": 0, "kv_heads": 8, "longest": 10}),
        Case("64", {"rows": 64, "kv_heads": 8, "longest": 8192}, bench=True),
        Case("1024", {"rows": 1024, "kv_heads": 8, "longest": 8192, "other": 100}, bench=True),
        Case("64-llama4", {"rows": 64, "kv_heads": 8, "longest": 16384, "chunk": 8192}, bench=True),
        Case("256-key-starts", {"rows": 256, "kv_heads": 16, "longest": 2048, "key_starts": True}, bench=True),
    ),
    tolerance={torch.float32: 0.0, torch.bfloat16: 0.0},
    traffic=lambda query_start, lengths, kv_heads, window=None, key_starts=None, chunk=None: (
        nbytes(query_start, lengths, key_starts)
        + 16 * (1 + lengths.shape[0] + decode_items(lengths.shape[0], kv_heads, lengths.device))
    ),
)
