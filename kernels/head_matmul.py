"""y[t, h] = x[t, h] W[h]ᵀ: a matrix for each head, as in latent attention with absorbed matrices."""

from typing import Any

import torch
from torch import Tensor

from kernels.jit import jit, launch, tl
from kernels.op import Args, Case, Make, Op, independent_rows
from kernels.tuning import LARGE_TILES, settings, shared_memory

# As in kernels/linear.py, the same for every number of rows.
TILE_ROWS, TILE_INPUTS = 64, 64


@jit(varying=("rows",))
def head_matmul_kernel(
    x,
    weight,
    y,
    rows,
    x_row,
    x_head,
    y_row,
    y_head,
    weight_head,
    weight_output,
    weight_input,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    """One program for each tile of ROWS x COLUMNS outputs of a head; inputs are added up in order, STEP at a time."""
    head = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    at = tl.arange(0, STEP)
    keep_rows, keep_columns = (row < rows)[:, None], (column < OUTPUTS)[None, :]
    left = x + row.to(tl.int64)[:, None] * x_row + head * x_head + at[None, :]
    right = weight + head * weight_head + column[None, :] * weight_output + at[:, None] * weight_input
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(0, INPUTS, STEP):
        inside = at < INPUTS - k
        a = tl.load(left + k, keep_rows & inside[None, :], 0.0)
        b = tl.load(right + k * weight_input, keep_columns & inside[:, None], 0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    place = y + row.to(tl.int64)[:, None] * y_row + head * y_head + column[None, :]
    tl.store(place, total.to(y.dtype.element_ty), keep_rows & keep_columns)


def _triton(x: Tensor, weight: Tensor, y: Tensor) -> Tensor:
    rows, heads, inputs = x.shape
    outputs = weight.shape[1]
    for tensor, name in ((x, "x"), (y, "y")):
        if tensor.stride(2) != 1:
            raise ValueError(f"{name}: the elements of a head must be contiguous, not {tensor.stride(2)} apart")
    stages = 4 if x.dtype.itemsize == 2 or shared_memory(x.device) >= LARGE_TILES else 3
    default = {"columns": 128 if rows > 64 else 64, "warps": 4, "stages": stages}
    chosen = settings("head_matmul", default, x.device, rows=rows, outputs=outputs)
    launch(
        head_matmul_kernel,
        (-(-outputs // chosen["columns"]), -(-rows // TILE_ROWS), heads),
        x,
        weight,
        y,
        rows,
        x.stride(0),
        x.stride(1),
        y.stride(0),
        y.stride(1),
        *weight.stride(),
        OUTPUTS=outputs,
        INPUTS=inputs,
        ROWS=TILE_ROWS,
        COLUMNS=chosen["columns"],
        STEP=TILE_INPUTS,
        warps=chosen["warps"],
        stages=chosen["stages"],
    )
    return y


def _reference(x: Tensor, weight: Tensor, y: Tensor) -> Tensor:
    """x: [rows, heads, inputs]; weight: [heads, outputs, inputs], at any strides → y: [rows, heads, outputs], of which
    the elements of a head may belong to a wider one."""
    y.copy_(torch.einsum("rhi,hoi->rho", x.float(), weight.float()))
    return y


def _inputs(
    make: Make, rows: int, heads: int, inputs: int, outputs: int, transposed: bool = False, beside: int = 0
) -> Args:
    """transposed: the outputs of an input are adjacent. beside: elements of a head of x and of y that do not take
    part."""
    scale = inputs**-0.5
    weight = make.normal(heads, inputs, outputs, scale=scale).transpose(1, 2)
    if not transposed:
        weight = make.normal(heads, outputs, inputs, scale=scale)
    x, y = make.normal(rows, heads, inputs + beside), make.normal(rows, heads, outputs + beside)
    return x[..., :inputs], weight, y[..., :outputs]


def _traffic(x: Tensor, weight: Tensor, y: Tensor) -> int:
    return sum(one.numel() * one.element_size() for one in (x, weight, y))


def _peer(x: Tensor, weight: Tensor, y: Tensor) -> Any:
    return torch.bmm(x.transpose(0, 1), weight.transpose(1, 2))


HEAD_MATMUL = Op(
    name="head_matmul",
    reference=_reference,
    triton=_triton,
    inputs=_inputs,
    cases=(
        Case("odd", {"rows": 5, "heads": 3, "inputs": 19, "outputs": 70}),
        Case("keys", {"rows": 3, "heads": 2, "inputs": 33, "outputs": 24, "transposed": True, "beside": 6}),
        Case("tiles", {"rows": 66, "heads": 1, "inputs": 64, "outputs": 130, "transposed": True}),
        Case("empty", {"rows": 0, "heads": 2, "inputs": 16, "outputs": 16}),
        *(
            Case(f"{name}-{rows}", {"rows": rows, "heads": 128, "transposed": name == "keys", **sizes}, bench=True)
            for name, sizes in (
                ("keys", {"inputs": 128, "outputs": 512, "beside": 64}),
                ("values", {"inputs": 512, "outputs": 128}),
            )
            for rows in (1, 256, 4096)
        ),
    ),
    tolerance={torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2},
    traffic=_traffic,
    flops=lambda x, weight, y: 2 * x.shape[0] * weight.numel(),
    single_row=independent_rows(0, 2),
    peer=_peer,
    tunable={"columns": (32, 64, 128, 256), "warps": (4, 8), "stages": (3, 4, 5)},
)
