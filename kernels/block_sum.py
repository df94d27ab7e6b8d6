"""Product of the outputs and rows of a tile, for weights in planes (kernels/plane_layout.py): shared by
kernels/block_matmul.py and kernels/experts/block_matmul.py.

A program unpacks 32 inputs of its outputs at a time: w = scale · code' + minimum is computed in float32 and rounded to
the type of x, so results are those of a weight that was dequantized to this type. Scaled numbers go to the matrix
instruction, not scaled sums, because a minimum and groups of 16 inputs would need further sums for each group.
"""

from typing import Any

from torch import Tensor

from kernels.e4m3 import from_codes
from kernels.jit import jit, tl
from kernels.plane_layout import PLANES
from kernels.tuning import LARGE_TILES, shared_memory


def kind_constants(kind: str) -> dict[str, Any]:
    """Return the compile-time arguments of a type."""
    layout = PLANES[kind]
    return {
        "LOW": layout.low,
        "HIGH": layout.high,
        "MIDDLE": layout.middle,
        "TABLE": layout.table,
        "GROUP": layout.group,
        "TERMS": layout.terms,
        "NIBBLES": layout.nibbles,
        "POWER": 2 if layout.e4m3 else int(layout.power),
        "UNITS": layout.units,
    }


def stages_for(x: Tensor) -> int:
    """Return the stages of loads. One of 128 inputs of 128 rows and their codes takes 38 to 44 KiB."""
    return 3 if x.dtype.itemsize == 2 and shared_memory(x.device) >= LARGE_TILES else 2


@jit
def looked_up(codes, TABLE: tl.constexpr):
    """codes: 4 bits → bytes of the table."""
    WORD: tl.constexpr = 0xFFFFFFFF
    first = tl.where(
        codes < 4, tl.full((1, 1), TABLE & WORD, tl.uint32), tl.full((1, 1), (TABLE >> 32) & WORD, tl.uint32)
    )
    second = tl.where(
        codes < 12, tl.full((1, 1), (TABLE >> 64) & WORD, tl.uint32), tl.full((1, 1), TABLE >> 96, tl.uint32)
    )
    return (tl.where(codes < 8, first, second) >> ((codes & 3) * 8).to(tl.uint32)) & 255


@jit
def chosen(taken, TABLE: tl.constexpr, PLACE: tl.constexpr):
    """Return the bits of the number after PLACE of a table of float32 where `taken`, else those of number PLACE."""
    WORD: tl.constexpr = 0xFFFFFFFF
    return tl.where(
        taken,
        tl.full((1, 1), (TABLE >> (32 * PLACE + 32)) & WORD, tl.uint32),
        tl.full((1, 1), (TABLE >> (32 * PLACE)) & WORD, tl.uint32),
    )


@jit
def looked_up_float(codes, TABLE: tl.constexpr):
    """codes: 4 bits → float32 numbers of a table, whose bits TABLE has: a choice for each bit of the code."""
    bit0, bit1, bit2 = (codes & 1) > 0, (codes & 2) > 0, (codes & 4) > 0
    first = tl.where(bit1, chosen(bit0, TABLE, 2), chosen(bit0, TABLE, 0))
    second = tl.where(bit1, chosen(bit0, TABLE, 6), chosen(bit0, TABLE, 4))
    third = tl.where(bit1, chosen(bit0, TABLE, 10), chosen(bit0, TABLE, 8))
    fourth = tl.where(bit1, chosen(bit0, TABLE, 14), chosen(bit0, TABLE, 12))
    low, high = tl.where(bit2, second, first), tl.where(bit2, fourth, third)
    return tl.where((codes & 8) > 0, high, low).to(tl.float32, bitcast=True)


@jit
def exact_float(codes, MIDDLE: tl.constexpr):
    """codes: integers of at most 8 bits → code - MIDDLE in float32, by the mantissa of a float whose last place is
    1."""
    return (codes.to(tl.uint32) | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + MIDDLE)


@jit
def stored_scale(stored, POWER: tl.constexpr):
    """Return scales in float32. POWER: 1 for bytes e of 2^(e - 128), 2 for bytes in e4m3, 0 for numbers."""
    if POWER == 2:
        found = from_codes(stored, tl.float32)
    elif POWER == 1:
        e = stored.to(tl.int32)
        found = tl.where(e < 2, (e + 1) << 21, (e - 1) << 23).to(tl.float32, bitcast=True)
    else:
        found = stored.to(tl.float32)
    return found


