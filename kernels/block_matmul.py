"""y = x Wᵀ (+ b) by a weight in blocks of ggml or of floats, with the bits of their codes (kernels/plane_layout.py).

Weights are rounded to the type of x when they are read (kernels/block_sum.py), so results are those of a weight that
was dequantized to this type, and a step with few rows takes as long as reading the planes.

As in kernels/integer_matmul.py, the outputs of a tile take the rows of a matrix instruction and the rows of x its
columns. Inputs are added up in order by the same instruction for any number of columns.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kernels.block_sum import block_sum, kind_constants, stages_for
from kernels.integer_matmul import FEW_ROWS, LEAST_COLUMNS, MOST_COLUMNS
from kernels.jit import jit, launch, power_of_2, row_stride, tl
from kernels.op import Args, Case, Make, Op, independent_rows, nbytes
from kernels.plane_layout import PLANES
from kernels.planes import Planes, check_planes, drawn_planes, restored
from kernels.tuning import has_tensor_memory, settings


@jit(varying=("rows",))
def block_matmul_kernel(
    x,
    low,
    high,
    scales,
    units,
    bias,
    y,
    rows,
    x_row,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    LOW_BYTES: tl.constexpr,
    HIGH_BYTES: tl.constexpr,
    BIAS: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    MIDDLE: tl.constexpr,
    TABLE: tl.constexpr,
    GROUP: tl.constexpr,
    TERMS: tl.constexpr,
    NIBBLES: tl.constexpr,
    POWER: tl.constexpr,
    UNITS: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program for TILE outputs of COLUMNS rows of x."""
    output = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    keep, keep_rows = output < OUTPUTS, (row < rows)[None, :]
    place = output.to(tl.int64)[:, None]
    total = block_sum(
        low + place * LOW_BYTES,
        high + place * HIGH_BYTES,
        x + row.to(tl.int64)[None, :] * x_row,
        scales,
        units,
        output,
        keep,
        keep_rows,
        x.dtype.element_ty,
        OUTPUTS,
        INPUTS,
        LOW,
        HIGH,
        MIDDLE,
        TABLE,
        GROUP,
        TERMS,
        NIBBLES,
        POWER,
        UNITS,
        TILE,
        COLUMNS,
    )
    if BIAS:
        total += tl.load(bias + output, keep, 0.0).to(tl.float32)[:, None]
    store = y + row.to(tl.int64)[None, :] * OUTPUTS + output[:, None]
    tl.store(store, total.to(y.dtype.element_ty), keep[:, None] & keep_rows)


