"""y = x Wᵀ (+ b) of rows and a weight in int8, with a scale for each row and each output (W8A8).

    y = (Σ q_x · q_W) · scale_x · scale_W

Sums are int32 and exact, so the result of a row depends neither on the tile nor on the other rows. Source:
compressed-tensors' int-quantized format, arXiv:2211.10438.
"""

import torch
from torch import Tensor
from torch.nn import functional

from kernels.jit import jit, launch, row_stride, tl
from kernels.op import Args, Case, Make, Op, independent_rows, nbytes
from kernels.product_tiles import GROUPED, grouped_tile, load_tiles, product_tile, store_tile
from kernels.quantize_int8 import int8_rows
from kernels.tuning import LARGE_TILES, settings, shared_memory

STEP = 128  # inputs that are multiplied at once


@jit
def int8_sum(
    left,
    right,
    at,
    left_scales,
    right_scales,
    keep_outputs,
    keep_rows,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Multiply a tile of weights by a tile of rows and return [COLUMNS, ROWS] float32.

    left_scales, right_scales: addresses of the scales of outputs and of rows. `load_tiles` documents the other
    arguments."""
    total = tl.zeros((COLUMNS, ROWS), tl.int32)
    for k in range(0, INPUTS, STEP):
        a, b = load_tiles(left, right, at, k, keep_outputs, keep_rows, INPUTS, STEP)
        total = tl.dot(a, b, total, out_dtype=tl.int32)
    wide = total.to(tl.float32) * tl.load(left_scales, keep_outputs, 0.0)[:, None]
    return wide * tl.load(right_scales, keep_rows, 0.0)[None, :]


@jit(varying=("rows",))
def int8_matmul_kernel(
    x,
    x_scales,
    weight,
    scales,
    bias,
    y,
    rows,
    x_row,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    GROUPED: tl.constexpr,
):
    """One program for each tile of ROWS x COLUMNS outputs."""
    TILES: tl.constexpr = (OUTPUTS + COLUMNS - 1) // COLUMNS
    row_tile, column_tile = grouped_tile(tl.program_id(0), rows, ROWS, TILES, GROUPED)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    at = tl.arange(0, STEP)
    keep_rows, keep_columns = row < rows, column < OUTPUTS
    left = weight + column.to(tl.int64)[:, None] * INPUTS + at[None, :]
    right = x + row.to(tl.int64)[None, :] * x_row + at[:, None]
    own_scales, row_scales = scales + column, x_scales + row
    total = int8_sum(left, right, at, own_scales, row_scales, keep_columns, keep_rows, INPUTS, ROWS, COLUMNS, STEP)
    store_tile(total, y, bias, row, column, keep_rows, keep_columns, OUTPUTS, BIAS)


def _triton(
    x: Tensor, x_scales: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    (rows, inputs), outputs = x.shape, weight.shape[0]
    if x_scales.shape != (rows,) or scales.shape != (outputs,):
        raise ValueError(f"scales {tuple(x_scales.shape)}, {tuple(scales.shape)}: must be [{rows}] and [{outputs}]")
    y = torch.empty((rows, outputs), dtype=dtype, device=x.device)
    roomy = shared_memory(x.device) >= LARGE_TILES
    tile = product_tile(rows, outputs if roomy else 1)
    default = tile | {"stages": (5 if tile["rows"] == 16 else 3) if roomy else 2}
    chosen = settings("int8_matmul", default, x.device, rows=rows, outputs=outputs)
    launch(
        int8_matmul_kernel,
        (-(-outputs // chosen["columns"]) * -(-rows // chosen["rows"]),),
        x,
        x_scales,
        weight,
        scales,
        scales if bias is None else bias,
        y,
        rows,
        row_stride(x, "x"),
        OUTPUTS=outputs,
        INPUTS=inputs,
        BIAS=bias is not None,
        ROWS=chosen["rows"],
        COLUMNS=chosen["columns"],
        STEP=STEP,
        GROUPED=GROUPED,
        warps=chosen["warps"],
        stages=chosen["stages"],
    )
    return y


def _reference(
    x: Tensor, x_scales: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """x: [rows, inputs] int8; x_scales: [rows] float32; weight: [outputs, inputs] int8; scales: [outputs] float32;
    bias: [outputs] → [rows, outputs] of `dtype`."""
    y = (x.double() @ weight.double().t()).float() * scales * x_scales[:, None]
    return (y if bias is None else y + bias.float()).to(dtype)


def _inputs(make: Make, rows: int, inputs: int, outputs: int, bias: bool = False) -> Args:
    x, x_scales = int8_rows(make.normal(rows, inputs))
    weight = make.integers(-127, 128, outputs, inputs, dtype=torch.int8)
    scales = make.normal(outputs, dtype=torch.float32).exp() * (0.02 * inputs**-0.5)
    return x, x_scales, weight, scales, make.normal(outputs) if bias else None, make.dtype


SHAPES = (("qkv", 4096, 6144), ("up", 4096, 28672), ("down", 14336, 4096))

INT8_MATMUL = Op(
    name="int8_matmul",
    reference=_reference,
    triton=_triton,
    inputs=_inputs,
    cases=(
        Case("odd", {"rows": 5, "inputs": 70, "outputs": 37, "bias": True}),
        Case("tiles", {"rows": 66, "inputs": 256, "outputs": 130}),
        Case("few", {"rows": 20, "inputs": 256, "outputs": 70}),
        Case("groups", {"rows": 1100, "inputs": 128, "outputs": 40}),
        Case("empty", {"rows": 0, "inputs": 16, "outputs": 16}),
        *(
            Case(f"{name}-{rows}", {"rows": rows, "inputs": inputs, "outputs": outputs}, bench=True)
            for name, inputs, outputs in SHAPES
            for rows in (1, 32, 256, 4096)
        ),
    ),
    tolerance={torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2},
    traffic=lambda x, x_scales, weight, scales, bias, dtype: (
        nbytes(x, x_scales, weight, scales, bias) + x.shape[0] * weight.shape[0] * dtype.itemsize
    ),
    flops=lambda x, x_scales, weight, *rest: 2 * x.shape[0] * weight.numel(),
    single_row=independent_rows(0, 1),
    strided=(0,),
    peer=lambda x, x_scales, weight, scales, bias, dtype: functional.linear(x.to(dtype), weight.to(dtype), bias),
    tunable={"rows": (16, 64, 128, 256), "columns": (64, 128, 256), "warps": (4, 8), "stages": (3, 4, 5)},
)
