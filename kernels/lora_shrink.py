"""First product of LoRA adapters: u[p] = x[p // pairs_per_row] A[group of p].

A group is an adapter, or an adapter and an expert. p is a row, or a pair of a row and an expert. `pairs` and `tiles`
are a schedule of the groups (experts/schedule.py). Rows without an adapter are in no tile: lora_expand.py does not read
their products, which are undefined. The inputs are divided into parts of SPLIT, so that a step of few rows has enough
programs. The parts of a sum are kept apart, and lora_expand.py adds them up in order.

As in experts/matmul.py, the columns of A take the rows of a matrix instruction and the pairs its columns, and inputs
are added up in order, STEP at a time. The sums of a pair therefore do not depend on the other pairs.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels.experts.schedule import EXPERT_SCHEDULE, empty_schedule
from kernels.jit import jit, launch, power_of_2, row_stride, tl
from kernels.op import Args, Case, Make, Op, nbytes
from kernels.tuning import settings

SPLIT = 1024  # inputs of a part
STEP = 64  # inputs at a time
BLOCK = 64  # columns of a program, at most
FEW, MANY = 16, 64  # pairs of a tile


def lora_tile_rows(pairs: int, groups: int) -> int:
    """Return the number of pairs of a tile for a step of this size."""
    return FEW if pairs <= 8 * groups else MANY


def num_parts(inputs: int) -> int:
    return -(-inputs // SPLIT)


def _reference(x: Tensor, a: Tensor, pairs: Tensor, tiles: Tensor, pairs_per_row: int, rows: int) -> Tensor:
    """x: [rows, inputs]; a: [groups, inputs, columns] of x's type, contiguous; pairs, tiles: from expert_schedule with
    tiles of `rows` pairs → [parts, pairs, columns] fp32."""
    _, inputs, columns = a.shape
    u = torch.zeros((num_parts(inputs), len(pairs), columns), dtype=torch.float32, device=x.device)
    for group, first, end in tiles.tolist():
        own = pairs[first:end].long()
        for part in range(len(u)):
            some = slice(part * SPLIT, (part + 1) * SPLIT)
            u[part, own] = x[own // pairs_per_row, some].float() @ a[group, some].float()
    return u


@jit(varying=("count",))
def lora_shrink_kernel(
    x,
    a,
    pairs,
    tiles,
    u,
    x_row,
    count,
    PAIRS_PER_ROW: tl.constexpr,
    INPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    """One program for each BLOCK columns and SPLIT inputs of a tile of ROWS pairs."""
    entry = tiles + tl.program_id(1) * 3
    first = tl.load(entry + 1)
    end = tl.load(entry + 2)
    if first >= end:
        return
    group = tl.load(entry).to(tl.int64)
    place = first + tl.arange(0, ROWS)
    real = place < end
    pair = tl.load(pairs + place, real, 0)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = column < COLUMNS
    part = tl.program_id(2)
    at = tl.arange(0, STEP)
    left = a + (group * INPUTS + part * SPLIT + at)[None, :] * COLUMNS + column[:, None]
    right = x + (pair // PAIRS_PER_ROW).to(tl.int64)[None, :] * x_row + (part * SPLIT + at)[:, None]
    total = tl.zeros((BLOCK, ROWS), tl.float32)
    for k in range(0, SPLIT, STEP):
        inside = at < INPUTS - part * SPLIT - k
        wanted = tl.load(left + k * COLUMNS, keep[:, None] & inside[None, :], 0.0)
        values = tl.load(right + k, real[None, :] & inside[:, None], 0.0)
        total = tl.dot(wanted, values, total, input_precision="ieee")
    out = u + (part.to(tl.int64) * count + pair)[:, None] * COLUMNS + column[None, :]
    tl.store(out, tl.trans(total), real[:, None] & keep[None, :])


def _triton(x: Tensor, a: Tensor, pairs: Tensor, tiles: Tensor, pairs_per_row: int, rows: int) -> Tensor:
    _, inputs, columns = a.shape
    if not a.is_contiguous():
        raise ValueError("a: the matrices of the groups must be contiguous; call .contiguous()")
    if x.shape != (len(pairs) // pairs_per_row, inputs):
        raise ValueError(
            f"x of {list(x.shape)}: {len(pairs)} pairs, {pairs_per_row} per row, need rows of {inputs} inputs"
        )
    u = torch.empty((num_parts(inputs), len(pairs), columns), dtype=torch.float32, device=x.device)
    block = max(16, min(BLOCK, power_of_2(columns)))
    default = {"warps": 4, "stages": 2 if x.element_size() == 4 else 4}
    tuned = settings("lora_shrink", default, x.device, rows=rows, inputs=inputs, columns=columns)
    launch(
        lora_shrink_kernel,
        (-(-columns // block), len(tiles), len(u)),
        x,
        a,
        pairs,
        tiles,
        u,
        row_stride(x, "x"),
        len(pairs),
        PAIRS_PER_ROW=pairs_per_row,
        INPUTS=inputs,
        COLUMNS=columns,
        SPLIT=SPLIT,
        ROWS=rows,
        BLOCK=block,
        STEP=STEP,
        warps=tuned["warps"],
        stages=tuned["stages"],
    )
    return u


def drawn_schedule(
    make: Make, tokens: int, groups: int, top_k: int, rows: int | None, *, none: bool
) -> tuple[Tensor, Tensor, int]:
    """Draw a group for each pair, or with `none` also no group. Return the schedule, and the pairs of a tile (default:
    as served)."""
    rows = rows or lora_tile_rows(tokens * top_k, groups)
    ids = make.integers(0, groups + none, tokens, top_k)
    pairs, tiles = (empty_schedule if make.meta else EXPERT_SCHEDULE.reference)(ids, groups, rows)
    return pairs, tiles, rows


def single_schedule(pairs: Tensor, tiles: Tensor, groups: int, own: range) -> tuple[Tensor, Tensor, int]:
    """Return the schedule of a step with these pairs alone, and the pairs of its tiles."""
    found = {pair: group for group, first, end in tiles.tolist() for pair in pairs[first:end].tolist()}
    ids = torch.tensor([[found.get(pair, groups) for pair in own]], dtype=torch.int32, device=pairs.device)
    rows = lora_tile_rows(len(own), groups)
    return *EXPERT_SCHEDULE.reference(ids, groups, rows), rows


def _inputs(
    make: Make, tokens: int, groups: int, inputs: int, columns: int, *, top_k: int = 1, rows: int | None = None
) -> Args:
    pairs, tiles, rows = drawn_schedule(make, tokens, groups, top_k, rows, none=False)
    x, a = make.normal(tokens, inputs), make.normal(groups, inputs, columns, scale=inputs**-0.5)
    return x, a, pairs, tiles, top_k, rows


def _single_row(args: Args, row: int) -> tuple[Args, Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]]:
    x, a, pairs, tiles, pairs_per_row, _ = args
    own = range(row * pairs_per_row, (row + 1) * pairs_per_row)
    *schedule, rows = single_schedule(pairs, tiles, len(a), own)
    return (x[row : row + 1], a, *schedule, pairs_per_row, rows), lambda outputs: (outputs[0][:, own.start : own.stop],)


def _traffic(x: Tensor, a: Tensor, pairs: Tensor, tiles: Tensor, pairs_per_row: int, rows: int) -> int:
    groups, inputs, columns = a.shape
    used = groups * (1 - (1 - 1 / groups) ** len(pairs))
    return nbytes(x, pairs, tiles) + round(a.nbytes / groups * used) + 4 * num_parts(inputs) * len(pairs) * columns


def _served(name: str, tokens: int, **sizes: Any) -> Case:
    return Case(f"{name}-{tokens}", {"tokens": tokens, **sizes}, bench=True)


LORA_SHRINK = Op(
    name="lora_shrink",
    reference=_reference,
    triton=_triton,
    inputs=_inputs,
    cases=(
        Case("one", {"tokens": 1, "groups": 1, "inputs": 64, "columns": 16}),
        Case("odd", {"tokens": 7, "groups": 3, "inputs": 70, "columns": 48}),
        Case("parts", {"tokens": 5, "groups": 2, "inputs": 2 * SPLIT + 33, "columns": 16}),
        Case("crowd", {"tokens": 50, "groups": 2, "inputs": 33, "columns": 32, "rows": 16}),
        Case("wide", {"tokens": 140, "groups": 2, "inputs": 66, "columns": 80}),
        Case("experts", {"tokens": 6, "groups": 12, "inputs": 40, "columns": 16, "top_k": 3}),
        Case("empty", {"tokens": 0, "groups": 2, "inputs": 32, "columns": 16}),
        *(_served("8-adapters-qkv", tokens, groups=8, inputs=4096, columns=48) for tokens in (1, 32, 256, 4096)),
        _served("8-adapters-down", 32, groups=8, inputs=14336, columns=16),
        _served("128-experts", 32, groups=256, inputs=2048, columns=32, top_k=8),
    ),
    tolerance={torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2},
    traffic=_traffic,
    flops=lambda x, a, pairs, *rest: 2 * len(pairs) * a.shape[1] * a.shape[2],
    single_row=_single_row,
    strided=(0,),
    tunable={"warps": (2, 4, 8), "stages": (2, 3, 4, 6)},
    nearest=("inputs", "columns"),
)
