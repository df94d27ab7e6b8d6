"""y = x Wᵀ (+ b) by a weight of 4 or 8 bits that stays packed: w = scale · (q - zero) for each output and group of
inputs. Activations are not rounded.

    y = Σ over groups of inputs: scale · Σ in the group: (q - zero) · x

The differences q - zero are exact in the type of the activations; sums and scales are float32. Every number is read in
its own bits, so a step with few rows takes as long as reading the packed bytes.

The outputs of a tile take the rows of a matrix instruction and the rows of x its columns: few columns are cheap, and
unpacked weights go from registers to the instruction. Inputs are added up in order by the same instruction for any
number of columns, so the sums of a row do not depend on the other rows, unless `by_size` selects other tiles.

Layout of a weight, in blocks of `half` bytes for each output; half is 64, or 32 if groups are not multiples of 64:

    4 bits   byte i has input i of the block in its low bits and input i + half in its high bits
    8 bits   byte i has input i, as q + 128
    scales   [groups, outputs]; zero points of 4 bits have the same shape
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kernels.integer_layout import SMALL_HALF, half_of, packed_bytes
from kernels.jit import jit, launch, power_of_2, row_stride, tl
from kernels.op import Args, Case, Make, Op, independent_rows, nbytes
from kernels.tuning import settings

MIDDLE = {4: 8, 8: 128}  # zero point of weights without zero points
LEAST_COLUMNS, MOST_COLUMNS = 16, 128  # rows of x in a tile
FEW_ROWS = 64  # up to this number of rows, more and smaller tiles are faster


def packed(values: Tensor, bits: int, group: int) -> Tensor:
    """values: [outputs, inputs] uint8 of 4 bits, or int8 → [outputs, bytes] uint8. Missing inputs become zeros."""
    half = half_of(group)
    step = half * (8 // bits)
    padded = functional.pad(values, (0, -values.shape[1] % step))
    if bits == 8:
        return (padded.to(torch.int16) + MIDDLE[8]).to(torch.uint8)
    low, high = padded.unflatten(1, (-1, 2, half)).unbind(2)
    return (low | high << 4).flatten(1).contiguous()


def unpacked(weight: Tensor, bits: int, group: int) -> Tensor:
    """[outputs, bytes] uint8 → [outputs, padded inputs] int16, unsigned."""
    if bits == 8:
        return weight.to(torch.int16)
    blocks = weight.unflatten(1, (-1, half_of(group)))
    return torch.stack([blocks & 15, blocks >> 4], 2).flatten(1).to(torch.int16)


@jit
def exact_difference(q, zero, dtype: tl.constexpr, BITS: tl.constexpr):
    """q: [outputs, inputs] integers; zero: [outputs, 1] or [1, 1] integers → q - zero of this type, without rounding.

    An integer becomes the low bits of the mantissa of a float whose last place is 1, which takes fewer instructions
    than a conversion. A bfloat16 has room for 4 bits; 8 bits take a float32."""
    if dtype == tl.float16:
        found = (q.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - (zero.to(tl.float16) + 1024.0)
    elif dtype == tl.bfloat16 and BITS == 4:
        wide = (q.to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True)
        found = wide - (zero.to(tl.float32) + 128.0).to(tl.bfloat16)
    else:
        wide = (q.to(tl.uint32) | 0x4B000000).to(tl.float32, bitcast=True)
        found = (wide - (zero.to(tl.float32) + 8388608.0)).to(dtype)
    return found


@jit
def half_product(q, x, zeros, keep, total, BITS: tl.constexpr, ZEROS: tl.constexpr):
    """Return total + (q - zero) x. q: [outputs, half]; x: [half, columns]; zeros: pointers, [outputs]."""
    if ZEROS:
        zero = tl.load(zeros, keep, 0)[:, None]
    else:
        zero = tl.full((1, 1), 8 if BITS == 4 else 128, tl.int32)
    return tl.dot(exact_difference(q, zero, x.dtype, BITS), x, total, input_precision="ieee")


@jit
def scaled_sum(part, scales, keep, total):
    """Return total + scale · part. part, total: [outputs, columns]; scales: pointers, [outputs]."""
    return tl.fma(part, tl.load(scales, keep, 0.0).to(tl.float32)[:, None] + tl.zeros_like(part), total)


@jit
def packed_sum(
    left,
    right,
    scales,
    zeros,
    output,
    keep,
    keep_columns,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    ZEROS: tl.constexpr,
    HALF: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Return the products of TILE outputs with COLUMNS rows of x, [TILE, COLUMNS] float32. left: pointers to the first
    bytes of the outputs, [TILE, 1]; right: to the first inputs of the rows, [1, COLUMNS]; scales, zeros: to those of
    the matrix."""
    STEP: tl.constexpr = HALF * 8 // BITS
    BLOCKS: tl.constexpr = (INPUTS + STEP - 1) // STEP
    GROUPS: tl.constexpr = (INPUTS + GROUP - 1) // GROUP
    at = tl.arange(0, HALF)
    inputs, numbers = right + at[:, None], left + at[None, :]
    total = tl.zeros((TILE, COLUMNS), tl.float32)
    for block in range(0, BLOCKS):
        k = block * STEP
        q = tl.load(numbers + block * HALF, keep[:, None], 0)
        inner = tl.load(inputs + k, keep_columns & (at < INPUTS - k)[:, None], 0.0)
        group = (k // GROUP) * OUTPUTS + output
        part = tl.zeros((TILE, COLUMNS), tl.float32)
        if BITS == 8:
            part = half_product(q, inner, zeros + group, keep, part, BITS, ZEROS)
            total = scaled_sum(part, scales + group, keep, total)
        else:
            part = half_product(q & 15, inner, zeros + group, keep, part, BITS, ZEROS)
            keep_group = keep
            if GROUP % STEP > 0:
                total = scaled_sum(part, scales + group, keep, total)
                part = tl.zeros((TILE, COLUMNS), tl.float32)
                # The second half may be of the next group, or behind the last one.
                group = ((k + HALF) // GROUP) * OUTPUTS + output
                keep_group = keep & (group < GROUPS * OUTPUTS)
            inner = tl.load(inputs + k + HALF, keep_columns & (at < INPUTS - k - HALF)[:, None], 0.0)
            part = half_product(q >> 4, inner, zeros + group, keep_group, part, BITS, ZEROS)
            total = scaled_sum(part, scales + group, keep_group, total)
    return total


@jit(varying=("rows",))
def integer_matmul_kernel(
    x,
    weight,
    scales,
    zeros,
    bias,
    y,
    rows,
    x_row,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    ZEROS: tl.constexpr,
    BIAS: tl.constexpr,
    HALF: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program for TILE outputs of COLUMNS rows of x."""
    output = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    keep, keep_rows = output < OUTPUTS, (row < rows)[None, :]
    left = weight + output.to(tl.int64)[:, None] * WIDTH
    right = x + row.to(tl.int64)[None, :] * x_row
    total = packed_sum(
        left, right, scales, zeros, output, keep, keep_rows, OUTPUTS, INPUTS, GROUP, BITS, ZEROS, HALF, TILE, COLUMNS
    )
    if BIAS:
        total += tl.load(bias + output, keep, 0.0).to(tl.float32)[:, None]
    place = y + row.to(tl.int64)[None, :] * OUTPUTS + output[:, None]
    tl.store(place, total.to(y.dtype.element_ty), keep[:, None] & keep_rows)


def _triton(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bits: int,
    group: int,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    by_size: bool = False,
) -> Tensor:
    (rows, inputs), outputs = x.shape, weight.shape[0]
    _check(x, weight, scales, zeros, bits, group)
    y = torch.empty((rows, outputs), dtype=dtype or x.dtype, device=x.device)
    columns = min(MOST_COLUMNS, max(LEAST_COLUMNS, power_of_2(rows)))
    if x.dtype.itemsize > 2:
        columns = min(columns, FEW_ROWS)
    tile = 64
    if by_size:
        tile = 32 if rows <= FEW_ROWS else 128
    warps = 2 if tile < 64 else 4 if tile * columns <= 8192 else 8
    default = {"tile": tile, "columns": columns, "warps": warps, "stages": 4}
    chosen = settings("integer_matmul", default, x.device, rows=rows, outputs=outputs, bits=bits, by_size=int(by_size))
    launch(
        integer_matmul_kernel,
        (-(-outputs // chosen["tile"]), -(-rows // chosen["columns"])),
        x,
        weight,
        scales,
        weight if zeros is None else zeros,
        weight if bias is None else bias,
        y,
        rows,
        row_stride(x, "x"),
        OUTPUTS=outputs,
        INPUTS=inputs,
        WIDTH=weight.shape[1],
        GROUP=group,
        BITS=bits,
        ZEROS=zeros is not None,
        BIAS=bias is not None,
        HALF=half_of(group),
        TILE=chosen["tile"],
        COLUMNS=chosen["columns"],
        warps=chosen["warps"],
        stages=chosen["stages"],
    )
    return y


def _check(x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, group: int) -> None:
    inputs, outputs = x.shape[1], weight.shape[0]
    wanted = packed_bytes(inputs, bits, group)
    if group % SMALL_HALF or weight.shape[1] != wanted:
        raise ValueError(
            f"weight {tuple(weight.shape)} of {inputs} inputs in groups of {group}: must have {wanted} bytes for each "
            f"output, and groups of a multiple of {SMALL_HALF}"
        )
    for name, one in (("scales", scales), ("zeros", zeros)):
        if one is not None and one.shape != (-(-inputs // group), outputs):
            raise ValueError(f"{name} {tuple(one.shape)}: must be {(-(-inputs // group), outputs)}, [groups, outputs]")


def restored(weight: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, group: int, inputs: int) -> Tensor:
    """Return the weight as [outputs, inputs] float32."""
    middle = float(MIDDLE[bits]) if zeros is None else zeros.float().t().repeat_interleave(group, 1)[:, :inputs]
    wide = scales.float().t().repeat_interleave(group, 1)[:, :inputs]
    return (unpacked(weight, bits, group)[:, :inputs].float() - middle) * wide


def _reference(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bits: int,
    group: int,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    by_size: bool = False,
) -> Tensor:
    """x: [rows, inputs]; weight: from `packed`; scales: [groups, outputs]; zeros: [groups, outputs] uint8; bias:
    [outputs] → [rows, outputs] of `dtype` (default: x's)."""
    y = x.float() @ restored(weight, scales, zeros, bits, group, x.shape[1]).t()
    return (y if bias is None else y + bias.float()).to(dtype or x.dtype)


def _peer(x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, group: int, *rest: Any) -> Tensor:
    """Multiply by the weight that was dequantized before; torch has no product with packed weights."""
    return functional.linear(x, restored(weight, scales, zeros, bits, group, x.shape[1]).to(x.dtype))


def _inputs(
    make: Make,
    rows: int,
    inputs: int,
    outputs: int,
    bits: int = 4,
    group: int = 128,
    zeros: bool = False,
    bias: bool = False,
    dtype: torch.dtype | None = None,
    by_size: bool = False,
) -> Args:
    groups = -(-inputs // group)
    weight = make.integers(0, 256, outputs, packed_bytes(inputs, bits, group), dtype=torch.uint8)
    scales = make.normal(groups, outputs, dtype=torch.float32).exp().mul_(inputs**-0.5 / (1 << bits - 1))
    points = make.integers(0, 17, groups, outputs, dtype=torch.uint8) if zeros else None
    added = make.normal(outputs) if bias else None
    scales = scales.to(torch.float16 if bits == 4 else torch.bfloat16)
    return make.normal(rows, inputs), weight, scales, points, bits, group, added, dtype, by_size


SHAPES = (("qkv", 4096, 6144), ("up", 4096, 28672), ("down", 14336, 4096))

INTEGER_MATMUL = Op(
    name="integer_matmul",
    reference=_reference,
    triton=_triton,
    inputs=_inputs,
    cases=(
        Case("odd", {"rows": 5, "inputs": 70, "outputs": 37, "group": 32, "zeros": True, "bias": True}),
        Case("tiles", {"rows": 66, "inputs": 256, "outputs": 130, "zeros": True}),
        Case("middle", {"rows": 3, "inputs": 192, "outputs": 20, "group": 64}),
        Case("one-group", {"rows": 3, "inputs": 40, "outputs": 20}),
        Case("half-group", {"rows": 2, "inputs": 96, "outputs": 9, "group": 96, "zeros": True}),
        Case("bytes", {"rows": 5, "inputs": 70, "outputs": 37, "bits": 8, "group": 32, "bias": True}),
        Case("bytes-tiles", {"rows": 66, "inputs": 192, "outputs": 66, "bits": 8, "group": 64}),
        Case("by-size", {"rows": 5, "inputs": 128, "outputs": 37, "by_size": True}),
        Case("by-size-tiles", {"rows": 66, "inputs": 128, "outputs": 130, "by_size": True, "bits": 8}),
        Case("float32", {"rows": 3, "inputs": 64, "outputs": 20, "dtype": torch.float32}),
        Case("empty", {"rows": 0, "inputs": 32, "outputs": 16, "group": 32}),
        *(
            Case(
                f"{name}-{bits}-{rows}",
                {"rows": rows, "inputs": inputs, "outputs": outputs, "bits": bits, "by_size": True},
                bench=True,
            )
            for bits in (4, 8)
            for name, inputs, outputs in SHAPES
            for rows in (1, 32, 256, 4096)
        ),
        *(
            Case(f"small-groups-up-{rows}", {"rows": rows, "inputs": 4096, "outputs": 28672, **small}, bench=True)
            for small in ({"group": 32, "zeros": True},)
            for rows in (1, 32, 4096)
        ),
    ),
    # float32: one sum over up to 14,336 inputs
    tolerance={torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2},
    traffic=lambda x, weight, scales, zeros, bits, group, bias=None, dtype=None, by_size=False: (
        nbytes(x, weight, scales, zeros, bias) + x.shape[0] * weight.shape[0] * (dtype or x.dtype).itemsize
    ),
    flops=lambda x, weight, *rest: 2 * x.numel() * weight.shape[0],
    single_row=independent_rows(0),
    strided=(0,),
    peer=_peer,
    tunable={"tile": (32, 64, 128), "columns": (16, 32, 64, 128), "warps": (2, 4, 8), "stages": (3, 4, 5)},
)
