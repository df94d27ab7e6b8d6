"""Segment of each token of a step, for models with a learned row for each segment (BERT).

A token at position p of the request in line s is in segment Σ (p ≥ starts[s]), where `starts` are the first positions
of the segments 1, 2 …; rows and padding are as in kernels/step_inputs.py, and padding is in segment 0.
"""

import torch
from torch import Tensor

from kernels.jit import jit, launch, tl
from kernels.op import Args, Case, Make, Op, nbytes


def _reference(starts: Tensor, slot: Tensor, first: Tensor, query_start: Tensor, total: int) -> Tensor:
    """starts: [slots, segments - 1] int32; slot, first: [rows] int32; query_start: [rows + 1] int32; total: tokens of
    the step with padding → [total] int32."""
    count = (query_start[1:] - query_start[:-1]).long()
    owner = torch.repeat_interleave(torch.arange(len(count), device=slot.device), count)
    position = first[owner] + torch.arange(len(owner), device=slot.device) - query_start[owner]
    segments = torch.zeros(total, dtype=torch.int32, device=slot.device)
    segments[: len(owner)] = (position.unsqueeze(1) >= starts[slot[owner].long()]).sum(1).int()
    return segments


@jit(varying=("rows", "total"))
def step_segments_kernel(
    starts, slot, first, query_start, segments, rows, total, MORE: tl.constexpr, BLOCK: tl.constexpr
):
    """One program for each row, and one for the padding after them."""
    row = tl.program_id(0)
    start = tl.load(query_start + row)
    is_row = row < rows
    end = tl.load(query_start + row + 1, is_row, 0)
    end = tl.where(is_row, end, total)
    line = starts + tl.load(slot + row, is_row, 0).to(tl.int64) * MORE
    begin = tl.load(first + row, is_row, 0)
    for at in range(start, end, BLOCK):
        token = at + tl.arange(0, BLOCK)
        position = begin + token - start
        segment = token * 0
        for number in tl.static_range(MORE):
            segment += (is_row & (position >= tl.load(line + number))).to(tl.int32)
        tl.store(segments + token, segment, token < end)


def _triton(starts: Tensor, slot: Tensor, first: Tensor, query_start: Tensor, total: int) -> Tensor:
    rows = slot.shape[0]
    segments = torch.empty(total, dtype=torch.int32, device=slot.device)
    launch(
        step_segments_kernel,
        (rows + 1,),
        starts,
        slot,
        first,
        query_start,
        segments,
        rows,
        total,
        MORE=starts.shape[1],
        BLOCK=128,
        warps=1,
    )
    return segments


def _inputs(make: Make, counts: list[int], slots: int, segments: int, chunk: int = 0, padding: int = 0) -> Args:
    """chunk: position of the first token of every other row."""
    ends = [0]
    for count in counts:
        ends.append(ends[-1] + count)
    longest = max(counts, default=1) + chunk
    starts = make.integers(0, longest + 2, slots, segments - 1)
    return (
        starts if make.meta else starts.sort(1).values,
        make.permutation(slots)[: len(counts)].contiguous(),
        make.tensor([chunk * (row % 2) for row in range(len(counts))]),
        make.tensor(ends),
        ends[-1] + padding,
    )


STEP_SEGMENTS = Op(
    name="step_segments",
    reference=_reference,
    triton=_triton,
    inputs=_inputs,
    cases=(
        Case("two", {"counts": [5, 1, 0, 9], "slots": 6, "segments": 2, "padding": 3}),
        Case("three", {"counts": [7, 4], "slots": 2, "segments": 3, "chunk": 2}),
        Case("one", {"counts": [4], "slots": 3, "segments": 1}),
        Case("long", {"counts": [300, 20], "slots": 2, "segments": 2}),
        Case("empty", {"counts": [], "slots": 2, "segments": 2}),
        Case("32x256", {"counts": [256] * 32, "slots": 256, "segments": 2}, bench=True),
    ),
    tolerance={torch.float32: 0.0, torch.bfloat16: 0.0},  # whole numbers only
    traffic=lambda starts, slot, first, query_start, total: nbytes(slot, first, query_start) + 4 * total,
    rows=lambda args: args[1].shape[0],
)
