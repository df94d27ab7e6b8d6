"""Rows of activations rounded to int8 with a scale for each row.

    scale = max |x| / 127;  q = round(x / scale)          (with a given scale: q = round(x / scale), at most 127)

Rounding is to nearest, ties to even, and symmetric: -127 … 127. A row with a number that is not finite gets a scale
that is not a number, so that its products are not finite either. Source: LLM.int8 (arXiv:2208.07339, section 3.1), and
compressed-tensors' symmetric quantization of tokens.
"""

import torch
from torch import Tensor

from kernels.jit import jit, launch, power_of_2, row_stride, row_warps, tl
from kernels.op import Args, Case, Make, Op, independent_rows, nbytes

LARGEST = 127.0
MIN_AMAX = 2.0**-100  # lower bound of a row's largest number: zeros get a scale with a finite inverse


def int8_rows(x: Tensor, static_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x: [rows, size] of any floating type; static_scale: [1] float32 → values of the same shape in int8, scales [rows]
    float32."""
    wide = x.float()
    if static_scale is None:
        scales = wide.abs().nan_to_num(nan=0.0).amax(1).clamp(min=MIN_AMAX) * (1 / LARGEST)
    else:
        scales = static_scale.float().expand(len(x)).clone()
    numbers = (wide * scales.reciprocal()[:, None]).nan_to_num(nan=0.0).clamp(-LARGEST, LARGEST)
    return numbers.round().to(torch.int8), scales + (wide * 0.0).sum(1)


@jit
def quantize_int8_kernel(
    x, static_scale, values, scales, x_row, SIZE: tl.constexpr, STATIC: tl.constexpr, WIDTH: tl.constexpr
):
    """One program for each row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    value = tl.load(x + row * x_row + at, at < SIZE, 0.0).to(tl.float32)
    if STATIC:
        scale = tl.load(static_scale)
    else:
        # The constants are 2^-100 and 1 / 127.
        largest = tl.max(tl.where(value == value, tl.abs(value), 0.0), 0)
        scale = tl.maximum(largest, 7.888609052210118e-31) * 0.007874015748031496
    number = value * tl.div_rn(1.0, scale)
    number = tl.minimum(tl.maximum(tl.where(number == number, number, 0.0), -127.0), 127.0)
    # Floats next to 1.5 · 2^23 are whole: the sum rounds to nearest, ties to even.
    whole = (number + 12582912.0) - 12582912.0
    tl.store(values + row * SIZE + at, whole.to(tl.int8), at < SIZE)
    tl.store(scales + row, scale + tl.sum(value * 0.0, 0))


def _triton(x: Tensor, static_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    rows, size = x.shape
    values = torch.empty((rows, size), dtype=torch.int8, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    width = power_of_2(size)
    launch(
        quantize_int8_kernel,
        (rows,),
        x,
        scales if static_scale is None else static_scale,
        values,
        scales,
        row_stride(x, "x"),
        SIZE=size,
        STATIC=static_scale is not None,
        WIDTH=width,
        warps=row_warps(width),
    )
    return values, scales


def _inputs(make: Make, rows: int, size: int, static_scale: bool = False) -> Args:
    x = make.normal(rows, size) * (make.normal(rows, 1, dtype=torch.float32).exp().to(make.dtype))
    if rows > 2 and not make.meta:
        x[1] = 0.0
    return x, make.zeros(1, dtype=torch.float32) + 0.02 if static_scale else None


QUANTIZE_INT8 = Op(
    name="quantize_int8",
    reference=int8_rows,
    triton=_triton,
    inputs=_inputs,
    cases=(
        Case("one", {"rows": 1, "size": 64}),
        Case("odd", {"rows": 7, "size": 123}),
        Case("static", {"rows": 5, "size": 96, "static_scale": True}),
        Case("empty", {"rows": 0, "size": 32}),
        Case("decode-32x4096", {"rows": 32, "size": 4096}, bench=True),
        Case("4096x4096", {"rows": 4096, "size": 4096}, bench=True),
        Case("32x28672", {"rows": 32, "size": 28672}, bench=True),
    ),
    # Values may be 1 apart where x / scale is halfway between two, which is 1 / 50 of their root mean square.
    tolerance={torch.float32: 3e-2, torch.float16: 3e-2, torch.bfloat16: 3e-2},
    traffic=lambda x, static_scale=None: x.nbytes + x.numel() + nbytes(static_scale) + 4 * len(x),
    single_row=independent_rows(0),
    strided=(0,),
)
