"""y = x Wᵀ (+ b).

On a CPU in fp32 the weight is stored transposed, [inputs, outputs], which MKL multiplies by few rows much faster than
the checkpoint's order. Measured on one core (Xeon model 167, torch 2.13, CPU time, least of 11) with four layers of a
0.5B model (1152x896, 896x896, 9728x896, 896x4864): checkpoint's order → oneDNN's prepacked → transposed, in ms:

rows       1                 4                  8                  16                 256
AVX-512    94 → 68 → 39      175 → 102 → 67     256 → 124 → 91     197 → 94 → 88      586 → 446 → 378
AVX2       80 → 60 → 42      128 → 70 → 78      180 → 107 → 99     202 → 134 → 119    646 → 514 → 479
"""

import torch
from torch import Tensor
from torch.nn import functional

from kernels.cpu import bodies
from kernels.jit import jit, launch, row_stride, tl, triton
from kernels.op import Args, Case, Make, Op, independent_rows, nbytes
from kernels.product_tiles import GROUPED, grouped_tile, product_sum, product_tile, store_tile
from kernels.tuning import LARGE_TILES, settings, shared_memory


def pack(weight: Tensor) -> Tensor:
    """Return the weight [outputs, inputs] in the memory order that `linear` multiplies fastest; drop the original."""
    if weight.device.type == "cpu" and weight.dtype == torch.float32:
        return weight.t().contiguous().t()
    return weight


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x: [rows, inputs]; weight: [outputs, inputs] from `pack`; bias: [outputs] → [rows, outputs]."""
    return functional.linear(x, weight, bias)


def linear_fp32(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `linear` with fp32 outputs. CUDA libraries do not round the sums first; others round them to x's type."""
    if x.device.type == "cuda" and x.dtype != torch.float32:
        y = torch.mm(x, weight.t(), out_dtype=torch.float32)
        return y if bias is None else y + bias
    return functional.linear(x, weight, bias).float()


