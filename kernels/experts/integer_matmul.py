"""Products of routed rows by the packed matrices of their experts, in 4 or 8 bits. Like kernels/experts/matmul.py, with
weights as in kernels/integer_matmul.py.

The matrices of a layer's experts, and their scales and zero points, are stored one after another. Only matrices of
experts that have a tile are read, in their own bits, once for each tile.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels.experts.matmul import EXPERT_MATMUL, read_bytes, store_pairs
from kernels.experts.schedule import drawn_schedule
from kernels.integer_layout import half_of, packed_bytes
from kernels.integer_matmul import packed_sum, restored
from kernels.jit import jit, launch, row_stride, tl
from kernels.op import Args, Case, Make, Op, nbytes
from kernels.tuning import settings


def _reference(
    x: Tensor,
    weight: Tensor,
    group_scales: Tensor,
    zeros: Tensor | None,
    bits: int,
    group: int,
    pairs: Tensor,
    tiles: Tensor,
    pairs_per_row: int,
    rows: int,
    bias: Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """x: [tokens or pairs, inputs]; weight: [experts, outputs, bytes] uint8; group_scales: [experts, groups, outputs];
    zeros: [experts, groups, outputs] uint8; the other arguments and the result as in expert_matmul."""
    inputs = x.shape[1]
    whole = [
        restored(weight[expert], group_scales[expert], None if zeros is None else zeros[expert], bits, group, inputs)
        for expert in range(len(weight))
    ]
    float_bias = None if bias is None else bias.float()
    return EXPERT_MATMUL.reference(
        x.float(), torch.stack(whole), pairs, tiles, pairs_per_row, rows, float_bias, scales
    ).to(x.dtype)


@jit
def integer_expert_matmul_kernel(
    x,
    weight,
    group_scales,
    zeros,
    pairs,
    tiles,
    bias,
    scales,
    y,
    x_row,
    PAIRS_PER_ROW: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    BITS: tl.constexpr,
    ZEROS: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
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
    left = weight + (expert * OUTPUTS + output)[:, None] * WIDTH
    right = x + (pair // PAIRS_PER_ROW).to(tl.int64)[None, :] * x_row
    of_expert = expert * GROUPS * OUTPUTS
    total = packed_sum(
        left,
        right,
        group_scales + of_expert,
        zeros + of_expert,
        output,
        keep,
        real[None, :],
        OUTPUTS,
        INPUTS,
        GROUP,
        BITS,
        ZEROS,
        HALF,
        COLUMNS,
        ROWS,
    )
    store_pairs(total, y, bias, scales, expert, pair, real, output, keep, OUTPUTS, BIAS, SCALED)


def _triton(
    x: Tensor,
    weight: Tensor,
    group_scales: Tensor,
    zeros: Tensor | None,
    bits: int,
    group: int,
    pairs: Tensor,
    tiles: Tensor,
    pairs_per_row: int,
    rows: int,
    bias: Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    inputs, (num_experts, outputs, width), groups = x.shape[1], weight.shape, -(-x.shape[1] // group)
    if width != packed_bytes(inputs, bits, group) or group_scales.shape != (num_experts, groups, outputs):
        raise ValueError(
            f"weight of {list(weight.shape)} with scales of {list(group_scales.shape)}: {inputs} inputs of {bits} bits "
            f"in groups of {group} have {packed_bytes(inputs, bits, group)} bytes and {groups} scales for each output"
        )
    if len(x) != len(pairs) // pairs_per_row:
        raise ValueError(f"x of {list(x.shape)}: {len(pairs)} pairs, {pairs_per_row} per row, need other rows")
    y = torch.empty((len(pairs), outputs), dtype=x.dtype, device=x.device)
    # Fewer outputs would use another matrix instruction, and sums of tiles of different sizes might then differ.
    default = {"columns": 64, "warps": 4 if rows <= 64 else 8, "stages": 4 if x.dtype.itemsize == 2 else 2}
    sizes = {"rows": rows, "outputs": outputs, "inputs": inputs, "bits": bits}
    tuned = settings("integer_expert_matmul", default, x.device, **sizes)
    launch(
        integer_expert_matmul_kernel,
        (-(-outputs // tuned["columns"]), len(tiles)),
        x,
        weight,
        group_scales,
        weight if zeros is None else zeros,
        pairs,
        tiles,
        y if bias is None else bias,
        y if scales is None else scales,
        y,
        row_stride(x, "x"),
        PAIRS_PER_ROW=pairs_per_row,
        OUTPUTS=outputs,
        INPUTS=inputs,
        WIDTH=width,
        GROUP=group,
        GROUPS=groups,
        BITS=bits,
        ZEROS=zeros is not None,
        HALF=half_of(group),
        ROWS=rows,
        COLUMNS=tuned["columns"],
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
    bits: int = 4,
    group: int = 32,
    zeros: bool = False,
    rows: int | None = None,
    down: bool = False,
    biased: bool = False,
    scaled: bool = False,
) -> Args:
    """down: a row of x for each pair. rows: of a tile (default: as served)."""
    pairs, tiles, rows = drawn_schedule(make, tokens, num_experts, top_k, rows)
    x = make.normal(tokens * (top_k if down else 1), inputs)
    width, groups = packed_bytes(inputs, bits, group), -(-inputs // group)
    weight = make.integers(0, 256, num_experts, outputs, width, dtype=torch.uint8)
    points = make.integers(0, 17, num_experts, groups, outputs, dtype=torch.uint8) if zeros else None
    group_scales = make.normal(num_experts, groups, outputs, dtype=torch.float32).exp()
    group_scales = group_scales.mul_(inputs**-0.5 / (1 << bits - 1)).to(torch.float16)
    bias = make.normal(num_experts, outputs) if biased else None
    scales = make.normal(tokens * top_k, dtype=torch.float32) if scaled else None
    return x, weight, group_scales, points, bits, group, pairs, tiles, 1 if down else top_k, rows, bias, scales


def _single_row(args: Args, row: int) -> tuple[Args, Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]]:
    """A row with its own pairs, in tiles for a step of one token."""
    x, *matrix, pairs, tiles, pairs_per_row, rows, bias, scales = args
    assert EXPERT_MATMUL.single_row is not None
    plain = (x, matrix[0], pairs, tiles, pairs_per_row, rows, bias, scales)
    own, select = EXPERT_MATMUL.single_row(plain, row)
    return (own[0], *matrix, *own[2:]), select


def _traffic(x: Tensor, weight: Tensor, group_scales: Tensor, zeros: Tensor | None, *more: Any) -> int:
    _, _, pairs, tiles, _, _, bias, scales = (*more, *(None,) * (8 - len(more)))
    results = len(pairs) * weight.shape[1] * x.element_size()
    return nbytes(x, pairs, tiles, scales) + results + read_bytes(pairs, tiles, weight, group_scales, zeros, bias)


SMALL = {"inputs": 70, "outputs": 37}
QWEN = {"num_experts": 128, "top_k": 8, "group": 128}
INTEGER_EXPERT_MATMUL = Op(
    name="integer_expert_matmul",
    reference=_reference,
    triton=_triton,
    inputs=_inputs,
    cases=(
        Case("one", {"tokens": 1, "num_experts": 8, "top_k": 2, "inputs": 64, "outputs": 64}),
        Case("odd", {"tokens": 7, "num_experts": 5, "top_k": 3, "zeros": True, **SMALL}),
        Case("odd-down", {"tokens": 7, "num_experts": 5, "top_k": 3, "down": True, "bits": 8, **SMALL}),
        Case("wide-tiles", {"tokens": 70, "num_experts": 3, "top_k": 2, "rows": 64, "inputs": 96, "outputs": 24}),
        Case("bytes", {"tokens": 5, "num_experts": 3, "top_k": 3, "inputs": 128, "outputs": 70, "bits": 8}),
        Case("large-groups", {"tokens": 4, "num_experts": 3, "top_k": 1, "inputs": 192, "outputs": 20, "group": 64}),
        Case("scaled", {"tokens": 9, "num_experts": 6, "top_k": 3, "biased": True, "scaled": True, **SMALL}),
        Case("empty", {"tokens": 0, "num_experts": 4, "top_k": 2, **SMALL}),
        *(
            Case(
                f"qwen3-30b-{name}-{bits}-{tokens}",
                {"tokens": tokens, "inputs": inputs, "outputs": outputs, "down": name == "down", "bits": bits, **QWEN},
                bench=True,
            )
            for name, inputs, outputs in (("up", 2048, 1536), ("down", 768, 2048))
            for bits in (4, 8)
            for tokens in (1, 32, 256, 4096)
        ),
    ),
    tolerance={torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2},
    traffic=_traffic,
    flops=lambda x, weight, *more: 2 * len(more[4]) * weight.shape[1] * x.shape[1],
    rows=lambda args: args[0].shape[0],
    single_row=_single_row,
    strided=(0,),
    tunable={"columns": (64, 128), "warps": (4, 8), "stages": (2, 3, 4, 5)},
    nearest=("outputs", "inputs"),
)
