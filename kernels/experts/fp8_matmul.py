"""Products of routed rows by fp8 matrices of their experts: as kernels/experts/matmul.py, with the numbers and scales
of kernels/fp8_matmul.py.

    y[p] = Σ over groups of inputs: (q_x · q_Wᵀ) · scale_x · scale_W (+ b[expert])          x in e4m3 with its scales
    y[p] = Σ over groups of inputs: (x · q_Wᵀ) · scale_W (+ b[expert])                      x not rounded

Outputs of a tile take the rows of a matrix instruction and pairs its columns, 128 inputs at a time, in tiles of every
size, so the sums of a pair do not depend on the other pairs.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels.e4m3 import GROUP, groups_of, rounded_rows
from kernels.experts.matmul import EXPERT_MATMUL, read_bytes, store_pairs
from kernels.experts.schedule import drawn_schedule
from kernels.fp8_matmul import fp8_sum
from kernels.jit import jit, launch, row_stride, tl
from kernels.op import Args, Case, Make, Op, nbytes
from kernels.tuning import LARGE_TILES, settings, shared_memory


def _reference(
    x: Tensor,
    x_scales: Tensor | None,
    weight: Tensor,
    weight_scales: Tensor,
    unit: int,
    pairs: Tensor,
    tiles: Tensor,
    pairs_per_row: int,
    rows: int,
    bias: Tensor | None = None,
    scales: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """x: [tokens or pairs, inputs], in e4m3 with x_scales [tokens or pairs, groups] float32, or plain without; weight:
    [experts, outputs, inputs] in e4m3; weight_scales: [experts, outputs / unit, groups] float32; pairs, tiles: from
    expert_schedule with tiles of `rows` rows; bias: [experts, outputs]; scales: [pairs] fp32 → [pairs, outputs] of
    `dtype` (default: x's)."""
    (_, outputs, inputs), groups = weight.shape, weight_scales.shape[2]
    group = inputs if groups == 1 else GROUP
    wide = weight_scales.repeat_interleave(unit, 1)[:, :outputs].repeat_interleave(group, 2)[:, :, :inputs]
    left = x.float() if x_scales is None else x.float() * x_scales.repeat_interleave(group, 1)[:, :inputs]
    plain = weight.float() * wide
    own = None if bias is None else bias.float()
    return EXPERT_MATMUL.reference(left, plain, pairs, tiles, pairs_per_row, rows, own, scales).to(dtype or x.dtype)


@jit
def fp8_expert_matmul_kernel(
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
    GROUPS: tl.constexpr,
    UNITS: tl.constexpr,
    UNIT: tl.constexpr,
    ROUNDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    BIAS: tl.constexpr,
    SCALED: tl.constexpr,
):
    """One program for each COLUMNS outputs of a tile of ROWS pairs. UNITS: scales of an expert's outputs."""
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
    left_scales = weight_scales + (expert * UNITS + output // UNIT) * GROUPS
    right_scales = x_scales + row * GROUPS
    total = fp8_sum(
        left, right, at, left_scales, right_scales, keep, real, INPUTS, GROUPS, ROUNDED, ROWS, COLUMNS, STEP
    )
    store_pairs(total, y, bias, scales, expert, pair, real, output, keep, OUTPUTS, BIAS, SCALED)


def _triton(
    x: Tensor,
    x_scales: Tensor | None,
    weight: Tensor,
    weight_scales: Tensor,
    unit: int,
    pairs: Tensor,
    tiles: Tensor,
    pairs_per_row: int,
    rows: int,
    bias: Tensor | None = None,
    scales: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    num_experts, outputs, inputs = weight.shape
    groups, units = weight_scales.shape[2], -(-outputs // unit)
    if groups not in (1, groups_of(inputs, GROUP)) or weight_scales.shape != (num_experts, units, groups):
        raise ValueError(
            f"scales {list(weight_scales.shape)} of weights {list(weight.shape)}: must be [experts, outputs / {unit}, "
            f"1 or inputs / {GROUP}]"
        )
    count = len(pairs) // pairs_per_row
    if x.shape != (count, inputs) or (x_scales is not None and x_scales.shape != (count, groups)):
        raise ValueError(
            f"x of {list(x.shape)}: {len(pairs)} pairs, {pairs_per_row} per row, need {count} rows, scaled"
        )
    y = torch.empty((len(pairs), outputs), dtype=dtype or x.dtype, device=x.device)
    rounded = x_scales is not None
    narrow, roomy = rounded or x.dtype.itemsize == 2, shared_memory(x.device) >= LARGE_TILES
    # 128 outputs of 64 pairs need 8 warps, or sums would spill. With scales of groups, 128 pairs are too many for them.
    columns = 64 if rows <= 16 or not narrow or (groups > 1 and rows >= 128) else 128
    stages = (5 if rows <= 16 else 4) if rounded and roomy else 3 if narrow and roomy else 2
    default = {"columns": columns, "warps": 4 if rows <= 16 and narrow else 8, "stages": stages}
    sizes = {"rows": rows, "outputs": outputs, "inputs": inputs, "groups": groups, "rounded": int(rounded)}
    tuned = settings("fp8_expert_matmul", default, x.device, **sizes)
    launch(
        fp8_expert_matmul_kernel,
        (-(-outputs // tuned["columns"]), len(tiles)),
        x.view(torch.uint8) if rounded else x,
        weight_scales if x_scales is None else x_scales,
        weight.view(torch.uint8),
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
        GROUPS=groups,
        UNITS=units,
        UNIT=unit,
        ROUNDED=rounded,
        ROWS=rows,
        COLUMNS=tuned["columns"],
        STEP=GROUP,
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
    unit: int = 1,
    group: int | None = None,
    rounded: bool = True,
    rows: int | None = None,
    down: bool = False,
    biased: bool = False,
    scaled: bool = False,
) -> Args:
    """down: a row of x for each pair. rows: of a tile (default: as served)."""
    pairs, tiles, rows = drawn_schedule(make, tokens, num_experts, top_k, rows)
    x, x_scales = make.normal(tokens * (top_k if down else 1), inputs), None
    if rounded:
        x, x_scales = rounded_rows(x, group or inputs)
    weight = make.normal(num_experts, outputs, inputs, scale=50.0).to(torch.float8_e4m3fn)
    units, groups = -(-outputs // unit), groups_of(inputs, group or inputs)
    weight_scales = make.normal(num_experts, units, groups, dtype=torch.float32).exp() * (0.02 * inputs**-0.5)
    bias = make.normal(num_experts, outputs) if biased else None
    scales = make.normal(tokens * top_k, dtype=torch.float32) if scaled else None
    matrix = weight, weight_scales, unit
    return x, x_scales, *matrix, pairs, tiles, 1 if down else top_k, rows, bias, scales, make.dtype


def _single_row(args: Args, row: int) -> tuple[Args, Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]]:
    """A row with its own pairs, in tiles for a step of one token."""
    x, x_scales, weight, weight_scales, unit, pairs, tiles, pairs_per_row, rows, bias, scales, dtype = args
    assert EXPERT_MATMUL.single_row is not None
    own, select = EXPERT_MATMUL.single_row((x, weight, pairs, tiles, pairs_per_row, rows, bias, scales), row)
    own_scales = None if x_scales is None else x_scales[row : row + 1]
    return (own[0], own_scales, weight, weight_scales, unit, *own[2:], dtype), select


def _traffic(x: Tensor, x_scales: Tensor | None, weight: Tensor, weight_scales: Tensor, unit: int, *more: Any) -> int:
    pairs, tiles, _, _, bias, scales, dtype = more
    read = read_bytes(pairs, tiles, weight, weight_scales, bias)
    return nbytes(x, x_scales, pairs, tiles, scales) + len(pairs) * weight.shape[1] * dtype.itemsize + read


SMALL = {"inputs": 70, "outputs": 37}
BLOCKS = {"unit": GROUP, "group": GROUP}
FP8_EXPERT_MATMUL = Op(
    name="fp8_expert_matmul",
    reference=_reference,
    triton=_triton,
    inputs=_inputs,
    cases=(
        Case("one", {"tokens": 1, "num_experts": 8, "top_k": 2, "inputs": 128, "outputs": 64}),
        Case("odd", {"tokens": 7, "num_experts": 5, "top_k": 3, **SMALL}),
        Case("odd-down", {"tokens": 7, "num_experts": 5, "top_k": 3, "down": True, **SMALL}),
        Case("blocks", {"tokens": 5, "num_experts": 3, "top_k": 2, "inputs": 300, "outputs": 150, **BLOCKS}),
        Case("wide", {"tokens": 7, "num_experts": 5, "top_k": 3, "rounded": False, **SMALL}),
        Case(
            "wide-blocks",
            {"tokens": 5, "num_experts": 3, "top_k": 2, "inputs": 256, "outputs": 70, "rounded": False}
            | {"unit": 32, "group": GROUP, "down": True},
        ),
        Case("wide-tiles", {"tokens": 70, "num_experts": 3, "top_k": 2, "rows": 64, "inputs": 128, "outputs": 24}),
        Case("scaled", {"tokens": 9, "num_experts": 6, "top_k": 3, "biased": True, "scaled": True, **SMALL}),
        Case("empty", {"tokens": 0, "num_experts": 4, "top_k": 2, **SMALL}),
        *(
            Case(
                f"qwen3-30b-{name}-{'blocks-' if blocks else ''}{tokens}",
                {"tokens": tokens, "num_experts": 128, "top_k": 8, "inputs": inputs, "outputs": outputs}
                | {"down": name == "down"}
                | (BLOCKS if blocks else {}),
                True,
                "fp8",
            )
            for name, inputs, outputs in (("up", 2048, 1536), ("down", 768, 2048))
            for blocks in (False, True)
            for tokens in (1, 32, 256, 4096)
        ),
    ),
    # float32: products of e4m3 on a GPU's matrix units
    tolerance={torch.float32: 2e-3, torch.float16: 4e-3, torch.bfloat16: 2e-2},
    traffic=_traffic,
    flops=lambda x, x_scales, weight, weight_scales, unit, pairs, *rest: 2 * len(pairs) * weight[0].numel(),
    single_row=_single_row,
    # Fewer columns would use another matrix instruction, and sums of tiles of different sizes might then differ.
    tunable={"columns": (64, 128), "warps": (4, 8), "stages": (2, 3, 4, 5)},
    nearest=("outputs", "inputs"),
)
