"""Products of routed rows by the matrices of their experts in blocks of ggml. Like kernels/experts/matmul.py, with
weights as in kernels/block_matmul.py.

Each plane has the experts of a layer one after another. Only matrices of experts that have a tile are read, in their
own bits, once for each tile.
"""

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from kernels.block_sum import block_sum, kind_constants, stages_for
from kernels.experts.integer_matmul import QWEN
from kernels.experts.matmul import EXPERT_MATMUL, read_bytes, store_pairs
from kernels.experts.schedule import drawn_schedule
from kernels.jit import jit, launch, row_stride, tl
from kernels.op import Args, Case, Make, Op, nbytes
from kernels.plane_layout import PLANES, num_groups, num_units
from kernels.planes import Planes, check_planes, drawn_planes, restored
from kernels.tuning import settings


def _reference(
    x: Tensor,
    low: Tensor,
    high: Tensor | None,
    group_scales: Tensor,
    units: Tensor | None,
    kind: str,
    pairs: Tensor,
    tiles: Tensor,
    pairs_per_row: int,
    rows: int,
    bias: Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """x: [tokens or pairs, inputs]; planes: as in kernels/planes.py, of each expert; the other arguments and the result
    as in expert_matmul."""
    planes = Planes(low, high, group_scales, units)
    each = (planes.changed(itemgetter(expert)) for expert in range(len(low)))
    whole = torch.stack([restored(one, kind, x.shape[1]) for one in each]).to(x.dtype).float()
    float_bias = None if bias is None else bias.float()
    y = EXPERT_MATMUL.reference(x.float(), whole, pairs, tiles, pairs_per_row, rows, float_bias, scales)
    return y.to(x.dtype)


@jit
def block_expert_matmul_kernel(
    x,
    low,
    high,
    group_scales,
    units,
    pairs,
    tiles,
    bias,
    scales,
    y,
    x_row,
    PAIRS_PER_ROW: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    LOW_BYTES: tl.constexpr,
    HIGH_BYTES: tl.constexpr,
    SCALES: tl.constexpr,
    NUM_UNITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BIAS: tl.constexpr,
    SCALED: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    MIDDLE: tl.constexpr,
    TABLE: tl.constexpr,
    GROUP: tl.constexpr,
    TERMS: tl.constexpr,
    NIBBLES: tl.constexpr,
    POWER: tl.constexpr,
    UNITS: tl.constexpr,
):
    """One program for each COLUMNS outputs of a tile of ROWS pairs. SCALES, NUM_UNITS: those of an output."""
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
    matrix_row = (expert * OUTPUTS + output)[:, None]
    total = block_sum(
        low + matrix_row * LOW_BYTES,
        high + matrix_row * HIGH_BYTES,
        x + (pair // PAIRS_PER_ROW).to(tl.int64)[None, :] * x_row,
        group_scales + expert * (SCALES * OUTPUTS),
        units + expert * (NUM_UNITS * OUTPUTS),
        output,
        keep,
        real[None, :],
        x.dtype.element_ty,
        OUTPUTS,
        INPUTS,
        LOW,
        HIGH,
        MIDDLE,
        TABLE,
        GROUP,
        TERMS,
        NIBBLES,
        POWER,
        UNITS,
        COLUMNS,
        ROWS,
    )
    store_pairs(total, y, bias, scales, expert, pair, real, output, keep, OUTPUTS, BIAS, SCALED)


def _triton(
    x: Tensor,
    low: Tensor,
    high: Tensor | None,
    group_scales: Tensor,
    units: Tensor | None,
    kind: str,
    pairs: Tensor,
    tiles: Tensor,
    pairs_per_row: int,
    rows: int,
    bias: Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    inputs, outputs, layout = x.shape[1], low.shape[1], PLANES[kind]
    check_planes(Planes(low, high, group_scales, units), kind, outputs, inputs)
    if len(x) != len(pairs) // pairs_per_row:
        raise ValueError(f"x of {list(x.shape)}: {len(pairs)} pairs, {pairs_per_row} per row, need other rows")
    y = torch.empty((len(pairs), outputs), dtype=x.dtype, device=x.device)
    # Fewer outputs would use another matrix instruction, and sums of tiles of different sizes might then differ.
    default = {"columns": 64, "warps": 4 if rows <= 64 else 8, "stages": stages_for(x)}
    sizes = {"rows": rows, "outputs": outputs, "inputs": inputs, "bits": layout.low + layout.high}
    tuned = settings("block_expert_matmul", default, x.device, **sizes)
    launch(
        block_expert_matmul_kernel,
        (-(-outputs // tuned["columns"]), len(tiles)),
        x,
        low,
        low if high is None else high,
        group_scales,
        group_scales if units is None else units,
        pairs,
        tiles,
        y if bias is None else bias,
        y if scales is None else scales,
        y,
        row_stride(x, "x"),
        PAIRS_PER_ROW=pairs_per_row,
        OUTPUTS=outputs,
        INPUTS=inputs,
        LOW_BYTES=low.shape[2],
        HIGH_BYTES=0 if high is None else high.shape[2],
        SCALES=num_groups(kind, inputs) * layout.terms,
        NUM_UNITS=num_units(kind, inputs) * layout.units,
        ROWS=rows,
        COLUMNS=tuned["columns"],
        BIAS=bias is not None,
        SCALED=scales is not None,
        **kind_constants(kind),
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
    kind: str = "Q4_K",
    rows: int | None = None,
    down: bool = False,
    biased: bool = False,
    scaled: bool = False,
) -> Args:
    """down: a row of x for each pair. rows: of a tile (default: as served)."""
    pairs, tiles, rows = drawn_schedule(make, tokens, num_experts, top_k, rows)
    x = make.normal(tokens * (top_k if down else 1), inputs)
    planes = drawn_planes(make, kind, outputs, inputs, (num_experts,))
    bias = make.normal(num_experts, outputs) if biased else None
    scales = make.normal(tokens * top_k, dtype=torch.float32) if scaled else None
    return x, *planes, kind, pairs, tiles, 1 if down else top_k, rows, bias, scales


def _single_row(args: Args, row: int) -> tuple[Args, Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]]:
    """A row with its own pairs, in tiles for a step of one token."""
    x, *matrix, pairs, tiles, pairs_per_row, rows, bias, scales = args
    assert EXPERT_MATMUL.single_row is not None
    own, select = EXPERT_MATMUL.single_row((x, matrix[0], pairs, tiles, pairs_per_row, rows, bias, scales), row)
    return (own[0], *matrix, *own[2:]), select


def _traffic(
    x: Tensor, low: Tensor, high: Tensor | None, group_scales: Tensor, units: Tensor | None, *more: Any
) -> int:
    _, pairs, tiles, _, _, bias, scales = (*more, *(None,) * (7 - len(more)))
    results = len(pairs) * low.shape[1] * x.element_size()
    read = read_bytes(pairs, tiles, low, high, group_scales, units, bias)
    return nbytes(x, pairs, tiles, scales) + results + read


SMALL = {"inputs": 256, "outputs": 37}
SIZES = {name: value for name, value in QWEN.items() if name != "group"}
BLOCK_EXPERT_MATMUL = Op(
    name="block_expert_matmul",
    reference=_reference,
    triton=_triton,
    inputs=_inputs,
    cases=(
        Case("one", {"tokens": 1, "num_experts": 8, "top_k": 2, "inputs": 256, "outputs": 64}),
        Case("odd", {"tokens": 7, "num_experts": 5, "top_k": 3, "kind": "Q6_K", **SMALL}),
        Case("odd-down", {"tokens": 7, "num_experts": 5, "top_k": 3, "down": True, "kind": "Q5_K", **SMALL}),
        Case(
            "wide-tiles",
            {"tokens": 70, "num_experts": 3, "top_k": 2, "rows": 64, "inputs": 96, "outputs": 24, "kind": "MXFP4"},
        ),
        Case("scaled", {"tokens": 9, "num_experts": 6, "top_k": 3, "biased": True, "scaled": True, **SMALL}),
        Case("nvfp4", {"tokens": 3, "num_experts": 4, "top_k": 2, "kind": "NVFP4", **SMALL}),
        Case("empty", {"tokens": 0, "num_experts": 4, "top_k": 2, **SMALL}),
        *(
            Case(
                f"qwen3-30b-{name}-{kind}-{tokens}",
                {"tokens": tokens, "inputs": inputs, "outputs": outputs, "down": name == "down", "kind": kind, **SIZES},
                bench=True,
            )
            for name, inputs, outputs, kind in (("up", 2048, 1536, "Q4_K"), ("down", 768, 2048, "Q6_K"))
            for tokens in (1, 32, 256, 4096)
        ),
        *(
            Case(
                f"gpt-oss-20b-up-MXFP4-{tokens}",
                {"tokens": tokens, "num_experts": 32, "top_k": 4, "inputs": 2880, "outputs": 5760, "kind": "MXFP4"},
                bench=True,
            )
            for tokens in (1, 32, 256, 4096)
        ),
    ),
    tolerance={torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2},
    traffic=_traffic,
    flops=lambda x, low, *more: 2 * len(more[4]) * low.shape[1] * x.shape[1],
    rows=lambda args: args[0].shape[0],
    single_row=_single_row,
    strided=(0,),
    tunable={"columns": (64, 128), "warps": (4, 8), "stages": (2, 3, 4)},
    nearest=("outputs", "inputs"),
)