@jit(varying=("rows",))
def matmul_kernel(
    x,
    weight,
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
    """One program for each tile of ROWS x COLUMNS outputs; inputs are added up in order, STEP at a time."""
    TILES: tl.constexpr = (OUTPUTS + COLUMNS - 1) // COLUMNS
    row_tile, column_tile = grouped_tile(tl.program_id(0), rows, ROWS, TILES, GROUPED)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    at = tl.arange(0, STEP)
    keep_rows, keep_columns = row < rows, column < OUTPUTS
    left = weight + column.to(tl.int64)[:, None] * INPUTS + at[None, :]
    right = x + row.to(tl.int64)[None, :] * x_row + at[:, None]
    total = product_sum(left, right, at, keep_columns, keep_rows, INPUTS, ROWS, COLUMNS, STEP)
    store_tile(total, y, bias, row, column, keep_rows, keep_columns, OUTPUTS, BIAS)


@jit(varying=("rows",))
def descriptor_matmul_kernel(
    x,
    weight,
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
    SPECIALIZED: tl.constexpr,
):
    """`matmul_kernel` with tiles that are loaded by tensor descriptors (TMA). SPECIALIZED: some warps load, others
    multiply."""
    TILES: tl.constexpr = (OUTPUTS + COLUMNS - 1) // COLUMNS
    row_tile, column_tile = grouped_tile(tl.program_id(0), rows, ROWS, TILES, GROUPED)
    left = tl.make_tensor_descriptor(weight, [OUTPUTS, INPUTS], [INPUTS, 1], [COLUMNS, STEP])
    right = tl.make_tensor_descriptor(x, [rows, INPUTS], [x_row, 1], [ROWS, STEP])
    total = tl.zeros((COLUMNS, ROWS), tl.float32)
    for k in tl.range(0, INPUTS, STEP, warp_specialize=SPECIALIZED):
        a = left.load([column_tile * COLUMNS, k])
        b = tl.trans(right.load([row_tile * ROWS, k]))
        total = tl.dot(a, b, total, input_precision="ieee")
    row = row_tile * ROWS + tl.arange(0, ROWS)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    keep_rows, keep_columns = row < rows, column < OUTPUTS
    store_tile(total, y, bias, row, column, keep_rows, keep_columns, OUTPUTS, BIAS)


LOADS = ("pointers", "descriptors", "specialized")
"""Ways to load tiles. Descriptors need rows of x and of the weight that are multiples of 16 bytes."""
DESCRIPTOR_BYTES = 16


def _has_descriptors(x: Tensor, weight: Tensor) -> bool:
    return all(one.stride(0) * one.element_size() % DESCRIPTOR_BYTES == 0 == one.data_ptr() % 16 for one in (x, weight))


def _allocate(size: int, alignment: int, stream: int | None) -> Tensor:
    """Return memory for the descriptors of a launch."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """x: [rows, inputs]; weight: [outputs, inputs] row-major; bias: [outputs] → [rows, outputs] of `dtype` (default:
    x's). A row's sums never depend on the other rows (see product_tiles.py), unlike in libraries that choose the order
    of sums by size."""
    rows, inputs = x.shape
    outputs = weight.shape[0]
    y = torch.empty((rows, outputs), dtype=dtype or x.dtype, device=x.device)
    roomy = shared_memory(x.device) >= LARGE_TILES
    if x.dtype.itemsize > 2:
        default = {"rows": 16 if rows <= 16 else 64, "columns": 32, "warps": 4, "stages": 4 if roomy else 3}
    else:
        tile = product_tile(rows, outputs if roomy else 1)
        default = tile | {"stages": 6 if tile["rows"] == 16 and roomy else 4 if roomy else 3}
    chosen = settings("matmul", default | {"loads": LOADS[0]}, x.device, rows=rows, outputs=outputs)
    kernel, more = matmul_kernel, {}
    if chosen["loads"] != LOADS[0] and _has_descriptors(x, weight):
        kernel, more = descriptor_matmul_kernel, {"SPECIALIZED": chosen["loads"] == "specialized"}
        if triton is not None and x.device.type == "cuda":
            triton.set_allocator(_allocate)
    launch(
        kernel,
        (-(-outputs // chosen["columns"]) * -(-rows // chosen["rows"]),),
        x,
        weight,
        weight if bias is None else bias,
        y,
        rows,
        row_stride(x, "x"),
        OUTPUTS=outputs,
        INPUTS=inputs,
        BIAS=bias is not None,
        ROWS=chosen["rows"],
        COLUMNS=chosen["columns"],
        STEP=TILE_INPUTS,
        GROUPED=GROUPED,
        **more,
        warps=chosen["warps"],
        stages=chosen["stages"],
    )
    return y


def _reference(x: Tensor, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    y = x.float() @ weight.float().t()
    return (y if bias is None else y + bias.float()).to(dtype or x.dtype)


def _inputs(
    make: Make, rows: int, inputs: int, outputs: int, bias: bool = False, dtype: torch.dtype | None = None
) -> Args:
    scale = inputs**-0.5
    weight = make.normal(outputs, inputs, scale=scale)
    return make.normal(rows, inputs), weight, make.normal(outputs) if bias else None, dtype


TILE_INPUTS = 64

MATMUL = Op(
    name="matmul",
    reference=_reference,
    triton=matmul,
    inputs=_inputs,
    cases=(
        Case("odd", {"rows": 5, "inputs": 70, "outputs": 37, "bias": True}),
        Case("tiles", {"rows": 66, "inputs": 64, "outputs": 130}),
        Case("wide", {"rows": 3, "inputs": 33, "outputs": 20, "dtype": torch.float32}),
        Case("few", {"rows": 20, "inputs": 64, "outputs": 100}),
        Case("groups", {"rows": 1100, "inputs": 32, "outputs": 40}),
        Case("empty", {"rows": 0, "inputs": 16, "outputs": 16}),
        *(
            Case(f"{name}-{rows}", {"rows": rows, "inputs": inputs, "outputs": outputs}, bench=True)
            for name, inputs, outputs in (("qkv", 4096, 6144), ("up", 4096, 28672), ("down", 14336, 4096))
            for rows in (1, 32, 256, 4096)
        ),
        Case("head-32", {"rows": 32, "inputs": 4096, "outputs": 128256, "dtype": torch.float32}, bench=True),
    ),
    # float32: one sum over up to 14,336 inputs, 1.6e-5 on an H100
    tolerance={torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2},
    traffic=lambda x, weight, bias=None, dtype=None: (
        nbytes(x, weight, bias) + x.shape[0] * weight.shape[0] * (dtype or x.dtype).itemsize
    ),
    flops=lambda x, weight, *rest: 2 * x.shape[0] * weight.numel(),
    compiled=bodies.matmul,
    cpu_cases=(*(Case(f"up-{rows}", {"rows": rows, "inputs": 1024, "outputs": 6144}) for rows in (1, 8, 512)),),
    native_layout=bodies.with_packed_weight,
    single_row=independent_rows(0),
    strided=(0,),
    peer=lambda x, weight, bias=None, dtype=None: functional.linear(x, weight, bias),
    # Fewer columns would use another matrix instruction, and sums of tiles of different sizes might then differ.
    tunable={
        "rows": (16, 64, 128, 256),
        "columns": (64, 128, 256),
        "warps": (4, 8),
        "stages": (3, 4, 5),
        "loads": LOADS,
    },
)
