"""Layer norm after the residual add, over the last axis, in fp32.

    r ← r + a · x;  y = (r - mean) / sqrt(var + eps) · w (+ b)        (without r: of x)

Source: arXiv:1607.06450.
"""

import torch
from torch import Tensor

from kernels.cpu import bodies
from kernels.jit import jit, launch, power_of_2, row_stride, row_warps, tl
from kernels.op import Args, Case, Make, Op, independent_rows, nbytes


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """x: [..., size]; weight, bias: [size], or [heads, size] where each head has its own."""
    wide = torch.nn.functional.layer_norm(x.float(), x.shape[-1:], None, None, eps).mul_(weight)
    return (wide if bias is None else wide.add_(bias)).to(x.dtype)


def _reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None = None, scale: float = 1.0
) -> Tensor | tuple[Tensor, Tensor]:
    """x, residual: [rows, size]; weight, bias: [size] fp32 → the norm, and the residual, which is changed in place."""
    if residual is None:
        return layer_norm(x, weight, bias, eps)
    residual.copy_(residual.float() + scale * x.float())
    return layer_norm(residual, weight, bias, eps), residual


@jit
def layer_norm_kernel(
    x,
    residual,
    weight,
    bias,
    y,
    x_row,
    residual_row,
    y_row,
    eps,
    scale,
    SIZE: tl.constexpr,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
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
    centred = tl.where(keep, value - tl.sum(value, 0) / SIZE, 0.0)
    factor = tl.rsqrt(tl.sum(centred * centred, 0) / SIZE + eps)
    normed = centred * factor * tl.load(weight + at, keep, 0.0)
    if BIAS:
        normed += tl.load(bias + at, keep, 0.0)
    tl.store(y + row * y_row + at, normed.to(y.dtype.element_ty), keep)


def _triton(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None = None, scale: float = 1.0
) -> Tensor | tuple[Tensor, Tensor]:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, size = x.shape
    block = power_of_2(size)
    launch(
        layer_norm_kernel,
        (rows,),
        x,
        x if residual is None else residual,
        weight,
        weight if bias is None else bias,
        y,
        row_stride(x, "x"),
        0 if residual is None else row_stride(residual, "residual"),
        size,
        eps,
        scale,
        SIZE=size,
        ADD=residual is not None,
        BIAS=bias is not None,
        BLOCK=block,
        warps=row_warps(block),
    )
    return y if residual is None else (y, residual)


def _inputs(make: Make, rows: int, size: int, add: bool, bias: bool) -> Args:
    weights = [make.normal(size, dtype=torch.float32) for _ in range(2)]
    plain = make.normal(rows, size), weights[0], weights[1] if bias else None, 1e-5
    return (*plain, make.normal(rows, size), 0.25) if add else plain


def _traffic(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None = None, scale: float = 1.0
) -> int:
    return (2 if residual is None else 4) * x.nbytes + nbytes(weight, bias)


LAYER_NORM = Op(
    name="layer_norm",
    reference=_reference,
    triton=_triton,
    inputs=_inputs,
    cases=(
        Case("one", {"rows": 1, "size": 32, "add": True, "bias": False}),
        Case("odd", {"rows": 6, "size": 77, "add": True, "bias": True}),
        Case("plain", {"rows": 3, "size": 48, "add": False, "bias": True}),
        Case("empty", {"rows": 0, "size": 16, "add": False, "bias": False}),
        Case("decode-32x4096", {"rows": 32, "size": 4096, "add": True, "bias": True}, bench=True),
        Case("4096x4096", {"rows": 4096, "size": 4096, "add": True, "bias": True}, bench=True),
        Case("plain-4096x4096", {"rows": 4096, "size": 4096, "add": False, "bias": False}, bench=True),
    ),
    tolerance={torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2},
    traffic=_traffic,
    compiled=bodies.layer_norm,
    cpu_cases=(
        Case("8x1024", {"rows": 8, "size": 1024, "add": False, "bias": True}),
        Case("512x1024", {"rows": 512, "size": 1024, "add": False, "bias": True}),
    ),
    single_row=independent_rows(0, 4),
    strided=(0, 4),
    peer=lambda x, weight, bias, eps, *rest: torch.nn.functional.layer_norm(
        x, x.shape[-1:], weight.to(x.dtype), None if bias is None else bias.to(x.dtype), eps
    ),
)
