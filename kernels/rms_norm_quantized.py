"""Root mean square norm after the residual add, rounded to float8_e4m3fn for the projections that follow.

    r ← r + a · x;  y = r / sqrt(mean(r²) + eps) · w in float32;  scale = max |y| / 448 of a row or group;
    q = round(y / scale)                                                       (without r: y of x)

r is rounded to its own type, y is not. kernels/rms_norm.py is the norm, kernels/e4m3.py the rounding.
"""

import torch
from torch import Tensor

from kernels.e4m3 import GROUP, empty_rounded, groups_of, rounded_rows, rounded_tile
from kernels.jit import jit, launch, power_of_2, row_stride, row_warps, tl
from kernels.op import Args, Case, Make, Op, independent_rows, nbytes
from kernels.rms_norm import rms_norm


def _reference(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None,
    scale: float,
    group: int,
    static_scale: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """x, residual: [rows, size]; weight: [size] fp32 → values [rows, size] in e4m3, scales [rows, groups] float32, and
    the residual if there is one, which is changed in place."""
    read = x
    if residual is not None:
        read = residual.copy_(residual.float() + scale * x.float())
    made = rounded_rows(rms_norm(read.float(), weight, eps), group, static_scale)
    return made if residual is None else (*made, residual)


@jit
def rms_norm_quantized_kernel(
    x,
    residual,
    weight,
    static_scale,
    values,
    scales,
    x_row,
    residual_row,
    eps,
    scale,
    SIZE: tl.constexpr,
    ADD: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    STATIC: tl.constexpr,
    TILE_GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One program for each row, with a tile's row of WIDTH for each group of GROUP elements."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, TILE_GROUPS)
    inside = tl.arange(0, WIDTH)[None, :]
    at = group[:, None] * GROUP + inside
    keep = (inside < GROUP) & (at < SIZE)
    value = tl.load(x + row * x_row + at, keep, 0.0).to(tl.float32)
    if ADD:
        place = residual + row * residual_row + at
        summed = tl.load(place, keep, 0.0).to(tl.float32) + scale * value
        rounded = summed.to(residual.dtype.element_ty)
        tl.store(place, rounded, keep)
        value = rounded.to(tl.float32)
    factor = tl.rsqrt(tl.sum(tl.sum(value * value, 1), 0) / SIZE + eps)
    normed = value * factor * tl.load(weight + at, keep, 0.0)
    codes, of_groups = rounded_tile(normed, static_scale, STATIC)
    tl.store(values + row * SIZE + at, codes, keep)
    tl.store(scales + row * GROUPS + group, of_groups, group < GROUPS)


def _triton(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None,
    scale: float,
    group: int,
    static_scale: Tensor | None = None,
) -> tuple[Tensor, ...]:
    rows, size = x.shape
    made = empty_rounded(rows, size, group, x.device)
    groups, width = groups_of(size, group), power_of_2(min(group, size))
    tile = power_of_2(groups)
    launch(
        rms_norm_quantized_kernel,
        (rows,),
        x,
        x if residual is None else residual,
        weight,
        made.scales if static_scale is None else static_scale,
        made.values.view(torch.uint8),
        made.scales,
        row_stride(x, "x"),
        0 if residual is None else row_stride(residual, "residual"),
        eps,
        scale,
        SIZE=size,
        ADD=residual is not None,
        GROUP=group,
        GROUPS=groups,
        STATIC=static_scale is not None,
        TILE_GROUPS=tile,
        WIDTH=width,
        warps=row_warps(tile * width),
    )
    return (made.values, made.scales) if residual is None else (made.values, made.scales, residual)


def _inputs(make: Make, rows: int, size: int, add: bool, group: int | None = None, static_scale: bool = False) -> Args:
    plain = make.normal(rows, size), make.normal(size, dtype=torch.float32), 1e-6
    residual = (make.normal(rows, size), 0.25) if add else (None, 1.0)
    return (*plain, *residual, group or size, make.zeros(1, dtype=torch.float32) + 0.004 if static_scale else None)


RMS_NORM_QUANTIZED = Op(
    name="rms_norm_quantized",
    reference=_reference,
    triton=_triton,
    inputs=_inputs,
    cases=(
        Case("one", {"rows": 1, "size": 64, "add": True}),
        Case("odd", {"rows": 7, "size": 123, "add": True}),
        Case("plain", {"rows": 5, "size": 96, "add": False}),
        Case("groups", {"rows": 4, "size": 300, "add": True, "group": GROUP}),
        Case("plain-groups", {"rows": 3, "size": 200, "add": False, "group": GROUP}),
        Case("static", {"rows": 3, "size": 96, "add": True, "static_scale": True}),
        Case("static-groups", {"rows": 3, "size": 200, "add": True, "group": GROUP, "static_scale": True}),
        Case("empty", {"rows": 0, "size": 32, "add": True}),
        Case("decode-32x4096", {"rows": 32, "size": 4096, "add": True}, bench=True),
        Case("4096x4096", {"rows": 4096, "size": 4096, "add": True}, bench=True),
        Case("groups-4096x4096", {"rows": 4096, "size": 4096, "add": True, "group": GROUP}, bench=True),
        Case("static-4096x8192", {"rows": 4096, "size": 8192, "add": True, "static_scale": True}, bench=True),
    ),
    # values may be a step of e4m3 apart; this is for scales and the residual
    tolerance={torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2},
    traffic=lambda x, weight, eps, residual, scale, group, static_scale=None: (
        (1 if residual is None else 3) * x.nbytes + x.numel() + nbytes(weight, static_scale) + 4 * x.numel() // group
    ),
    single_row=independent_rows(0, 3),
    strided=(0, 3),
)
