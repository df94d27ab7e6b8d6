"""Second product of LoRA adapters, added in place to the product of a projection: y[p] += (Σ parts of u[p]) B[group].

Groups, pairs and tiles are those of lora_shrink.py; rows that are in no tile do not change. A fused projection has
several sources, such as q, k and v, each with RANK columns of u. `spans` divides the outputs into runs of one source;
outputs outside of all spans do not change. A group uses the first `ranks` columns of a source: the matrices beyond may
belong to an adapter that has left the slot.

Sums are in fp32, with one rounding of u to the type of B for the matrix instruction and one of y.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.jit import jit, launch, power_of_2, row_stride, tl
from kernels.lora_shrink import drawn_schedule, num_parts, single_schedule
from kernels.op import Args, Case, Make, Op, nbytes
from kernels.tuning import has_tensor_memory, settings

BLOCK = 128  # outputs of a program, at most
STEP = 64  # columns of u at a time, at most

Span = tuple[int, int, int]  # first output, end, source


def spans_of(pieces: Sequence[tuple[int, int, int]]) -> list[Span]:
    """Divide runs of outputs for the programs. pieces: (first output, number of outputs, source)."""
    return [
        (first, min(first + BLOCK, at + count), source)
        for at, count, source in pieces
        for first in range(at, at + count, BLOCK)
    ]


def _reference(
    u: Tensor, b: Tensor, ranks: Tensor, spans: Tensor, pairs: Tensor, tiles: Tensor, rows: int, y: Tensor
) -> Tensor:
    """u: [parts, pairs, columns] fp32; b: [groups, rank, outputs], contiguous; ranks: [groups, sources] int32, columns
    in use; spans: [spans, 3] int32, from `spans_of`; pairs, tiles: from expert_schedule with tiles of `rows` pairs;
    y: [pairs, outputs] of b's type, changed in place → y."""
    rank = b.shape[1]
    low = u.sum(0)
    for group, first, end in tiles.tolist():
        own = pairs[first:end].long()
        for at, stop, source in spans.tolist():
            used = int(ranks[group, source])
            left = low[own, source * rank : source * rank + used].to(b.dtype).float()
            y[own, at:stop] = (y[own, at:stop].float() + left @ b[group, :used, at:stop].float()).to(y.dtype)
    return y


