"""Pooling of the tokens of each row of a step, combined with the row's earlier steps:

    first  the state of the prompt's first token          last  the state of its last token so far
    mean   the sum of all states by their number          max   the largest of each element

A row computes positions first[r] … of a prompt. Line slot[r] of `states` keeps the intermediate result of earlier
positions, so a prompt may be computed in chunks. Sums are taken in float64, tile by tile from the row's first token on,
so that a vector rounded to float32 does not depend on the chunks.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from kernels.jit import jit, launch, row_stride, tl
from kernels.op import Args, Case, Make, Op, nbytes

Pool = Literal["first", "last", "mean", "max"]
TOKENS_AT_ONCE, ELEMENTS = 32, 128


def _reference(
    hidden: Tensor, query_start: Tensor, slot: Tensor, first: Tensor, states: Tensor, pool: Pool
) -> tuple[Tensor, Tensor]:
    """hidden: [tokens, size]; query_start: [rows + 1] int32; slot, first: [rows] int32; states: [slots, size] float64,
    changed in place; the line of a row that begins at 0 is not read → [rows, size] fp32, 0 for rows without tokens, and
    states."""
    vectors = torch.zeros((len(slot), hidden.shape[1]), device=hidden.device)
    ends = query_start.tolist()
    for row, (line, before) in enumerate(zip(slot.tolist(), first.tolist(), strict=True)):
        x = hidden[ends[row] : ends[row + 1]].double()
        if not len(x):
            continue
        known = states[line : line + 1] if before else x[:0]
        match pool:
            case "first":
                states[line] = torch.cat((known, x))[0]
            case "last":
                states[line] = x[-1]
            case "max":
                states[line] = torch.cat((known, x)).amax(0)
            case "mean":
                states[line] = torch.cat((known, x)).sum(0)
        vectors[row] = states[line] / (before + len(x) if pool == "mean" else 1)
    return vectors, states


@jit
def pool_rows_kernel(
    hidden,
    query_start,
    slot,
    first,
    states,
    vectors,
    hidden_row,
    SIZE: tl.constexpr,
    POOL: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for some elements of a row."""
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = at < SIZE
    start, end = tl.load(query_start + row), tl.load(query_start + row + 1)
    vector = vectors + row.to(tl.int64) * SIZE + at
    if start == end:
        tl.store(vector, at * 0.0, keep)
        return
    before = tl.load(first + row)
    line = states + tl.load(slot + row).to(tl.int64) * SIZE + at
    NONE: tl.constexpr = float("-inf") if POOL == "max" else 0.0
    total = tl.where(before > 0, tl.load(line, keep, 0.0), NONE)
    if POOL == "first":
        new = tl.load(hidden + start.to(tl.int64) * hidden_row + at, keep, 0.0).to(tl.float64)
        total = tl.where(before > 0, total, new)
    elif POOL == "last":
        total = tl.load(hidden + (end - 1).to(tl.int64) * hidden_row + at, keep, 0.0).to(tl.float64)
    else:
        for tile in range(start, end, TOKENS):
            token = tile + tl.arange(0, TOKENS)
            mask = (token < end)[:, None] & keep[None, :]
            x = tl.load(hidden + token.to(tl.int64)[:, None] * hidden_row + at[None, :], mask, NONE).to(tl.float32)
            if POOL == "max":
                total = tl.maximum(total, tl.max(x, 0).to(tl.float64))
            else:
                total += tl.sum(x.to(tl.float64), 0)
    tl.store(line, total, keep)
    if POOL == "mean":
        total = total / (before + end - start).to(tl.float64)
    tl.store(vector, total.to(tl.float32), keep)


def _triton(
    hidden: Tensor, query_start: Tensor, slot: Tensor, first: Tensor, states: Tensor, pool: Pool
) -> tuple[Tensor, Tensor]:
    rows, size = slot.shape[0], hidden.shape[1]
    vectors = torch.empty((rows, size), dtype=torch.float32, device=hidden.device)
    launch(
        pool_rows_kernel,
        (rows, -(-size // ELEMENTS)),
        hidden,
        query_start,
        slot,
        first,
        states,
        vectors,
        row_stride(hidden, "hidden"),
        SIZE=size,
        POOL=pool,
        TOKENS=TOKENS_AT_ONCE,
        BLOCK=ELEMENTS,
        warps=4,
    )
    return vectors, states


def _inputs(make: Make, rows: Sequence[tuple[int, int]], size: int, pool: Pool) -> Args:
    """rows: first position and number of tokens of each."""
    states = make.normal(len(rows) + 2, size, dtype=torch.float32).double()
    return (
        make.normal(sum(count for _, count in rows), size),
        make.tensor(list(accumulate((count for _, count in rows), initial=0))),
        make.permutation(len(rows) + 2)[: len(rows)].contiguous(),
        make.tensor([before for before, _ in rows]),
        states,
        pool,
    )


def _single_row(args: Args, row: int) -> tuple[Args, Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]]:
    """A row writes its vector and one line of the states."""
    hidden, start, slot, first, states, pool = args
    tokens, line = slice(int(start[row]), int(start[row + 1])), int(slot[row])
    own = hidden[tokens], start[row : row + 2] - start[row], slot[row : row + 1], first[row : row + 1]

    def pick(outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        expected = states.clone()
        expected[line] = outputs[1][line]
        return outputs[0][row : row + 1], expected

    return (*own, states, pool), pick


POOLS: tuple[Pool, ...] = ("first", "last", "mean", "max")
_MIXED = ((0, 5), (3, 1), (0, 0), (9, 70), (0, 1), (2, 0), (0, 33))

POOL_ROWS = Op(
    name="pool_rows",
    reference=_reference,
    triton=_triton,
    inputs=_inputs,
    cases=(
        *(Case(pool, {"rows": _MIXED, "size": 130, "pool": pool}) for pool in POOLS),
        Case("empty", {"rows": (), "size": 16, "pool": "mean"}),
        *(Case(f"{pool}-16x512", {"rows": ((0, 512),) * 16, "size": 1024, "pool": pool}, bench=True) for pool in POOLS),
        Case("mean-8192", {"rows": ((0, 8192),), "size": 1024, "pool": "mean"}, bench=True),
    ),
    tolerance={torch.float32: 1e-6, torch.float16: 1e-6, torch.bfloat16: 1e-6},
    traffic=lambda hidden, query_start, slot, first, states, pool: (
        (hidden.nbytes if pool in ("mean", "max") else hidden[: len(slot)].nbytes)
        + nbytes(query_start, slot, first)
        + len(slot) * hidden.shape[1] * (states.itemsize + 4)
    ),
    single_row=_single_row,
    rows=lambda args: args[2].shape[0],
    strided=(0,),
)
