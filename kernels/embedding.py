"""Rows of the embedding matrix, in the requested type, times a factor (Gemma √hidden, Granite its multiplier), plus the
learned rows of the tokens' positions and segments (BERT): added in fp32 and rounded once.
"""

import torch
from torch import Tensor

from kernels.cpu import bodies
from kernels.jit import jit, launch, power_of_2, tl
from kernels.op import Args, Case, Make, Op, independent_rows, nbytes


def embedding(ids: Tensor, table: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """ids: [tokens] integers; table: [vocab, hidden], of any floating type → [tokens, hidden] of `dtype`."""
    return scaled(table.index_select(0, ids).to(dtype), scale)


def scaled(rows: Tensor, scale: float) -> Tensor:
    """Return rows · scale. The factor is rounded to the type of the rows first, as the models were trained. It stays on
    the host, because a step that is captured as a graph cannot copy it to the device."""
    return rows if scale == 1.0 else rows * torch.tensor(scale, dtype=rows.dtype)


def _reference(
    ids: Tensor,
    table: Tensor,
    dtype: torch.dtype,
    scale: float = 1.0,
    positions: Tensor | None = None,
    position_rows: Tensor | None = None,
    segments: Tensor | None = None,
    segment_rows: Tensor | None = None,
) -> Tensor:
    """ids, positions, segments: [tokens] int32; table, position_rows, segment_rows: [rows, hidden], of any floating
    type; without rows of positions or segments their numbers do not count → [tokens, hidden] of `dtype`."""
    y = embedding(ids, table, dtype, scale)
    for numbers, rows in ((positions, position_rows), (segments, segment_rows)):
        if rows is not None:
            y = y.float() + rows.index_select(0, numbers).float()
    return y.to(dtype)


@jit
def embedding_kernel(
    ids,
    table,
    positions,
    position_rows,
    segments,
    segment_rows,
    y,
    scale,
    HIDDEN: tl.constexpr,
    SCALED: tl.constexpr,
    POSITIONS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for each block of a row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = at < HIDDEN
    value = tl.load(table + tl.load(ids + row).to(tl.int64) * HIDDEN + at, keep, 0.0)
    if SCALED:
        value = (value.to(y.dtype.element_ty).to(tl.float32) * scale).to(y.dtype.element_ty)
    if POSITIONS:
        place = position_rows + tl.load(positions + row).to(tl.int64) * HIDDEN + at
        value = value.to(tl.float32) + tl.load(place, keep, 0.0).to(tl.float32)
    if SEGMENTS:
        place = segment_rows + tl.load(segments + row).to(tl.int64) * HIDDEN + at
        value = value.to(tl.float32) + tl.load(place, keep, 0.0).to(tl.float32)
    tl.store(y + row * HIDDEN + at, value.to(y.dtype.element_ty), keep)


def _triton(
    ids: Tensor,
    table: Tensor,
    dtype: torch.dtype,
    scale: float = 1.0,
    positions: Tensor | None = None,
    position_rows: Tensor | None = None,
    segments: Tensor | None = None,
    segment_rows: Tensor | None = None,
) -> Tensor:
    hidden = table.shape[1]
    for name, numbers, rows in (("positions", positions, position_rows), ("segments", segments, segment_rows)):
        if rows is not None and numbers is None:
            raise ValueError(f"{name}: required together with {name[:-1]}_rows")
    y = torch.empty((ids.shape[0], hidden), dtype=dtype, device=table.device)
    block = min(1024, power_of_2(hidden))
    launch(
        embedding_kernel,
        (ids.shape[0], -(-hidden // block)),
        ids,
        table,
        ids if positions is None else positions,
        table if position_rows is None else position_rows,
        ids if segments is None else segments,
        table if segment_rows is None else segment_rows,
        y,
        float(torch.tensor(scale, dtype=dtype)),
        HIDDEN=hidden,
        SCALED=scale != 1.0,
        POSITIONS=position_rows is not None,
        SEGMENTS=segment_rows is not None,
        BLOCK=block,
        warps=4 if block >= 512 else 1,
    )
    return y


def _inputs(
    make: Make, rows: int, vocab: int, hidden: int, scale: float = 1.0, positions: int = 0, segments: int = 0
) -> Args:
    plain = make.integers(0, vocab, rows), make.normal(vocab, hidden), make.dtype, scale
    if not positions and not segments:
        return plain
    pairs = ((make.integers(0, n, rows), make.normal(n, hidden)) if n else (None, None) for n in (positions, segments))
    return (*plain, *(value for pair in pairs for value in pair))


def _traffic(ids: Tensor, table: Tensor, dtype: torch.dtype, scale: float = 1.0, *added: Tensor | None) -> int:
    """A token reads a row of each table and writes one; rows of positions and segments stay in the cache."""
    rows = ids.shape[0] * table.shape[1] * (table.element_size() + dtype.itemsize)
    return nbytes(ids, *added[::2]) + rows + sum(min(nbytes(x), rows) for x in added[1::2])


def _peer(ids: Tensor, table: Tensor, dtype: torch.dtype, scale: float = 1.0, *added: Tensor | None) -> Tensor:
    if added:
        raise ValueError("torch supports only one table")
    return torch.nn.functional.embedding(ids, table)


EMBEDDING = Op(
    name="embedding",
    reference=_reference,
    triton=_triton,
    inputs=_inputs,
    cases=(
        Case("odd", {"rows": 5, "vocab": 11, "hidden": 37}),
        Case("scaled", {"rows": 3, "vocab": 7, "hidden": 64, "scale": 8.4}),
        Case("positions", {"rows": 5, "vocab": 7, "hidden": 40, "positions": 9}),
        Case("segments", {"rows": 4, "vocab": 7, "hidden": 48, "segments": 2}),
        Case("all", {"rows": 6, "vocab": 7, "hidden": 77, "scale": 0.3, "positions": 5, "segments": 3}),
        Case("empty", {"rows": 0, "vocab": 7, "hidden": 16}),
        Case("decode-256x4096", {"rows": 256, "vocab": 128256, "hidden": 4096}, bench=True),
        Case("8192x4096", {"rows": 8192, "vocab": 128256, "hidden": 4096}, bench=True),
        Case("scaled-8192x4096", {"rows": 8192, "vocab": 128256, "hidden": 4096, "scale": 64.0}, bench=True),
        Case(
            "bert-8192x1024",
            {"rows": 8192, "vocab": 30522, "hidden": 1024, "positions": 512, "segments": 2},
            bench=True,
        ),
    ),
    tolerance={torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2},
    traffic=_traffic,
    compiled=bodies.embedding,
    compiled_lacks=("positions", "segments", "all"),
    cpu_cases=(
        Case("8x1024", {"rows": 8, "vocab": 32768, "hidden": 1024}),
        Case("512x1024", {"rows": 512, "vocab": 32768, "hidden": 1024}),
    ),
    single_row=independent_rows(0, 4, 6),
    peer=_peer,
)
