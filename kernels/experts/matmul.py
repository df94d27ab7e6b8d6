"""Products of routed rows by the matrices of their experts: y[p] = W[expert of p] x[p // pairs_per_row] (+ b[expert]).
With scales, a row of x is multiplied by the scale of its pair.

p is a pair of a token and an expert (schedule.py). With `pairs_per_row` pairs to a row of x, the rows are tokens, as in
the up projection; with `pairs_per_row` = 1 the rows are the pairs themselves, as in the down projection. The matrices
of a layer's experts are stored one after another. Only matrices of experts that have a tile are read, once for each
tile.

The outputs of a tile take the rows of a matrix instruction and the pairs its columns, because few columns are cheap: a
step of one token multiplies by 16 columns, one of them real, which costs less than reading the weights. Inputs are
added up in order, STEP at a time, by the same instruction for every size of tile; only its number of columns changes.
The sums of a pair therefore do not depend on the other pairs.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels.experts.schedule import EXPERT_SCHEDULE, drawn_schedule, tile_rows
from kernels.jit import jit, launch, row_stride, tl
from kernels.op import Args, Case, Make, Op, nbytes
from kernels.product_tiles import product_sum
from kernels.tuning import has_tensor_memory, settings

STEP = 64  # inputs at a time


def _reference(
    x: Tensor,
    weight: Tensor,
    pairs: Tensor,
    tiles: Tensor,
    pairs_per_row: int,
    rows: int,
    bias: Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """x: [tokens or pairs, inputs]; weight: [experts, outputs, inputs] of x's type, contiguous; pairs, tiles: from
    expert_schedule with tiles of `rows` rows; bias: [experts, outputs] of x's type, scales: [pairs]
    or [tokens, pairs_per_row] fp32, contiguous → [pairs, outputs] of x's type."""
    y = torch.empty((pairs.shape[0], weight.shape[1]), dtype=x.dtype, device=x.device)
    for expert, first, end in tiles.tolist():
        own = pairs[first:end].long()
        product = x[own // pairs_per_row].float() @ weight[expert].float().t()
        if scales is not None:
            product *= scales.flatten()[own, None]
        y[own] = (product if bias is None else product + bias[expert].float()).to(x.dtype)
    return y


@jit
def store_pairs(
    total,
    y,
    bias,
    scales,
    expert,
    pair,
    real,
    output,
    keep,
    OUTPUTS: tl.constexpr,
    BIAS: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Store the products of an expert, times the scale of each pair and plus the bias. total: [outputs, pairs] float32;
    pair, real: [pairs]; output, keep: [outputs]."""
    if SCALED:
        total *= tl.load(scales + pair, real, 0.0)[None, :]
    if BIAS:
        total += tl.load(bias + expert * OUTPUTS + output, keep, 0.0).to(tl.float32)[:, None]
    out = y + pair.to(tl.int64)[:, None] * OUTPUTS + output[None, :]
    tl.store(out, tl.trans(total).to(y.dtype.element_ty), real[:, None] & keep[None, :])


@jit
def expert_matmul_kernel(
    x,
    weight,
    pairs,
    tiles,
    bias,
    scales,
    y,
    x_row,
    PAIRS_PER_ROW: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    BIAS: tl.constexpr,
    SCALED: tl.constexpr,
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
    right = x + (pair // PAIRS_PER_ROW).to(tl.int64)[None, :] * x_row + at[:, None]
    total = product_sum(left, right, at, keep, real, INPUTS, ROWS, COLUMNS, STEP)
    store_pairs(total, y, bias, scales, expert, pair, real, output, keep, OUTPUTS, BIAS, SCALED)


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


def _triton(
    x: Tensor,
    weight: Tensor,
    pairs: Tensor,
    tiles: Tensor,
    pairs_per_row: int,
    rows: int,
    bias: Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    _, outputs, inputs = weight.shape
    if not weight.is_contiguous():
        raise ValueError("weight: the matrices of the experts must be contiguous; call .contiguous()")
    if bias is not None and (bias.shape != weight.shape[:2] or not bias.is_contiguous()):
        raise ValueError(f"bias of {list(bias.shape)}: must be contiguous, {list(weight.shape[:2])}")
    if x.shape != (len(pairs) // pairs_per_row, inputs):
        raise ValueError(
            f"x of {list(x.shape)}: {len(pairs)} pairs, {pairs_per_row} per row, need rows of {inputs} inputs"
        )
    if scales is not None and (scales.numel() != len(pairs) or not scales.is_contiguous()):
        raise ValueError(f"scales of {list(scales.shape)}: must be contiguous, one for each of {len(pairs)} pairs")
    y = torch.empty((len(pairs), outputs), dtype=x.dtype, device=x.device)
    default = _default(rows, outputs, inputs * x.element_size(), x.element_size())
    if scales is not None and has_tensor_memory(x.device):  # larger tiles spill
        default["columns"] = min(default["columns"], 128)
    tuned = settings("expert_matmul", default, x.device, rows=rows, outputs=outputs, inputs=inputs)
    launch(
        expert_matmul_kernel,
        (-(-outputs // tuned["columns"]), len(tiles)),
        x,
        weight,
        pairs,
        tiles,
        y if bias is None else bias,
        y if scales is None else scales,
        y,
        row_stride(x, "x"),
        PAIRS_PER_ROW=pairs_per_row,
        OUTPUTS=outputs,
        INPUTS=inputs,
        ROWS=rows,
        COLUMNS=tuned["columns"],
        STEP=STEP,
        BIAS=bias is not None,
        SCALED=scales is not None,
        warps=tuned["warps"],
        stages=tuned["stages"],
    )
    return y


def _inputs(
    make: Make,
    tokens: int,
    num_experts: int,
    top_k: int,
    inputs: int,
    outputs: int,
    *,
    rows: int | None = None,
    down: bool = False,
    only: int | None = None,
    biased: bool = False,
    scaled: bool = False,
) -> Args:
    """down: a row of x for each pair. only: an expert that every token takes. rows: of a tile (default: as served)."""
    pairs, tiles, rows = drawn_schedule(make, tokens, num_experts, top_k, rows, only)
    x = make.normal(tokens * (top_k if down else 1), inputs)
    weight = make.normal(num_experts, outputs, inputs, scale=inputs**-0.5)
    bias = make.normal(num_experts, outputs) if biased else None
    scales = make.normal(tokens * top_k, dtype=torch.float32) if scaled else None
    return x, weight, pairs, tiles, 1 if down else top_k, rows, bias, scales


def _single_row(args: Args, row: int) -> tuple[Args, Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]]:
    """A row with its own pairs, in tiles for a step of one token."""
    x, weight, pairs, tiles, pairs_per_row, _, bias, scales = args
    own = range(row * pairs_per_row, row * pairs_per_row + pairs_per_row)
    experts = {pair: expert for expert, first, end in tiles.tolist() for pair in pairs[first:end].tolist()}
    expert_ids = torch.tensor([[experts[pair] for pair in own]], dtype=torch.int32, device=x.device)
    rows = tile_rows(1, pairs_per_row, weight.shape[0])
    schedule = EXPERT_SCHEDULE.reference(expert_ids, weight.shape[0], rows)
    mine = slice(own.start, own.stop)
    row_scales = None if scales is None else scales[mine]
    one = (x[row : row + 1], weight, *schedule, pairs_per_row, rows, bias, row_scales)
    return one, lambda outputs: (outputs[0][mine],)


def read_bytes(pairs: Tensor, tiles: Tensor, *stacks: Tensor | None) -> int:
    """Return the bytes of the weights and their scales of the experts with a pair. stacks: [experts, …]. On the meta
    device tiles have no values: assume evenly distributed experts."""
    assert stacks[0] is not None, "there are weights"
    num_experts = len(stacks[0])
    if tiles.device.type == "meta":
        used = num_experts * (1 - (1 - 1 / num_experts) ** len(pairs))
    else:
        used = len({expert for expert, first, end in tiles.tolist() if first < end})
    return round(nbytes(*stacks) / num_experts * used)


def _traffic(
    x: Tensor,
    weight: Tensor,
    pairs: Tensor,
    tiles: Tensor,
    pairs_per_row: int,
    rows: int,
    bias: Tensor | None = None,
    scales: Tensor | None = None,
) -> int:
    results = len(pairs) * weight.shape[1] * x.element_size()
    return nbytes(x, pairs, tiles, scales) + results + read_bytes(pairs, tiles, weight, bias)


def _served(
    name: str,
    tokens: int,
    num_experts: int,
    top_k: int,
    inputs: int,
    outputs: int,
    *,
    down: bool,
    biased: bool = False,
    scaled: bool = False,
) -> Case:
    sizes: dict[str, Any] = {"num_experts": num_experts, "top_k": top_k, "inputs": inputs, "outputs": outputs}
    sizes |= {"down": down, "biased": biased, "scaled": scaled}
    return Case(f"{name}-{tokens}", {"tokens": tokens, **sizes}, bench=True)


SMALL = {"inputs": 70, "outputs": 37}
EXPERT_MATMUL = Op(
    name="expert_matmul",
    reference=_reference,
    triton=_triton,
    inputs=_inputs,
    cases=(
        Case("one", {"tokens": 1, "num_experts": 8, "top_k": 2, "inputs": 64, "outputs": 64}),
        Case("odd", {"tokens": 7, "num_experts": 5, "top_k": 3, **SMALL}),
        Case("odd-down", {"tokens": 7, "num_experts": 5, "top_k": 3, "down": True, **SMALL}),
        Case("crowd", {"tokens": 35, "num_experts": 6, "top_k": 1, "rows": 16, "only": 4, **SMALL}),
        Case("crowd-down", {"tokens": 33, "num_experts": 4, "top_k": 2, "rows": 16, "only": 1, "down": True, **SMALL}),
        Case("all", {"tokens": 5, "num_experts": 3, "top_k": 3, "inputs": 20, "outputs": 130}),
        Case("wide-tiles", {"tokens": 70, "num_experts": 3, "top_k": 2, "rows": 64, "inputs": 33, "outputs": 24}),
        Case("widest-tiles", {"tokens": 140, "num_experts": 2, "top_k": 1, "inputs": 66, "outputs": 70}),
        Case("sparse", {"tokens": 2, "num_experts": 40, "top_k": 4, "inputs": 130, "outputs": 20}),
        Case("biased", {"tokens": 9, "num_experts": 6, "top_k": 3, "biased": True, **SMALL}),
        Case("biased-down", {"tokens": 9, "num_experts": 6, "top_k": 3, "biased": True, "down": True, **SMALL}),
        Case("scaled", {"tokens": 9, "num_experts": 6, "top_k": 3, "biased": True, "scaled": True, **SMALL}),
        Case("empty", {"tokens": 0, "num_experts": 4, "top_k": 2, **SMALL}),
        *(
            _served(f"qwen3-30b-{name}", tokens, 128, 8, inputs, outputs, down=name == "down")
            for name, inputs, outputs in (("up", 2048, 1536), ("down", 768, 2048))
            for tokens in (1, 32, 256, 4096)
        ),
        *(_served("mixtral-up", tokens, 8, 2, 4096, 28672, down=False) for tokens in (1, 4096)),
        *(_served("gpt-oss-up", tokens, 32, 4, 2880, 5760, down=False, biased=True) for tokens in (1, 4096)),
        _served("llama4-up", 4096, 16, 1, 5120, 16384, down=False, scaled=True),
    ),
    tolerance={torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2},
    traffic=_traffic,
    flops=lambda x, weight, pairs, *rest: 2 * len(pairs) * weight.shape[1] * weight.shape[2],
    single_row=_single_row,
    strided=(0,),
    # Fewer columns would use another matrix instruction, and sums of tiles of different sizes might then differ.
    tunable={"columns": (64, 128, 256), "warps": (4, 8), "stages": (2, 3, 4, 6)},
    nearest=("outputs", "inputs"),
)
