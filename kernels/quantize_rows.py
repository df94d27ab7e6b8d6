"""Rows of activations rounded to float8_e4m3fn, with a scale for each row or each group of its inputs.

    scale = max |x| / 448;  q = round(x / scale)          (with a given scale: q = round(x / scale) alone)

kernels/e4m3.py describes rounding and special values. Source: arXiv:2209.05433.
"""

import torch
from torch import Tensor

from kernels.e4m3 import GROUP, empty_rounded, rounded_rows, rounded_tile
from kernels.jit import jit, launch, power_of_2, row_stride, row_warps, tl
from kernels.op import Args, Case, Make, Op, independent_rows, nbytes

TILE = 4096  # elements of a program that has several groups


@jit
def quantize_rows_kernel(
    x,
    static_scale,
    values,
    scales,
    x_row,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    STATIC: tl.constexpr,
    TILE_GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One program for some groups of a row, each of GROUP elements in a tile's row of WIDTH."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * TILE_GROUPS + tl.arange(0, TILE_GROUPS)
    inside = tl.arange(0, WIDTH)[None, :]
    at = group[:, None] * GROUP + inside
    keep = (inside < GROUP) & (at < SIZE)
    value = tl.load(x + row * x_row + at, keep, 0.0).to(tl.float32)
    codes, scale = rounded_tile(value, static_scale, STATIC)
    tl.store(values + row * SIZE + at, codes, keep)
    tl.store(scales + row * GROUPS + group, scale, group < GROUPS)


def _triton(x: Tensor, group: int, static_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    rows, size = x.shape
    made = empty_rounded(rows, size, group, x.device)
    groups, width = made.scales.shape[1], power_of_2(min(group, size))
    tile = min(power_of_2(groups), max(1, TILE // width))
    launch(
        quantize_rows_kernel,
        (rows, -(-groups // tile)),
        x,
        made.scales if static_scale is None else static_scale,
        made.values.view(torch.uint8),
        made.scales,
        row_stride(x, "x"),
        SIZE=size,
        GROUP=group,
        GROUPS=groups,
        STATIC=static_scale is not None,
        TILE_GROUPS=tile,
        WIDTH=width,
        warps=row_warps(tile * width),
    )
    return made.values, made.scales


def _inputs(make: Make, rows: int, size: int, group: int | None = None, static_scale: bool = False) -> Args:
    """Numbers of very different sizes, one row of zeros among them."""
    x = make.normal(rows, size) * (make.normal(rows, 1, dtype=torch.float32, scale=4.0).exp().to(make.dtype))
    if rows > 2 and not make.meta:
        x[1] = 0.0
    return x, group or size, make.zeros(1, dtype=torch.float32) + 0.01 if static_scale else None


QUANTIZE_ROWS = Op(
    name="quantize_rows",
    reference=rounded_rows,
    triton=_triton,
    inputs=_inputs,
    cases=(
        Case("one", {"rows": 1, "size": 64}),
        Case("odd", {"rows": 7, "size": 123}),
        Case("groups", {"rows": 5, "size": 300, "group": GROUP}),
        Case("one-short-group", {"rows": 3, "size": 40, "group": GROUP}),
        Case("many-groups", {"rows": 2, "size": 40 * GROUP, "group": GROUP}),
        Case("static", {"rows": 5, "size": 96, "static_scale": True}),
        Case("static-groups", {"rows": 3, "size": 200, "group": GROUP, "static_scale": True}),
        Case("empty", {"rows": 0, "size": 32}),
        Case("decode-32x4096", {"rows": 32, "size": 4096}, bench=True),
        Case("4096x4096", {"rows": 4096, "size": 4096}, bench=True),
        Case("groups-4096x4096", {"rows": 4096, "size": 4096, "group": GROUP}, bench=True),
        Case("static-4096x4096", {"rows": 4096, "size": 4096, "static_scale": True}, bench=True),
        Case("32x28672", {"rows": 32, "size": 28672}, bench=True),
    ),
    # values may be a step of e4m3 apart; this is for the scales
    tolerance={torch.float32: 1e-6, torch.float16: 1e-6, torch.bfloat16: 1e-6},
    traffic=lambda x, group, static_scale=None: x.nbytes + x.numel() + nbytes(static_scale) + 4 * x.numel() // group,
    single_row=independent_rows(0),
    strided=(0,),
)
