"""Schedule of prefill attention for one step: a list of items, each a block of tokens of a row, and a part of its keys.

A step with fewer blocks than programs run at the same time, such as 50 tokens after 20,000 cached ones, divides the
keys of its blocks (split-KV): a block gets a share of the programs in proportion to its keys, at least one, at most
SPLITS, and at least MIN_KEYS keys for each. `programs` = 0 never divides: the result of a row then depends neither on
the other rows nor on how its prompt is cut. Later blocks come first: they tend to see the most keys of a prompt.

Rows with fewer than two tokens have no item. One list serves all layers with the same size of blocks.
"""

from itertools import accumulate

import torch
from torch import Tensor

from kernels.jit import jit, launch, resident_programs, tl
from kernels.op import Args, Case, Make, Op, nbytes

SPLITS = 16  # of a block, at most
MIN_KEYS = 512  # of a split, except the last one
COUNTED = 256  # rows that are counted at once


def num_programs(device: torch.device, kv_heads: int) -> int:
    """Return the number of items of a step that occupy the device: two programs for each multiprocessor."""
    return -(-resident_programs(device, each=2) // kv_heads)


def max_items(tokens: int, rows: int, block: int, programs: int) -> int:
    """Return the maximum number of items of a step."""
    return tokens // block + min(rows, tokens // 2) + programs


def max_splits(programs: int) -> int:
    """Return the maximum number of items of a step that divides keys."""
    return 2 * programs


def empty_schedule(lengths: Tensor, tokens: int, block: int, programs: int) -> Tensor:
    capacity = max_items(tokens, lengths.shape[0], block, programs)
    return torch.empty((1 + capacity, 4), dtype=torch.int32, device=lengths.device)


def _reference(query_start: Tensor, lengths: Tensor, tokens: int, block: int, programs: int) -> Tensor:
    """query_start: [rows + 1], lengths: [rows] int32; tokens: of the step, with padding; block: tokens of an item →
    [1 + max_items, 4] int32, 0 where unused:

    schedule[0]         number of items, 0, 0, 0
    schedule[1 + i]     an item's row, its first token in the row, its split, number of splits of its keys
    """
    rows = lengths.shape[0]
    counts, ends = query_start.diff().tolist(), lengths.tolist()
    blocks = [-(-count // block) if count > 1 else 0 for count in counts]
    total, work = sum(blocks), sum(number * end for number, end in zip(blocks, ends, strict=True))
    items = []
    for row in range(rows):
        splits = 1
        if total < programs:
            splits = max(1, min(ends[row] * programs // max(1, work), ends[row] // MIN_KEYS, SPLITS))
        items += [(row, at * block, split, splits) for at in range(blocks[row]) for split in range(splits)]
    schedule = torch.zeros((1 + max_items(tokens, rows, block, programs), 4), dtype=torch.int32)
    schedule[0, 0] = len(items)
    if items:
        schedule[1 : 1 + len(items)] = torch.tensor(items[::-1])
    return schedule.to(lengths.device)


@jit
def _blocks(query_start, row, rows, BLOCK: tl.constexpr):
    real = row < rows
    count = tl.load(query_start + row + 1, real, 0) - tl.load(query_start + row, real, 0)
    return tl.where(count > 1, (count + BLOCK - 1) // BLOCK, 0)


@jit
def _splits(length, total, work, programs, MIN_KEYS: tl.constexpr, SPLITS: tl.constexpr):
    """Return the splits of a row's blocks. work: blocks times their row's length, over all rows."""
    wanted = (length.to(tl.int64) * programs // tl.maximum(work, 1)).to(tl.int32)
    wanted = tl.maximum(tl.minimum(tl.minimum(wanted, length // MIN_KEYS), SPLITS), 1)
    return tl.where(total < programs, wanted, 1)


@jit(varying=("rows", "capacity"))
def prefill_schedule_kernel(
    query_start,
    lengths,
    schedule,
    rows,
    capacity,
    programs,
    BLOCK: tl.constexpr,
    MIN_KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    COUNTED: tl.constexpr,
):
    """One program for each row: counts the items of all rows, then writes the items of its own."""
    own = tl.program_id(0)
    total = 0
    work = tl.full([], 0, tl.int64)
    for at in range(0, rows, COUNTED):
        row = at + tl.arange(0, COUNTED)
        blocks = _blocks(query_start, row, rows, BLOCK)
        total += tl.sum(blocks, 0)
        work += tl.sum(blocks.to(tl.int64) * tl.load(lengths + row, row < rows, 0), 0)
    items = 0
    before = 0
    for at in range(0, rows, COUNTED):
        row = at + tl.arange(0, COUNTED)
        length = tl.load(lengths + row, row < rows, 0)
        each = _blocks(query_start, row, rows, BLOCK) * _splits(length, total, work, programs, MIN_KEYS, SPLITS)
        items += tl.sum(each, 0)
        before += tl.sum(tl.where(row < own, each, 0), 0)
    number = tl.arange(0, 128)
    if own < rows:
        splits = _splits(tl.load(lengths + own), total, work, programs, MIN_KEYS, SPLITS)
        count = _blocks(query_start, own, rows, BLOCK) * splits
        for at in range(0, count, 128):
            item = at + number
            place = schedule + (items - before - item) * 4
            keep = item < count
            tl.store(place, own, keep)
            tl.store(place + 1, item // splits * BLOCK, keep)
            tl.store(place + 2, item % splits, keep)
            tl.store(place + 3, splits, keep)
    if own == 0:
        tl.store(schedule + number, tl.where(number == 0, items, 0), number < 4)
    for at in range(own * 128, capacity, tl.num_programs(0) * 128):
        unused = (at + number >= items) & (at + number < capacity)
        for field in tl.static_range(4):
            tl.store(schedule + (1 + at + number) * 4 + field, 0, unused)


def _triton(query_start: Tensor, lengths: Tensor, tokens: int, block: int, programs: int) -> Tensor:
    rows = lengths.shape[0]
    schedule = empty_schedule(lengths, tokens, block, programs)
    launch(
        prefill_schedule_kernel,
        (max(1, rows),),
        query_start,
        lengths,
        schedule,
        rows,
        len(schedule) - 1,
        programs,
        BLOCK=block,
        MIN_KEYS=MIN_KEYS,
        SPLITS=SPLITS,
        COUNTED=COUNTED,
    )
    return schedule


def _inputs(make: Make, rows: list[tuple[int, int]], block: int, programs: int, padding: int = 0) -> Args:
    """rows: tokens and length of each."""
    starts = list(accumulate((count for count, _ in rows), initial=0))
    return make.tensor(starts), make.tensor([length for _, length in rows]), starts[-1] + padding, block, programs


PREFILL_SCHEDULE = Op(
    name="prefill_schedule",
    reference=_reference,
    triton=_triton,
    inputs=_inputs,
    cases=(
        Case("one", {"rows": [(2, 2)], "block": 16, "programs": 0}),
        Case("turn", {"rows": [(50, 20050)], "block": 32, "programs": 33}),
        Case("short", {"rows": [(50, 900)], "block": 32, "programs": 33}),
        Case("mixed", {"rows": [(1, 900), (70, 5000), (0, 0), (9, 9), (200, 9000)], "block": 32, "programs": 33}),
        Case("enough", {"rows": [(700, 9000), (400, 400)], "block": 32, "programs": 33}),
        Case("many", {"rows": [(2, 3000 + row) for row in range(300)], "block": 32, "programs": 400, "padding": 50}),
        Case("whole", {"rows": [(300, 30000), (3, 7)], "block": 8, "programs": 0, "padding": 5}),
        Case("empty", {"rows": [], "block": 8, "programs": 4}),
        Case("turn-after-20k", {"rows": [(50, 20050)], "block": 32, "programs": 33}, bench=True),
        Case("512-in-256-rows", {"rows": [(257, 4096)] + [(1, 900)] * 255, "block": 32, "programs": 33}, bench=True),
    ),
    tolerance={torch.float32: 0.0, torch.bfloat16: 0.0},
    traffic=lambda query_start, lengths, tokens, block, programs: (
        nbytes(query_start, lengths) + 16 * (1 + max_items(tokens, lengths.shape[0], block, programs))
    ),
    rows=lambda args: args[1].shape[0],
)
