"""Final operation on pooled numbers, over the first `width` columns of each row, in fp32:

    normalize  x / max(‖x‖, 1e-12)       softmax  e^(x - max) / Σ e^(x - max)       sigmoid  1 / (1 + e^-x)

Each row has a program of its own: the order of torch's own sums depends on the number of rows.
"""

from typing import Literal

import torch
from torch import Tensor

from kernels.jit import jit, launch, power_of_2, row_stride, row_warps, tl
from kernels.op import Args, Case, Make, Op, independent_rows

End = Literal["normalize", "softmax", "sigmoid"]
MIN_NORM = 1e-12


def _reference(x: Tensor, width: int, end: End) -> Tensor:
    """x: [rows, size] fp32; columns after the first `width` are ignored → [rows, width] fp32."""
    x = x[:, :width]
    match end:
        case "normalize":
            return torch.nn.functional.normalize(x, dim=-1, eps=MIN_NORM)
        case "softmax":
            return x.softmax(-1)
        case "sigmoid":
            return x.sigmoid()


@jit(varying=("width",))
def pool_end_kernel(x, y, x_row, width, MIN_NORM: tl.constexpr, END: tl.constexpr, BLOCK: tl.constexpr):
    """One program for each row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    keep = at < width
    value = tl.load(x + row * x_row + at, keep, 0.0)
    if END == "normalize":
        result = value / tl.maximum(tl.sqrt(tl.sum(value * value, 0)), MIN_NORM)
    elif END == "softmax":
        grown = tl.where(keep, tl.exp(value - tl.max(tl.where(keep, value, float("-inf")), 0)), 0.0)
        result = grown / tl.sum(grown, 0)
    else:
        result = 1.0 / (1.0 + tl.exp(-value))
    tl.store(y + row * width + at, result, keep)


def _triton(x: Tensor, width: int, end: End) -> Tensor:
    rows, size = x.shape
    y = torch.empty((rows, width), dtype=torch.float32, device=x.device)
    block = power_of_2(size)
    launch(
        pool_end_kernel,
        (rows,),
        x,
        y,
        row_stride(x, "x"),
        width,
        MIN_NORM=MIN_NORM,
        END=end,
        BLOCK=block,
        warps=row_warps(block),
    )
    return y


def _inputs(make: Make, rows: int, size: int, end: End, width: int | None = None) -> Args:
    return make.normal(rows, size, dtype=torch.float32, scale=3.0), width or size, end


ENDS: tuple[End, ...] = ("normalize", "softmax", "sigmoid")

POOL_END = Op(
    name="pool_end",
    reference=_reference,
    triton=_triton,
    inputs=_inputs,
    cases=(
        *(Case(end, {"rows": 3, "size": 77, "end": end}) for end in ENDS),
        *(Case(f"{end}-one", {"rows": 2, "size": 1, "end": end}) for end in ENDS),
        *(Case(f"{end}-cut", {"rows": 4, "size": 50, "end": end, "width": 19}) for end in ENDS),
        Case("empty", {"rows": 0, "size": 8, "end": "normalize"}),
        Case("normalize-256x1024", {"rows": 256, "size": 1024, "end": "normalize"}, bench=True),
        Case("normalize-8192x1024", {"rows": 8192, "size": 1024, "end": "normalize"}, bench=True),
        Case("softmax-8192x16", {"rows": 8192, "size": 16, "end": "softmax"}, bench=True),
        Case("sigmoid-256x1", {"rows": 256, "size": 1, "end": "sigmoid"}, bench=True),
    ),
    tolerance={torch.float32: 1e-5, torch.float16: 1e-5, torch.bfloat16: 1e-5},  # fp32 whatever the activations are
    traffic=lambda x, width, end: 8 * x.shape[0] * width,
    single_row=independent_rows(0),
    strided=(0,),
)