@jit(varying=("count",))
def lora_expand_kernel(
    u,
    b,
    ranks,
    spans,
    pairs,
    tiles,
    y,
    y_row,
    count,
    PARTS: tl.constexpr,
    SOURCES: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANK: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    """One program for each span of a tile of ROWS pairs."""
    entry = tiles + tl.program_id(1) * 3
    first = tl.load(entry + 1)
    end = tl.load(entry + 2)
    group = tl.load(entry).to(tl.int64)
    if first >= end:
        return
    span = spans + tl.program_id(0) * 3
    source = tl.load(span + 2)
    rank = tl.load(ranks + group * SOURCES + source)
    if rank == 0:
        return
    place = first + tl.arange(0, ROWS)
    real = place < end
    pair = tl.load(pairs + place, real, 0).to(tl.int64)
    output = tl.load(span) + tl.arange(0, BLOCK)
    keep = output < tl.load(span + 1)
    at = tl.arange(0, STEP)
    left = b + (group * RANK + at)[None, :] * OUTPUTS + output[:, None]
    right = u + pair[None, :] * COLUMNS + (source * RANK + at)[:, None]
    part = tl.cast(count, tl.int64) * COLUMNS
    total = tl.zeros((BLOCK, ROWS), tl.float32)
    for k in range(0, RANK, STEP):
        used = at < rank - k
        low = tl.zeros((STEP, ROWS), tl.float32)
        for number in range(PARTS):
            low += tl.load(right + number * part + k, used[:, None] & real[None, :], 0.0)
        matrix = tl.load(left + k * OUTPUTS, keep[:, None] & used[None, :], 0.0)
        total = tl.dot(matrix, low.to(matrix.dtype), total, input_precision="ieee")
    out = y + pair[:, None] * y_row + output[None, :]
    kept = real[:, None] & keep[None, :]
    total_rows = tl.trans(total) + tl.load(out, kept, 0.0).to(tl.float32)
    tl.store(out, total_rows.to(y.dtype.element_ty), kept)


def _triton(
    u: Tensor, b: Tensor, ranks: Tensor, spans: Tensor, pairs: Tensor, tiles: Tensor, rows: int, y: Tensor
) -> Tensor:
    _, rank, outputs = b.shape
    for tensor, name in ((u, "u"), (b, "b"), (ranks, "ranks"), (spans, "spans")):
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: must be contiguous; call .contiguous()")
    if y.shape != (len(pairs), outputs):
        raise ValueError(f"y of {list(y.shape)}: {len(pairs)} pairs need rows of {outputs} outputs")
    # Sums are copied from tensor memory to registers, of which 4 warps have too few.
    warps = 8 if rows >= 32 and has_tensor_memory(y.device) else 4
    tuned = settings("lora_expand", {"warps": warps, "stages": 2}, y.device, rows=rows, outputs=outputs, rank=rank)
    launch(
        lora_expand_kernel,
        (len(spans), len(tiles)),
        u,
        b,
        ranks,
        spans,
        pairs,
        tiles,
        y,
        row_stride(y, "y"),
        len(pairs),
        PARTS=len(u),
        SOURCES=ranks.shape[1],
        COLUMNS=u.shape[2],
        RANK=rank,
        OUTPUTS=outputs,
        ROWS=rows,
        BLOCK=BLOCK,
        STEP=max(16, min(STEP, power_of_2(rank))),
        warps=tuned["warps"],
        stages=tuned["stages"],
    )
    return y


def _inputs(
    make: Make,
    tokens: int,
    groups: int,
    rank: int,
    sizes: list[int],
    *,
    inputs: int = 32,
    top_k: int = 1,
    rows: int | None = None,
    beside: int = 0,
) -> Args:
    """sizes: outputs of each source. beside: number of outputs before and after them that adapters do not change."""
    pairs, tiles, rows = drawn_schedule(make, tokens, groups, top_k, rows, none=True)
    columns = -(-rank * len(sizes) // 16) * 16
    starts = [beside + sum(sizes[:at]) for at in range(len(sizes))]
    spans = spans_of([(at, size, source) for source, (at, size) in enumerate(zip(starts, sizes, strict=True))])
    outputs = sum(sizes) + 2 * beside
    return (
        make.normal(num_parts(inputs), len(pairs), columns, dtype=torch.float32),
        make.normal(groups, rank, outputs, scale=rank**-0.5),
        make.integers(0, rank + 1, groups, len(sizes)),
        make.tensor(spans),
        pairs,
        tiles,
        rows,
        make.normal(len(pairs), outputs),
    )


def _single_row(args: Args, row: int) -> tuple[Args, Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]]:
    u, b, ranks, spans, pairs, tiles, _, y = args
    *schedule, rows = single_schedule(pairs, tiles, len(b), range(row, row + 1))
    own = u[:, row : row + 1].contiguous()
    return (own, b, ranks, spans, *schedule, rows, y[row : row + 1]), lambda outputs: (outputs[0][row : row + 1],)


def _traffic(
    u: Tensor, b: Tensor, ranks: Tensor, spans: Tensor, pairs: Tensor, tiles: Tensor, rows: int, y: Tensor
) -> int:
    groups = len(b)
    used = groups * (1 - (1 - 1 / groups) ** len(pairs))
    return nbytes(u, ranks, spans, pairs, tiles) + round(b.nbytes / groups * used) + 2 * y.nbytes


def _served(name: str, tokens: int, **sizes: Any) -> Case:
    return Case(f"{name}-{tokens}", {"tokens": tokens, **sizes}, bench=True)


LORA_EXPAND = Op(
    name="lora_expand",
    reference=_reference,
    triton=_triton,
    inputs=_inputs,
    cases=(
        Case("one", {"tokens": 1, "groups": 1, "rank": 16, "sizes": [64]}),
        Case("odd", {"tokens": 7, "groups": 3, "rank": 5, "sizes": [70, 13, 20]}),
        Case("parts", {"tokens": 5, "groups": 2, "rank": 8, "sizes": [40], "inputs": 2500, "beside": 3}),
        Case("crowd", {"tokens": 50, "groups": 2, "rank": 16, "sizes": [130], "rows": 16}),
        Case("wide", {"tokens": 140, "groups": 2, "rank": 70, "sizes": [24, 40]}),
        Case("experts", {"tokens": 6, "groups": 12, "rank": 4, "sizes": [20, 20], "top_k": 3}),
        Case("empty", {"tokens": 0, "groups": 2, "rank": 16, "sizes": [32]}),
        *(
            _served("8-adapters-qkv", tokens, groups=8, rank=16, sizes=[4096, 1024, 1024], inputs=4096)
            for tokens in (1, 32, 256, 4096)
        ),
        _served("8-adapters-down", 32, groups=8, rank=16, sizes=[4096], inputs=14336),
        _served("8-adapters-rank-64", 32, groups=8, rank=64, sizes=[14336, 14336], inputs=4096),
        _served("128-experts", 32, groups=256, rank=16, sizes=[768, 768], inputs=2048, top_k=8),
    ),
    tolerance={torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2},
    traffic=_traffic,
    flops=lambda u, b, ranks, spans, pairs, *rest: 2 * len(pairs) * b.shape[1] * b.shape[2],
    single_row=_single_row,
    rows=lambda args: args[7].shape[0],
    tunable={"warps": (2, 4, 8), "stages": (2, 3, 4)},
    nearest=("outputs", "rank"),
)
