"""Tiles of the products y = x Wᵀ: their shapes by number of rows, and the order in which programs take them.

The outputs of a tile take the rows of a matrix instruction, and the rows of x its columns. An instruction of 64 outputs
and 16 columns serves a step with few rows, one of up to 256 columns a prompt. Both add up inputs in the same order, so
the sums of a row do not depend on the other rows.
"""

from kernels.jit import jit, tl

FEW_ROWS = 64  # up to this number of rows, the tiles are small, so that there are many of them
LARGE_ROWS = 1024  # from this number of rows, tiles of 256 outputs fill the device
GROUPED = 8  # tiles of rows that are computed one after the other for the same outputs


def product_tile(rows: int, outputs: int) -> dict[str, int]:
    """Return the rows and outputs of a tile and the warps of its program, for operands of one or two bytes."""
    if rows <= FEW_ROWS:
        return {"rows": 16 if rows <= 16 else 32 if rows <= 32 else 64, "columns": 64, "warps": 4}
    if rows < LARGE_ROWS or outputs < 2048:
        return {"rows": 128 if rows > 128 else 64, "columns": 128, "warps": 8 if rows > 128 else 4}
    return {"rows": 128, "columns": 256, "warps": 8}


@jit
def grouped_tile(program, rows, ROWS: tl.constexpr, TILES: tl.constexpr, GROUPED: tl.constexpr):
    """Return the tile of rows and the tile of outputs of a program. TILES: tiles of outputs.

    Neighbouring programs share outputs or rows, so that the weights and inputs that are read at the same time stay in
    the cache: GROUPED tiles of rows for each tile of outputs."""
    row_tiles = (rows + ROWS - 1) // ROWS
    group = program // (GROUPED * TILES)
    size = tl.minimum(row_tiles - group * GROUPED, GROUPED)
    inside = program - group * (GROUPED * TILES)
    return group * GROUPED + inside % size, inside // size


@jit
def load_tiles(left, right, at, k, keep_outputs, keep_rows, INPUTS: tl.constexpr, STEP: tl.constexpr):
    """Return the tile of weights [outputs, STEP] and the tile of rows [STEP, rows] from input k on; numbers beyond
    INPUTS are 0. left, right: addresses of the tiles at input 0; at: 0, 1, … STEP - 1."""
    if INPUTS % STEP == 0:
        a = tl.load(left + k, keep_outputs[:, None], 0)
        b = tl.load(right + k, keep_rows[None, :], 0)
    else:
        inside = at < INPUTS - k
        a = tl.load(left + k, keep_outputs[:, None] & inside[None, :], 0)
        b = tl.load(right + k, keep_rows[None, :] & inside[:, None], 0)
    return a, b


@jit
def product_sum(
    left,
    right,
    at,
    keep_outputs,
    keep_rows,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Multiply a tile of plain weights by a tile of rows and return [COLUMNS, ROWS] float32. Inputs are added up in
    order, STEP at a time. `load_tiles` documents the arguments."""
    total = tl.zeros((COLUMNS, ROWS), tl.float32)
    for k in range(0, INPUTS, STEP):
        a, b = load_tiles(left, right, at, k, keep_outputs, keep_rows, INPUTS, STEP)
        total = tl.dot(a, b, total, input_precision="ieee")
    return total


@jit
def store_tile(total, y, bias, row, output, keep_rows, keep_outputs, OUTPUTS: tl.constexpr, BIAS: tl.constexpr):
    """Store the products of a tile, plus the bias. total: [outputs, rows] float32; row, output: numbers of both."""
    if BIAS:
        total += tl.load(bias + output, keep_outputs, 0.0).to(tl.float32)[:, None]
    place = y + row.to(tl.int64)[:, None] * OUTPUTS + output[None, :]
    tl.store(place, tl.trans(total).to(y.dtype.element_ty), keep_rows[:, None] & keep_outputs[None, :])
