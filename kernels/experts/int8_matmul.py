"""Products of routed rows by int8 matrices of their experts: as kernels/experts/matmul.py, with the numbers and scales
of kernels/int8_matmul.py.

    y[p] = (Σ q_x · q_W) · scale_x · scale_W (+ b[expert])

Sums are int32 and exact, so the result of a pair does not depend on the other pairs.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels.experts.matmul import EXPERT_MATMUL, read_bytes, store_pairs
from kernels.experts.schedule import drawn_schedule
from kernels.int8_matmul import STEP, int8_sum
from kernels.jit import jit, launch, row_stride, tl
from kernels.op import Args, Case, Make, Op, nbytes
from kernels.quantize_int8 import int8_rows
from kernels.tuning import LARGE_TILES, settings, shared_memory


def _reference(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    pairs: Tensor,
    tiles: Tensor,
    pairs_per_row: int,
    rows: int,
    bias: Tensor | None,
    scales: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """x: [tokens or pairs, inputs] int8 with x_scales [tokens or pairs] float32; weight: [experts, outputs, inputs]
    int8; weight_scales: [experts, outputs] float32; pairs, tiles: from expert_schedule with tiles of `rows` rows; bias:
    [experts, outputs]; scales: [pairs] fp32 → [pairs, outputs] of `dtype`."""
    plain, left = weight.float() * weight_scales[:, :, None], x.float() * x_scales[:, None]
    own = None if bias is None else bias.float()
    return EXPERT_MATMUL.reference(left, plain, pairs, tiles, pairs_per_row, rows, own, scales).to(dtype)


@jit
def int8_expert_matmul_kernel(
    x,
    x_scales,
    weight,
    weight_scales,
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
    row = (pair // PAIRS_PER_ROW).to(tl.int64)
    left = weight + (expert * OUTPUTS + output)[:, None] * INPUTS + at[None, :]
    right = x + row[None, :] * x_row + at[:, None]
    own_scales, row_scales = weight_scales + expert * OUTPUTS + output, x_scales + row
    total = int8_sum(left, right, at, own_scales, row_scales, keep, real, INPUTS, ROWS, COLUMNS, STEP)
    store_pairs(total, y, bias, scales, expert, pair, real, output, keep, OUTPUTS, BIAS, SCALED)


def _triton(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    pairs: Tensor,
    tiles: Tensor,
    pairs_per_row: int,
    rows: int,
    bias: Tensor | None,
    scales: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    num_experts, outputs, inputs = weight.shape
    count = len(pairs) // pairs_per_row
    if x.shape != (count, inputs) or x_scales.shape != (count,) or weight_scales.shape != (num_experts, outputs):
        raise ValueError(
            f"x of {list(x.shape)}, weight of {list(weight.shape)}: {len(pairs)} pairs, {pairs_per_row} per row, need "
            f"{count} rows of {inputs}, and a scale for each row and output"
        )
    y = torch.empty((len(pairs), outputs), dtype=dtype, device=x.device)
    roomy = shared_memory(x.device) >= LARGE_TILES
    default = {
        "columns": 64 if rows <= 16 else 128,
        "warps": 4 if rows <= 16 else 8,
        "stages": (5 if rows <= 16 else 4) if roomy else 2,
    }
    tuned = settings("int8_expert_matmul", default, x.device, rows=rows, outputs=outputs, inputs=inputs)
    launch(
        int8_expert_matmul_kernel,
        (-(-outputs // tuned["columns"]), len(tiles)),
        x,
        x_scales,
        weight,
        weight_scales,
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
    biased: bool = False,
    scaled: bool = False,
) -> Args:
    """down: a row of x for each pair. rows: of a tile (default: as served)."""
    pairs, tiles, rows = drawn_schedule(make, tokens, num_experts, top_k, rows)
    x, x_scales = int8_rows(make.normal(tokens * (top_k if down else 1), inputs))
    weight = make.integers(-127, 128, num_experts, outputs, inputs, dtype=torch.int8)
    weight_scales = make.normal(num_experts, outputs, dtype=torch.float32).exp() * (0.02 * inputs**-0.5)
    bias = make.normal(num_experts, outputs) if biased else None
    scales = make.normal(tokens * top_k, dtype=torch.float32) if scaled else None
    return x, x_scales, weight, weight_scales, pairs, tiles, 1 if down else top_k, rows, bias, scales, make.dtype


def _single_row(args: Args, row: int) -> tuple[Args, Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]]:
    """A row with its own pairs, in tiles for a step of one token."""
    x, x_scales, weight, weight_scales, pairs, tiles, pairs_per_row, rows, bias, scales, dtype = args
    assert EXPERT_MATMUL.single_row is not None
    own, select = EXPERT_MATMUL.single_row((x, weight, pairs, tiles, pairs_per_row, rows, bias, scales), row)
    return (own[0], x_scales[row : row + 1], weight, weight_scales, *own[2:], dtype), select


def _traffic(x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor, *more: Any) -> int:
    pairs, tiles, _, _, bias, scales, dtype = more
    read = read_bytes(pairs, tiles, weight, weight_scales, bias)
    return nbytes(x, x_scales, pairs, tiles, scales) + len(pairs) * weight.shape[1] * dtype.itemsize + read


SMALL = {"inputs": 70, "outputs": 37}
INT8_EXPERT_MATMUL = Op(
    name="int8_expert_matmul",
    reference=_reference,
    triton=_triton,
    inputs=_inputs,
    cases=(
        Case("one", {"tokens": 1, "num_experts": 8, "top_k": 2, "inputs": 128, "outputs": 64}),
        Case("odd", {"tokens": 7, "num_experts": 5, "top_k": 3, **SMALL}),
        Case("odd-down", {"tokens": 7, "num_experts": 5, "top_k": 3, "down": True, **SMALL}),
        Case("wide-tiles", {"tokens": 70, "num_experts": 3, "top_k": 2, "rows": 64, "inputs": 128, "outputs": 24}),
        Case("scaled", {"tokens": 9, "num_experts": 6, "top_k": 3, "biased": True, "scaled": True, **SMALL}),
        Case("empty", {"tokens": 0, "num_experts": 4, "top_k": 2, **SMALL}),
        *(
            Case(
                f"qwen3-30b-{name}-{tokens}",
                {"tokens": tokens, "num_experts": 128, "top_k": 8, "inputs": inputs, "outputs": outputs}
                | {"down": name == "down"},
                bench=True,
            )
            for name, inputs, outputs in (("up", 2048, 1536), ("down", 768, 2048))
            for tokens in (1, 32, 256, 4096)
        ),
    ),
    tolerance={torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2},
    traffic=_traffic,
    flops=lambda x, x_scales, weight, weight_scales, pairs, *rest: 2 * len(pairs) * weight[0].numel(),
    single_row=_single_row,
    tunable={"columns": (64, 128), "warps": (4, 8), "stages": (2, 3, 4, 5)},
    nearest=("outputs", "inputs"),
)
