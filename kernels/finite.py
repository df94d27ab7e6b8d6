"""Detection of rows with a NaN or infinity in any of their tokens."""

import torch
from torch import Tensor

from kernels.jit import jit, launch, power_of_2, row_stride, tl
from kernels.op import Args, Case, Make, Op, nbytes


def _reference(hidden: Tensor, query_start: Tensor) -> Tensor:
    """hidden: [tokens, size]; query_start: [rows + 1] int32 → [rows] int32, 1 if any element of any token of the row is
    not finite. Tokens after the last row are ignored."""
    bad = (~hidden.isfinite()).any(1)
    starts = query_start.tolist()
    rows = [bool(bad[a:b].any()) for a, b in zip(starts, starts[1:], strict=False)]
    return torch.tensor(rows, dtype=torch.int32, device=hidden.device)


@jit
def finite_tokens_kernel(hidden, bad, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """One program for each token."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    value = tl.load(hidden + token * stride + at, at < SIZE, 0.0).to(tl.float32)
    # no NaN is less than infinity
    tl.store(bad + token, tl.max((tl.abs(value) < float("inf")).to(tl.int32) ^ 1, 0))


@jit
def finite_rows_kernel(bad, query_start, found, BLOCK: tl.constexpr):
    """One program for each row."""
    row = tl.program_id(0)
    start, end = tl.load(query_start + row), tl.load(query_start + row + 1)
    worst = tl.zeros((BLOCK,), tl.int32)
    for at in range(start, end, BLOCK):
        token = at + tl.arange(0, BLOCK)
        worst = tl.maximum(worst, tl.load(bad + token, token < end, 0))
    tl.store(found + row, tl.max(worst, 0))


def _triton(hidden: Tensor, query_start: Tensor) -> Tensor:
    tokens, size = hidden.shape
    rows = query_start.shape[0] - 1
    bad = torch.empty(tokens, dtype=torch.int32, device=hidden.device)
    found = torch.empty(rows, dtype=torch.int32, device=hidden.device)
    block = power_of_2(size)
    launch(
        finite_tokens_kernel,
        (tokens,),
        hidden,
        bad,
        row_stride(hidden, "hidden"),
        SIZE=size,
        BLOCK=block,
        warps=min(8, max(1, block // 512)),
    )
    launch(finite_rows_kernel, (rows,), bad, query_start, found, BLOCK=256, warps=1)
    return found


def _inputs(make: Make, counts: list[int], size: int, padding: int = 0) -> Args:
    ends = [0]
    for count in counts:
        ends.append(ends[-1] + count)
    hidden = make.normal(ends[-1] + padding, size)
    if len(counts) > 2 and not make.meta:
        hidden[ends[2] - 1, size // 2] = torch.nan
        hidden[ends[3] - 1, size - 1] = -torch.inf
        hidden[ends[-1] :] = torch.nan
    return hidden, make.tensor(ends)


FINITE_ROWS = Op(
    name="finite_rows",
    reference=_reference,
    triton=_triton,
    inputs=_inputs,
    cases=(
        Case("mixed", {"counts": [2, 1, 3, 4, 0], "size": 33, "padding": 2}),
        Case("long", {"counts": [3, 270, 2], "size": 5}),
        Case("empty", {"counts": [], "size": 8}),
        Case("decode-256x4096", {"counts": [1] * 256, "size": 4096}, bench=True),
        Case("prefill-8192x4096", {"counts": [2048] * 4, "size": 4096}, bench=True),
    ),
    tolerance={torch.float32: 0.0, torch.float16: 0.0, torch.bfloat16: 0.0},
    traffic=lambda hidden, query_start: nbytes(hidden, query_start),
    strided=(0,),
)
