"""Root mean square norm after the residual add.

    r ← r + a · x;  y = r / sqrt(mean(r²) + eps) · w        (without r: y = x / sqrt(mean(x²) + eps) · w)

The sum is taken in fp32: a running bf16 sum of thousands of squares stalls. `weight` includes any offset already (a
checkpoint that stores w - 1 is corrected when it is loaded). Source: arXiv:1910.07467.
"""

import torch
from torch import Tensor

from kernels.cpu import bodies
from kernels.jit import jit, launch, power_of_2, row_stride, row_warps, tl
from kernels.op import Args, Case, Make, Op, independent_rows, nbytes


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x: [..., size]; weight: [size], or [heads, size] where each head has its own."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    return (wide * scale).mul_(weight).to(x.dtype)


def rms_norm_shared(x: Tensor, weight: Tensor, eps: float, square_sum: Tensor, size: int) -> Tensor:
    """Compute the norm of a part of longer rows. square_sum: [..., 1] fp32, of the whole row of `size` elements."""
    return (x.float() * torch.rsqrt(square_sum / size + eps)).mul_(weight).to(x.dtype)


def _reference(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    scale: float = 1.0,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """x, residual: [rows, size]; weight: [size] fp32 → the norm, in `out` if given (it may be x), and the residual,
    which is changed in place."""
    read = x
    if residual is not None:
        read = residual.copy_(residual.float() + scale * x.float())
    y = rms_norm(read, weight, eps)
    y = y if out is None else out.copy_(y)
    return y if residual is None else (y, residual)


@jit
def rms_norm_kernel(
    x,
    residual,
    weight,
    y,
    x_row,
    residual_row,
    y_row,
    eps,
    scale,
    SIZE: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for each row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    keep = at < SIZE
    value = tl.load(x + row * x_row + at, keep, 0.0).to(tl.float32)
    if ADD:
        place = residual + row * residual_row + at
        summed = tl.load(place, keep, 0.0).to(tl.float32) + scale * value
        rounded = summed.to(residual.dtype.element_ty)
        tl.store(place, rounded, keep)
        value = rounded.to(tl.float32)
    factor = tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
    normed = value * factor * tl.load(weight + at, keep, 0.0)
    tl.store(y + row * y_row + at, normed.to(y.dtype.element_ty), keep)


def _triton(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    scale: float = 1.0,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    rows, size = x.shape
    block = power_of_2(size)
    launch(
        rms_norm_kernel,
        (rows,),
        x,
        x if residual is None else residual,
        weight,
        y,
        row_stride(x, "x"),
        0 if residual is None else row_stride(residual, "residual"),
        row_stride(y, "out"),
        eps,
        scale,
        SIZE=size,
        ADD=residual is not None,
        BLOCK=block,
        warps=row_warps(block),
    )
    return y if residual is None else (y, residual)


def _inputs(make: Make, rows: int, size: int, add: bool) -> Args:
    plain = make.normal(rows, size), make.normal(size, dtype=torch.float32), 1e-6
    return (*plain, make.normal(rows, size), 0.25) if add else plain


RMS_NORM = Op(
    name="rms_norm",
    reference=_reference,
    triton=_triton,
    inputs=_inputs,
    cases=(
        Case("one", {"rows": 1, "size": 64, "add": True}),
        Case("odd", {"rows": 7, "size": 123, "add": True}),
        Case("plain", {"rows": 5, "size": 96, "add": False}),
        Case("empty", {"rows": 0, "size": 32, "add": True}),
        Case("decode-32x4096", {"rows": 32, "size": 4096, "add": True}, bench=True),
        Case("4096x4096", {"rows": 4096, "size": 4096, "add": True}, bench=True),
        Case("final-256x4096", {"rows": 256, "size": 4096, "add": False}, bench=True),
    ),
    tolerance={torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2},
    traffic=lambda x, weight, eps, residual=None, scale=1.0: (2 if residual is None else 4) * x.nbytes + nbytes(weight),
    compiled=bodies.rms_norm,
    cpu_cases=(
        Case("8x1024", {"rows": 8, "size": 1024, "add": False}),
        Case("512x1024", {"rows": 512, "size": 1024, "add": False}),
    ),
    single_row=independent_rows(0, 3),
    strided=(0, 3),
    peer=lambda x, weight, eps, *rest: torch.nn.functional.rms_norm(x, x.shape[-1:], weight.to(x.dtype), eps),
)
