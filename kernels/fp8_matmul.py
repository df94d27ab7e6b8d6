"""y = x Wᵀ (+ b) by a weight in float8_e4m3fn with its scales.

    y = Σ over groups of inputs: (q_x · q_Wᵀ) · scale_x · scale_W          x in e4m3 with its scales
    y = Σ over groups of inputs: (x · q_Wᵀ) · scale_W                      x not rounded: e4m3 is widened in registers

Sums are float32. A group is all inputs if scales belong to a row and an output, or 128 of them if blocks of the weight
have scales: then each group's sum is multiplied separately (arXiv:2412.19437, 3.3.2). If a target does not multiply
e4m3, products use float16, which represents e4m3 exactly.
"""

import torch
from torch import Tensor
from torch.nn import functional

from kernels.e4m3 import GROUP, for_products, from_codes, groups_of, rounded_rows
from kernels.jit import jit, launch, row_stride, tl
from kernels.op import Args, Case, Make, Op, independent_rows, nbytes
from kernels.product_tiles import GROUPED, grouped_tile, load_tiles, product_tile, store_tile
from kernels.tuning import LARGE_TILES, settings, shared_memory


@jit
def fp8_sum(
    left,
    right,
    at,
    left_scales,
    right_scales,
    keep_outputs,
    keep_rows,
    INPUTS: tl.constexpr,
    GROUPS: tl.constexpr,
    ROUNDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Multiply a tile of weights by a tile of rows and return [COLUMNS, ROWS] float32. Inputs are added up in order,
    STEP at a time; with several groups, a group has STEP inputs.

    left_scales, right_scales: addresses of the first scales of outputs and of rows. `load_tiles` documents the other
    arguments."""
    total = tl.zeros((COLUMNS, ROWS), tl.float32)
    for k in range(0, INPUTS, STEP):
        a, b = load_tiles(left, right, at, k, keep_outputs, keep_rows, INPUTS, STEP)
        if ROUNDED:
            a = for_products(a)
            b = for_products(b)
        else:
            a = from_codes(a, b.dtype)
        if GROUPS > 1:
            part = tl.dot(a, b, input_precision="ieee")
            factor = tl.load(left_scales + k // STEP, keep_outputs, 0.0)[:, None]
            if ROUNDED:
                factor = factor * tl.load(right_scales + k // STEP, keep_rows, 0.0)[None, :]
            total = tl.fma(part, factor + tl.zeros((COLUMNS, ROWS), tl.float32), total)
        else:
            # Hopper's sums of e4m3 have 14 bits: add at most STEP products before they go to float32.
            total = tl.dot(a, b, total, input_precision="ieee", max_num_imprecise_acc=STEP)
    if GROUPS == 1:
        total *= tl.load(left_scales, keep_outputs, 0.0)[:, None]
        if ROUNDED:
            total *= tl.load(right_scales, keep_rows, 0.0)[None, :]
    return total


@jit(varying=("rows",))
def fp8_matmul_kernel(
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
    GROUPS: tl.constexpr,
    UNIT: tl.constexpr,
    ROUNDED: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    GROUPED: tl.constexpr,
):
    """One program for each tile of ROWS x COLUMNS outputs. scales: [OUTPUTS / UNIT, GROUPS]; ROUNDED: x are codes, with
    x_scales [rows, GROUPS]."""
    TILES: tl.constexpr = (OUTPUTS + COLUMNS - 1) // COLUMNS
    row_tile, column_tile = grouped_tile(tl.program_id(0), rows, ROWS, TILES, GROUPED)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    at = tl.arange(0, STEP)
    keep_rows, keep_columns = row < rows, column < OUTPUTS
    left = weight + column.to(tl.int64)[:, None] * INPUTS + at[None, :]
    right = x + row.to(tl.int64)[None, :] * x_row + at[:, None]
    left_scales = scales + (column // UNIT) * GROUPS
    right_scales = x_scales + row.to(tl.int64) * GROUPS
    total = fp8_sum(
        left,
        right,
        at,
        left_scales,
        right_scales,
        keep_columns,
        keep_rows,
        INPUTS,
        GROUPS,
        ROUNDED,
        ROWS,
        COLUMNS,
        STEP,
    )
    store_tile(total, y, bias, row, column, keep_rows, keep_columns, OUTPUTS, BIAS)


def _default(rows: int, row_bytes: int, device: torch.device) -> dict[str, int]:
    """Return settings by the number of rows and the bytes of a number of x."""
    roomy = shared_memory(device) >= LARGE_TILES
    if row_bytes > 2:
        return {"rows": 16 if rows <= 16 else 64, "columns": 32, "warps": 8, "stages": 3 if roomy else 2}
    # Widened weights, sums of a group and sums of e4m3 that are not float32 yet take registers of their own: with 256
    # outputs, 80 bytes would spill on Hopper.
    tile = product_tile(rows, 1)
    few = 5 if tile["rows"] == 16 and roomy else 4
    return tile | {"stages": (few if row_bytes == 1 else 3) if roomy else 2}


def _triton(
    x: Tensor,
    x_scales: Tensor | None,
    weight: Tensor,
    scales: Tensor,
    unit: int,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    (rows, inputs), outputs, groups = x.shape, weight.shape[0], scales.shape[1]
    _check(x, x_scales, weight, scales, unit)
    y = torch.empty((rows, outputs), dtype=dtype or x.dtype, device=x.device)
    rounded = x_scales is not None
    default = _default(rows, 1 if rounded else x.dtype.itemsize, x.device)
    chosen = settings("fp8_matmul", default, x.device, rows=rows, outputs=outputs, groups=groups, rounded=int(rounded))
    launch(
        fp8_matmul_kernel,
        (-(-outputs // chosen["columns"]) * -(-rows // chosen["rows"]),),
        x.view(torch.uint8) if rounded else x,
        scales if x_scales is None else x_scales,
        weight.view(torch.uint8),
        scales,
        weight.view(torch.uint8) if bias is None else bias,
        y,
        rows,
        row_stride(x, "x"),
        OUTPUTS=outputs,
        INPUTS=inputs,
        GROUPS=groups,
        UNIT=unit,
        ROUNDED=rounded,
        BIAS=bias is not None,
        ROWS=chosen["rows"],
        COLUMNS=chosen["columns"],
        STEP=GROUP,
        GROUPED=GROUPED,
        warps=chosen["warps"],
        stages=chosen["stages"],
    )
    return y


def library_product(
    x: Tensor, x_scales: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Compute torch's product of rounded rows with scales of rows and outputs. Its sums go to float32 every 128
    inputs."""
    return torch._scaled_mm(
        x, weight.t(), scale_a=x_scales, scale_b=scales.t(), bias=bias, out_dtype=dtype, use_fast_accum=False
    )


def _peer(
    x: Tensor,
    x_scales: Tensor | None,
    weight: Tensor,
    scales: Tensor,
    unit: int,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute with torch. If it has no product with these scales, use a weight that was widened before, without
    scales."""
    wanted = dtype or x.dtype
    if x_scales is not None and scales.shape[1] == unit == 1:
        return library_product(x, x_scales, weight, scales, bias, wanted)
    return functional.linear(x.to(wanted), weight.to(wanted), bias)


def _check(x: Tensor, x_scales: Tensor | None, weight: Tensor, scales: Tensor, unit: int) -> None:
    (rows, inputs), outputs, groups = x.shape, weight.shape[0], scales.shape[1]
    if groups not in (1, groups_of(inputs, GROUP)) or scales.shape[0] != -(-outputs // unit):
        raise ValueError(
            f"scales {tuple(scales.shape)} of a weight {tuple(weight.shape)}: must be [outputs / {unit}, 1 or inputs / "
            f"{GROUP}]"
        )
    if x_scales is not None and x_scales.shape != (rows, groups):
        raise ValueError(f"x_scales {tuple(x_scales.shape)}: must be {(rows, groups)}, grouped as the weight is")


def _reference(
    x: Tensor,
    x_scales: Tensor | None,
    weight: Tensor,
    scales: Tensor,
    unit: int,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """x: [rows, inputs], in e4m3 with x_scales [rows, groups] float32, or plain without; weight: [outputs, inputs] in
    e4m3; scales: [outputs / unit, groups] float32, unit outputs share one; bias: [outputs] → [rows, outputs] of `dtype`
    (default: x's)."""
    outputs, inputs = weight.shape
    group = inputs if scales.shape[1] == 1 else GROUP
    wide = scales.repeat_interleave(unit, 0)[:outputs].repeat_interleave(group, 1)[:, :inputs]
    left = x.float() if x_scales is None else x.float() * x_scales.repeat_interleave(group, 1)[:, :inputs]
    y = left @ (weight.float() * wide).t()
    return (y if bias is None else y + bias.float()).to(dtype or x.dtype)


def _inputs(
    make: Make,
    rows: int,
    inputs: int,
    outputs: int,
    unit: int = 1,
    group: int | None = None,
    rounded: bool = True,
    bias: bool = False,
    dtype: torch.dtype | None = None,
) -> Args:
    """unit: outputs that share a scale, with a scale for each group of inputs."""
    blocks, groups = -(-outputs // unit), groups_of(inputs, group or inputs)
    weight = make.normal(outputs, inputs, scale=50.0).to(torch.float8_e4m3fn)
    scales = make.normal(blocks, groups, dtype=torch.float32).exp() * (0.02 * inputs**-0.5)
    x, x_scales = make.normal(rows, inputs), None
    if rounded:
        x, x_scales = rounded_rows(x, group or inputs)
    return x, x_scales, weight, scales, unit, make.normal(outputs) if bias else None, dtype or make.dtype


BLOCKS = {"unit": GROUP, "group": GROUP}
WIDE = {"rounded": False}
SHAPES = (("qkv", 4096, 6144), ("up", 4096, 28672), ("down", 14336, 4096))

FP8_MATMUL = Op(
    name="fp8_matmul",
    reference=_reference,
    triton=_triton,
    inputs=_inputs,
    cases=(
        Case("odd", {"rows": 5, "inputs": 70, "outputs": 37, "bias": True}),
        Case("tiles", {"rows": 66, "inputs": 256, "outputs": 130}),
        Case("blocks", {"rows": 5, "inputs": 384, "outputs": 260, **BLOCKS}),
        Case("ragged-blocks", {"rows": 3, "inputs": 300, "outputs": 150, "unit": 32, "group": GROUP, "bias": True}),
        Case("single-block", {"rows": 3, "inputs": 40, "outputs": 20, **BLOCKS}),
        Case("wide", {"rows": 5, "inputs": 70, "outputs": 37, "bias": True, **WIDE}),
        Case("wide-blocks", {"rows": 66, "inputs": 300, "outputs": 150, **BLOCKS, **WIDE}),
        Case("float32", {"rows": 3, "inputs": 33, "outputs": 20, "dtype": torch.float32}),
        Case("few", {"rows": 20, "inputs": 256, "outputs": 70}),
        Case("groups", {"rows": 1100, "inputs": 128, "outputs": 40}),
        Case("many-blocks", {"rows": 140, "inputs": 256, "outputs": 150, **BLOCKS}),
        Case("empty", {"rows": 0, "inputs": 16, "outputs": 16}),
        *(
            Case(f"{name}-{rows}", {"rows": rows, "inputs": inputs, "outputs": outputs}, True, "fp8")
            for name, inputs, outputs in SHAPES
            for rows in (1, 32, 256, 4096)
        ),
        *(
            Case(f"blocks-{name}-{rows}", {"rows": rows, "inputs": inputs, "outputs": outputs, **BLOCKS}, True, "fp8")
            for name, inputs, outputs in SHAPES
            for rows in (32, 4096)
        ),
        *(
            Case(f"wide-up-{rows}", {"rows": rows, "inputs": 4096, "outputs": 28672, **WIDE}, bench=True)
            for rows in (1, 32, 4096)
        ),
        Case("wide-blocks-up-32", {"rows": 32, "inputs": 4096, "outputs": 28672, **BLOCKS, **WIDE}, bench=True),
    ),
    # float32: products of e4m3 on a GPU's matrix units; tests/kernels/test_fp8.py checks the interpreter more strictly
    tolerance={torch.float32: 2e-3, torch.float16: 4e-3, torch.bfloat16: 2e-2},
    traffic=lambda x, x_scales, weight, scales, unit, bias=None, dtype=None: (
        nbytes(x, x_scales, weight, scales, bias) + x.shape[0] * weight.shape[0] * (dtype or x.dtype).itemsize
    ),
    flops=lambda x, x_scales, weight, *rest: 2 * x.shape[0] * weight.numel(),
    single_row=independent_rows(0, 1),
    peer=_peer,
    # Fewer columns would use another matrix instruction, and sums of tiles of different sizes might then differ.
    tunable={"rows": (16, 64, 128, 256), "columns": (64, 128, 256), "warps": (4, 8), "stages": (3, 4, 5)},
)
