"""LoRA adapter of each token of a step, read from the table of requests by the slot of its row.

Tokens without an adapter, and padding, get `none`. Rows and padding are as in kernels/step_inputs.py.
"""

import torch
from torch import Tensor

from kernels.jit import jit, launch, tl
from kernels.op import Args, Case, Make, Op, nbytes


def _reference(adapters: Tensor, slot: Tensor, query_start: Tensor, total: int, none: int) -> Tensor:
    """adapters: [slots] int32, below `none`, -1 for none; slot: [rows] int32; query_start: [rows + 1] int32; total:
    tokens of the step with padding → [total] int32."""
    own = adapters[slot.long()].repeat_interleave((query_start[1:] - query_start[:-1]).long())
    found = torch.full((total,), none, dtype=torch.int32, device=adapters.device)
    found[: len(own)] = torch.where(own < 0, none, own)
    return found


@jit(varying=("rows", "total"))
def step_adapters_kernel(adapters, slot, query_start, found, rows, total, NONE: tl.constexpr, BLOCK: tl.constexpr):
    """One program for each row, and one for the padding after them."""
    row = tl.program_id(0)
    start = tl.load(query_start + row)
    is_row = row < rows
    end = tl.load(query_start + row + 1, is_row, 0)
    end = tl.where(is_row, end, total)
    own = tl.load(adapters + tl.load(slot + row, is_row, 0), is_row, -1)
    own = tl.where(own < 0, NONE, own)
    for at in range(start, end, BLOCK):
        token = at + tl.arange(0, BLOCK)
        tl.store(found + token, token * 0 + own, token < end)


def _triton(adapters: Tensor, slot: Tensor, query_start: Tensor, total: int, none: int) -> Tensor:
    rows = slot.shape[0]
    found = torch.empty(total, dtype=torch.int32, device=adapters.device)
    launch(
        step_adapters_kernel,
        (rows + 1,),
        adapters,
        slot,
        query_start,
        found,
        rows,
        total,
        NONE=none,
        BLOCK=128,
        warps=1,
    )
    return found


def _inputs(make: Make, counts: list[int], slots: int, none: int, padding: int = 0) -> Args:
    ends = [0]
    for count in counts:
        ends.append(ends[-1] + count)
    slot = make.permutation(slots)[: len(counts)].contiguous()
    return make.integers(-1, none, slots), slot, make.tensor(ends), ends[-1] + padding, none


STEP_ADAPTERS = Op(
    name="step_adapters",
    reference=_reference,
    triton=_triton,
    inputs=_inputs,
    cases=(
        Case("mixed", {"counts": [5, 1, 0, 9], "slots": 6, "none": 3, "padding": 3}),
        Case("long", {"counts": [300, 20], "slots": 2, "none": 1}),
        Case("empty", {"counts": [], "slots": 2, "none": 2, "padding": 2}),
        Case("32x256", {"counts": [256] * 32, "slots": 256, "none": 8}, bench=True),
    ),
    tolerance={torch.float32: 0.0, torch.bfloat16: 0.0},  # whole numbers only
    traffic=lambda adapters, slot, query_start, total, none: nbytes(slot, query_start) + 4 * total,
    rows=lambda args: args[1].shape[0],
)
