"""Products of routed rows by the matrices of their experts: y[p] = W[expert of p] x[p // each].

p is a pair of a token and an expert (work.py). With `each` pairs to a row of x, the rows are tokens, as in the up
projection; with `each` = 1 the rows are the pairs themselves, as in the down projection. The matrices of a layer's
experts are stored one after another. Only matrices of experts that have a tile are read, once for each tile.

The outputs of a tile take the rows of a matrix instruction and the pairs its columns, because few columns are cheap: a
step of one token multiplies by 16 columns, one of them real, which costs less than reading the weights. Inputs are
added up in order, STEP at a time, by the same instruction for every size of tile; only its number of columns changes.
The sums of a pair therefore do not depend on the other pairs.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.experts.work import EXPERT_WORK, drawn_numbers, empty_work, tile_rows
from kernels.jit import jit, launch, rows_of, tl
from kernels.op import Args, Case, Make, Op, nbytes
from kernels.tuning import settings

STEP = 64  # inputs at a time


def _reference(x: Tensor, weight: Tensor, pairs: Tensor, tiles: Tensor, each: int, rows: int) -> Tensor:
    """x: [tokens or pairs, inputs]; weight: [experts, outputs, inputs] of x's type, contiguous; pairs, tiles: from
    expert_work with tiles of `rows` rows → [pairs, outputs] of x's type."""
    y = torch.empty((pairs.shape[0], weight.shape[1]), dtype=x.dtype, device=x.device)
    for expert, first, end in tiles.tolist():
        own = pairs[first:end].long()
        y[own] = (x[own // each].float() @ weight[expert].float().t()).to(x.dtype)
    return y


@jit
def expert_matmul_kernel(
    x,
    weight,
    pairs,
    tiles,
    y,
    x_row,
    EACH: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    """One program for each COLUMNS outputs of a tile of ROWS pairs."""
    entry = tiles + tl.program_id(1) * 3
    first = tl.load(entry + 1)
    end = tl.load(entry + 2)
    if first >= end:
        return
    expert = tl.load(entry).to(tl.int64)
    place = first + tl.arange(0, ROWS)
    real = place < end
    pair = tl.load(pairs + place, real, 0)
    output = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    keep = output < OUTPUTS
    at = tl.arange(0, STEP)
    left = weight + (expert * OUTPUTS + output)[:, None] * INPUTS + at[None, :]
    right = x + (pair // EACH).to(tl.int64)[None, :] * x_row + at[:, None]
    total = tl.zeros((COLUMNS, ROWS), tl.float32)
    for k in range(0, INPUTS, STEP):
        if INPUTS % STEP == 0:
            a = tl.load(left + k, keep[:, None], 0.0)
            b = tl.load(right + k, real[None, :], 0.0)
        else:
            inside = at < INPUTS - k
            a = tl.load(left + k, keep[:, None] & inside[None, :], 0.0)
            b = tl.load(right + k, real[None, :] & inside[:, None], 0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    out = y + pair.to(tl.int64)[:, None] * OUTPUTS + output[None, :]
    tl.store(out, tl.trans(total).to(y.dtype.element_ty), real[:, None] & keep[None, :])


def _default(rows: int, outputs: int, row_bytes: int, element_bytes: int) -> dict[str, int]:
    """Return settings by the number of rows. With few rows the kernel waits for memory: many programs, each with many
    loads in flight. With many rows it waits for the matrix units, which need large tiles. Large tiles do not fit if
    numbers have 4 bytes, or if loads pass through registers, as with rows that are not aligned to 16 bytes."""
    if element_bytes == 4 or row_bytes % 16:
        return {"columns": 32, "warps": 4 if rows < 128 else 8, "stages": 2}
    if rows == 16:
        return {"columns": 64, "warps": 4, "stages": 6}
    if rows < 128 or outputs <= 128:
        return {"columns": 128, "warps": 4, "stages": 4 if rows < 128 else 3}
    return {"columns": 256, "warps": 8, "stages": 3}


def _triton(x: Tensor, weight: Tensor, pairs: Tensor, tiles: Tensor, each: int, rows: int) -> Tensor:
    _, outputs, inputs = weight.shape
    if not weight.is_contiguous():
        raise ValueError("weight: the matrices of the experts must lie one behind another; use .contiguous()")
    if x.shape != (len(pairs) // each, inputs):
        raise ValueError(f"x of {list(x.shape)}: {len(pairs)} pairs, {each} to a row, of {inputs} inputs are wanted")
    y = torch.empty((len(pairs), outputs), dtype=x.dtype, device=x.device)
    default = _default(rows, outputs, inputs * x.element_size(), x.element_size())
    chosen = settings("expert_matmul", default, x.device, rows=rows, outputs=outputs, inputs=inputs)
    launch(
        expert_matmul_kernel,
        (-(-outputs // chosen["columns"]), len(tiles)),
        x,
        weight,
        pairs,
        tiles,
        y,
        rows_of(x, "x"),
        EACH=each,
        OUTPUTS=outputs,
        INPUTS=inputs,
        ROWS=rows,
        COLUMNS=chosen["columns"],
        STEP=STEP,
        warps=chosen["warps"],
        stages=chosen["stages"],
    )
    return y


def _inputs(
    make: Make,
    tokens: int,
    count: int,
    chosen: int,
    inputs: int,
    outputs: int,
    *,
    rows: int | None = None,
    down: bool = False,
    only: int | None = None,
) -> Args:
    """down: a row of x for each pair. only: an expert that every token takes. rows: of a tile (default: as served)."""
    numbers = drawn_numbers(make, tokens, count, chosen, only)
    rows = rows or tile_rows(tokens, chosen, count)
    pairs, tiles = (empty_work if make.meta else EXPERT_WORK.reference)(numbers, count, rows)
    x = make.normal(tokens * (chosen if down else 1), inputs)
    return x, make.normal(count, outputs, inputs, scale=inputs**-0.5), pairs, tiles, 1 if down else chosen, rows


def _alone(args: Args, row: int) -> tuple[Args, Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]]:
    """A row with its own pairs, in tiles for a step of one token."""
    x, weight, pairs, tiles, each, _ = args
    own = range(row * each, row * each + each)
    experts = {pair: expert for expert, first, end in tiles.tolist() for pair in pairs[first:end].tolist()}
    numbers = torch.tensor([[experts[pair] for pair in own]], dtype=torch.int32, device=x.device)
    rows = tile_rows(1, each, weight.shape[0])
    work = EXPERT_WORK.reference(numbers, weight.shape[0], rows)
    return (x[row : row + 1], weight, *work, each, rows), lambda outputs: (outputs[0][own.start : own.stop],)


def _traffic(x: Tensor, weight: Tensor, pairs: Tensor, tiles: Tensor, each: int, rows: int) -> int:
    """Count the weights of experts with a pair. On the meta device tiles have no values: assume evenly distributed
    experts."""
    count, outputs, _ = weight.shape
    if tiles.device.type == "meta":
        used = count * (1 - (1 - 1 / count) ** len(pairs))
    else:
        used = len({expert for expert, first, end in tiles.tolist() if first < end})
    results = len(pairs) * outputs * x.element_size()
    return nbytes(x, pairs, tiles) + results + round(weight.nbytes / count * used)


def _served(name: str, tokens: int, count: int, chosen: int, inputs: int, outputs: int, *, down: bool) -> Case:
    sizes = {"count": count, "chosen": chosen, "inputs": inputs, "outputs": outputs, "down": down}
    return Case(f"{name}-{tokens}", {"tokens": tokens, **sizes}, bench=True)


SMALL = {"inputs": 70, "outputs": 37}
EXPERT_MATMUL = Op(
    name="expert_matmul",
    reference=_reference,
    triton=_triton,
    inputs=_inputs,
    cases=(
        Case("one", {"tokens": 1, "count": 8, "chosen": 2, "inputs": 64, "outputs": 64}),
        Case("odd", {"tokens": 7, "count": 5, "chosen": 3, **SMALL}),
        Case("odd-down", {"tokens": 7, "count": 5, "chosen": 3, "down": True, **SMALL}),
        Case("crowd", {"tokens": 35, "count": 6, "chosen": 1, "rows": 16, "only": 4, **SMALL}),
        Case("crowd-down", {"tokens": 33, "count": 4, "chosen": 2, "rows": 16, "only": 1, "down": True, **SMALL}),
        Case("all", {"tokens": 5, "count": 3, "chosen": 3, "inputs": 20, "outputs": 130}),
        Case("wide-tiles", {"tokens": 70, "count": 3, "chosen": 2, "rows": 64, "inputs": 33, "outputs": 24}),
        Case("widest-tiles", {"tokens": 140, "count": 2, "chosen": 1, "inputs": 66, "outputs": 70}),
        Case("sparse", {"tokens": 2, "count": 40, "chosen": 4, "inputs": 130, "outputs": 20}),
        Case("empty", {"tokens": 0, "count": 4, "chosen": 2, **SMALL}),
        *(
            _served(f"qwen3-30b-{name}", tokens, 128, 8, inputs, outputs, down=name == "down")
            for name, inputs, outputs in (("up", 2048, 1536), ("down", 768, 2048))
            for tokens in (1, 32, 256, 4096)
        ),
        *(_served("mixtral-up", tokens, 8, 2, 4096, 28672, down=False) for tokens in (1, 4096)),
    ),
    tolerance={torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2},
    traffic=_traffic,
    flops=lambda x, weight, pairs, *rest: 2 * len(pairs) * weight.shape[1] * weight.shape[2],
    alone=_alone,
    strided=(0,),
    # Fewer columns would use another matrix instruction, and sums of tiles of different sizes might then differ.
    tunable={"columns": (64, 128, 256), "warps": (4, 8), "stages": (2, 3, 4, 6)},
    near=("outputs", "inputs"),
)