def _triton(
    x: Tensor,
    low: Tensor,
    high: Tensor | None,
    scales: Tensor,
    units: Tensor | None,
    kind: str,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    by_size: bool = False,
) -> Tensor:
    (rows, inputs), outputs = x.shape, low.shape[0]
    check_planes(Planes(low, high, scales, units), kind, outputs, inputs)
    y = torch.empty((rows, outputs), dtype=dtype or x.dtype, device=x.device)
    # Triton 3.6 gives each of the four products of a step its own sums in tensor memory: 4 · 128 columns and some more.
    most = MOST_COLUMNS // 2 if has_tensor_memory(x.device) else MOST_COLUMNS
    columns = min(most, max(LEAST_COLUMNS, power_of_2(rows)))
    if x.dtype.itemsize > 2:
        columns = min(columns, FEW_ROWS)
    tile = 64
    if by_size:
        tile = 32 if rows <= FEW_ROWS else 128
    warps = 2 if tile < 64 else 4 if tile * columns <= 8192 else 8
    default = {"tile": tile, "columns": columns, "warps": warps, "stages": stages_for(x)}
    sizes = {"rows": rows, "outputs": outputs, "bits": PLANES[kind].low + PLANES[kind].high, "by_size": int(by_size)}
    chosen = settings("block_matmul", default, x.device, **sizes)
    launch(
        block_matmul_kernel,
        (-(-outputs // chosen["tile"]), -(-rows // chosen["columns"])),
        x,
        low,
        low if high is None else high,
        scales,
        scales if units is None else units,
        low if bias is None else bias,
        y,
        rows,
        row_stride(x, "x"),
        OUTPUTS=outputs,
        INPUTS=inputs,
        LOW_BYTES=low.shape[1],
        HIGH_BYTES=0 if high is None else high.shape[1],
        BIAS=bias is not None,
        **kind_constants(kind),
        TILE=chosen["tile"],
        COLUMNS=chosen["columns"],
        warps=chosen["warps"],
        stages=chosen["stages"],
    )
    return y


def _reference(
    x: Tensor,
    low: Tensor,
    high: Tensor | None,
    scales: Tensor,
    units: Tensor | None,
    kind: str,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    by_size: bool = False,
) -> Tensor:
    """x: [rows, inputs]; planes: see kernels/plane_layout.py; bias: [outputs] → [rows, outputs] of `dtype` (default:
    x's)."""
    weight = restored(Planes(low, high, scales, units), kind, x.shape[1]).to(x.dtype).float()
    y = x.float() @ weight.t()
    return (y if bias is None else y + bias.float()).to(dtype or x.dtype)


def _peer(x: Tensor, low: Tensor, high: Tensor | None, scales: Tensor, units: Tensor | None, kind: str, *_: Any) -> Any:
    """Multiply by the weight that was dequantized before; torch has no product with blocks."""
    return functional.linear(x, restored(Planes(low, high, scales, units), kind, x.shape[1]).to(x.dtype))


def _inputs(
    make: Make,
    rows: int,
    inputs: int,
    outputs: int,
    kind: str = "Q4_K",
    bias: bool = False,
    dtype: torch.dtype | None = None,
    by_size: bool = False,
) -> Args:
    planes = drawn_planes(make, kind, outputs, inputs)
    return make.normal(rows, inputs), *planes, kind, make.normal(outputs) if bias else None, dtype, by_size


SHAPES = (("qkv", 4096, 6144), ("up", 4096, 28672), ("down", 14336, 4096))
SHORT = ("Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "MXFP4", "MXFP8")  # types with blocks of 32

BLOCK_MATMUL = Op(
    name="block_matmul",
    reference=_reference,
    triton=_triton,
    inputs=_inputs,
    cases=(
        *(
            Case(f"{kind}-odd", {"rows": 3, "inputs": 96 if kind in SHORT else 256, "outputs": 19, "kind": kind})
            for kind in PLANES
        ),
        Case("short", {"rows": 2, "inputs": 109, "outputs": 9, "kind": "MXFP4"}),
        Case("short-16", {"rows": 2, "inputs": 150, "outputs": 9, "kind": "NVFP4"}),
        Case("short-bytes", {"rows": 2, "inputs": 77, "outputs": 9, "kind": "MXFP8", "bias": True}),
        Case("short-high", {"rows": 2, "inputs": 173, "outputs": 9, "kind": "Q5_1"}),
        Case("tiles", {"rows": 66, "inputs": 512, "outputs": 70, "bias": True}),
        Case("tiles-16", {"rows": 18, "inputs": 512, "outputs": 66, "kind": "Q6_K", "bias": True}),
        Case("by-size", {"rows": 5, "inputs": 256, "outputs": 37, "by_size": True}),
        Case("by-size-tiles", {"rows": 66, "inputs": 256, "outputs": 130, "by_size": True, "kind": "Q3_K"}),
        Case("float32", {"rows": 3, "inputs": 256, "outputs": 20, "dtype": torch.float32}),
        Case("empty", {"rows": 0, "inputs": 256, "outputs": 16}),
        *(
            Case(
                f"{kind}-{name}-{rows}",
                {"rows": rows, "inputs": inputs, "outputs": outputs, "kind": kind, "by_size": True},
                bench=True,
            )
            for kind in ("Q4_K", "Q6_K")
            for name, inputs, outputs in SHAPES
            for rows in (1, 32, 256, 4096)
        ),
        *(
            Case(
                f"{kind}-up-{rows}",
                {"rows": rows, "inputs": 4096, "outputs": 28672, "kind": kind, "by_size": True},
                bench=True,
            )
            for kind in PLANES
            if kind not in ("Q4_K", "Q6_K")
            for rows in (1, 4096)
        ),
    ),
    # float32: one sum over up to 14,336 inputs. float16, bfloat16: weights are rounded as in the reference.
    tolerance={torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2},
    traffic=lambda x, low, high, scales, units, kind, bias=None, dtype=None, by_size=False: (
        nbytes(x, low, high, scales, units, bias) + x.shape[0] * low.shape[0] * (dtype or x.dtype).itemsize
    ),
    flops=lambda x, low, *rest: 2 * x.numel() * low.shape[0],
    single_row=independent_rows(0),
    strided=(0,),
    peer=_peer,
    tunable={"tile": (32, 64, 128), "columns": (16, 32, 64, 128), "warps": (2, 4, 8), "stages": (2, 3, 4)},
)