@jit
def group_terms(
    scales,
    group,
    output,
    keep,
    unit,
    unit_minimum,
    OUTPUTS: tl.constexpr,
    TERMS: tl.constexpr,
    NIBBLES: tl.constexpr,
    POWER: tl.constexpr,
    UNITS: tl.constexpr,
):
    """Return scale and minimum of a group, [outputs] float32. unit, unit_minimum: factors, [outputs]."""
    at = group * (TERMS * OUTPUTS) + output
    stored = tl.load(scales + at, keep, 0)
    minimum = tl.zeros(output.shape, tl.float32)
    if NIBBLES:
        scale = unit * (stored & 15).to(tl.float32)
        minimum = -(unit_minimum * (stored >> 4).to(tl.float32))
    else:
        scale = stored_scale(stored, POWER)
        if UNITS > 0:
            scale = unit * scale
        if TERMS == 2:
            minimum = tl.load(scales + at + OUTPUTS, keep, 0).to(tl.float32)
            if UNITS == 2:
                minimum = -(unit_minimum * minimum)
    return scale, minimum


@jit
def part_codes(first, second, further, part: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr):
    """Return the codes of a part of 32 inputs. first, second: bytes of the low plane for the parts 0 and 1, 2 and 3;
    further: bytes of the high plane."""
    if LOW == 4:
        codes = ((first if part < 2 else second) >> (part % 2 * 4)) & 15
    else:
        codes = (first >> (part * 2)) & 3
    if HIGH == 2:
        codes = codes | (((further >> (part * 2)) & 3) << LOW)
    if HIGH == 1:
        codes = codes | (((further >> (part * 2)) & 1) << LOW)
    return codes


@jit
def block_sum(
    low,
    high,
    right,
    scales,
    units,
    output,
    keep,
    keep_columns,
    dtype: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
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
    """Return the products of TILE outputs with COLUMNS rows of x, [TILE, COLUMNS] float32. low, high: pointers to the
    first bytes of the outputs in the planes, [TILE, 1]; right: to the first inputs of the rows, [1, COLUMNS]; scales,
    units: to those of the matrix. dtype: of x."""
    GROUPS: tl.constexpr = (INPUTS + GROUP - 1) // GROUP
    FLOAT_TABLE: tl.constexpr = 1 << 128  # kernels/plane_layout.py
    MINIMA: tl.constexpr = NIBBLES or TERMS == 2
    at, zero = tl.arange(0, 32), output * 0  # masks are compared by output
    inputs = right + at[:, None]
    total = tl.zeros((TILE, COLUMNS), tl.float32)
    for step in range(0, (INPUTS + 127) // 128):
        k = step * 128
        unit = tl.zeros((TILE,), tl.float32)
        unit_minimum = unit
        if UNITS > 0:
            place = units + (k // 256) * (UNITS * OUTPUTS) + output
            unit = tl.load(place, keep, 0.0).to(tl.float32)
            if UNITS == 2:
                unit_minimum = tl.load(place + OUTPUTS, keep, 0.0).to(tl.float32)
        bytes_low = low + step * (16 * LOW) + at[None, :]
        first = zero[:, None]
        if LOW < 8:
            first = tl.load(bytes_low, keep[:, None], 0)
        second = first
        if LOW == 4:
            second = tl.load(bytes_low + 32, (keep & (zero + k + 64 < INPUTS))[:, None], 0)
        further = first
        if HIGH == 2:
            further = tl.load(high + step * 32 + at[None, :], keep[:, None], 0)
        if HIGH == 1:
            further = tl.load(high + step * 16 + (at % 16)[None, :], keep[:, None], 0) >> (at // 16)[None, :].to(
                tl.uint8
            )
        for part in tl.static_range(4):
            i = k + part * 32
            if LOW == 8:
                codes = tl.load(bytes_low + part * 32, (keep & (zero + i < INPUTS))[:, None], 0)
            else:
                codes = part_codes(first, second, further, part, LOW, HIGH)
            if LOW == 8:
                number = from_codes(codes, tl.float32)
            elif TABLE >= FLOAT_TABLE:
                number = looked_up_float(codes, TABLE)
            elif TABLE > 0:
                number = exact_float(looked_up(codes, TABLE), 128)
            else:
                number = exact_float(codes, MIDDLE)
            group = i // GROUP
            scale, minimum = group_terms(
                scales,
                group,
                output,
                keep & (zero + group < GROUPS),
                unit,
                unit_minimum,
                OUTPUTS,
                TERMS,
                NIBBLES,
                POWER,
                UNITS,
            )
            scale, minimum = scale[:, None], minimum[:, None]
            if GROUP == 16:
                next_scale, next_minimum = group_terms(
                    scales,
                    group + 1,
                    output,
                    keep & (zero + group + 1 < GROUPS),
                    unit,
                    unit_minimum,
                    OUTPUTS,
                    TERMS,
                    NIBBLES,
                    POWER,
                    UNITS,
                )
                scale = tl.where((at < 16)[None, :], scale, next_scale[:, None])
                if MINIMA:
                    minimum = tl.where((at < 16)[None, :], minimum, next_minimum[:, None])
            weight = number * scale
            if MINIMA:
                weight = weight + minimum
            x = tl.load(inputs + i, keep_columns & (at < INPUTS - i)[:, None], 0.0)
            total = tl.dot(weight.to(dtype), x, total, input_precision="ieee")
    return total
