"""Rows of the embedding matrix, in the wanted type, times a factor (Gemma √hidden, Granite its multiplier)."""

import torch
from torch import Tensor

from kernels.cpu import bodies
from kernels.jit import jit, launch, power_of_2, tl
from kernels.op import Args, Case, Make, Op, sliced


def embedding(ids: Tensor, table: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """ids: [tokens] integers; table: [vocab, hidden], of any floating type → [tokens, hidden] of `dtype`."""
    rows = table.index_select(0, ids).to(dtype)
    # The factor is rounded to the type of the rows first, as the models were trained.
    return rows if scale == 1.0 else rows * torch.tensor(scale, dtype=dtype, device=rows.device)


@jit
def embedding_kernel(ids, table, y, scale, HIDDEN: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr):
    """One program for each block of a row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = at < HIDDEN
    value = tl.load(table + tl.load(ids + row).to(tl.int64) * HIDDEN + at, keep, 0.0)
    if SCALED:
        value = value.to(y.dtype.element_ty).to(tl.float32) * scale
    tl.store(y + row * HIDDEN + at, value.to(y.dtype.element_ty), keep)


def _triton(ids: Tensor, table: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    hidden = table.shape[1]
    y = torch.empty((ids.shape[0], hidden), dtype=dtype, device=table.device)
    block = min(1024, power_of_2(hidden))
    launch(
        embedding_kernel,
        (ids.shape[0], -(-hidden // block)),
        ids,
        table,
        y,
        float(torch.tensor(scale, dtype=dtype)),
        HIDDEN=hidden,
        SCALED=scale != 1.0,
        BLOCK=block,
        warps=4 if block >= 512 else 1,
    )
    return y


def _inputs(make: Make, rows: int, vocab: int, hidden: int, scale: float = 1.0) -> Args:
    return make.integers(0, vocab, rows), make.normal(vocab, hidden), make.dtype, scale


EMBEDDING = Op(
    name="embedding",
    reference=embedding,
    triton=_triton,
    inputs=_inputs,
    cases=(
        Case("odd", {"rows": 5, "vocab": 11, "hidden": 37}),
        Case("scaled", {"rows": 3, "vocab": 7, "hidden": 64, "scale": 8.4}),
        Case("empty", {"rows": 0, "vocab": 7, "hidden": 16}),
        Case("decode-256x4096", {"rows": 256, "vocab": 128256, "hidden": 4096}, bench=True),
        Case("8192x4096", {"rows": 8192, "vocab": 128256, "hidden": 4096}, bench=True),
        Case("scaled-8192x4096", {"rows": 8192, "vocab": 128256, "hidden": 4096, "scale": 64.0}, bench=True),
    ),
    tolerance={torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2},
    traffic=lambda ids, table, dtype, scale=1.0: (
        ids.nbytes + ids.shape[0] * table.shape[1] * (table.element_size() + dtype.itemsize)
    ),
    compiled=bodies.embedding,
    cpu_cases=(
        Case("8x1024", {"rows": 8, "vocab": 32768, "hidden": 1024}),
        Case("512x1024", {"rows": 512, "vocab": 32768, "hidden": 1024}),
    ),
    alone=sliced(0),
    peer=lambda ids, table, dtype, scale=1.0: torch.nn.functional.embedding(ids, table),
)
