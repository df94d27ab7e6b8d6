"""Sum over the ranks, residual add and root mean square norm in one launch (one-shot all-reduce).

    r ← r + a · Σ x over the ranks, in rank order;  y = r / sqrt(mean(r²) + eps) · w

Every rank reads the rows of all ranks from their memory, which is mapped into its address space (symmetric memory),
and computes the same numbers. The sum is taken in fp32 and rounded to x's type, so the result is that of a sum in rank
order and kernels/rms_norm.py. Ranks must wait for each other before the launch, and before x is written again.
"""

import torch
from torch import Tensor

from kernels.jit import jit, launch, power_of_2, row_stride, row_warps, tl
from kernels.op import Args, Case, Make, Op, nbytes
from kernels.rms_norm import RMS_NORM


def _reference(
    x: Tensor, addresses: Tensor, weight: Tensor, eps: float, residual: Tensor, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """x: [ranks, rows, size], of which a launch reads the type alone; addresses: [ranks] int64, of the contiguous rows
    of each rank; weight: [size] fp32; residual: [rows, size] → y [rows, size] and the residual, changed in place."""
    total = x[0].float()
    for share in x[1:]:
        total = total + share.float()
    y, residual = RMS_NORM.reference(total.to(x.dtype), weight, eps, residual, scale)
    return y, residual


@jit
def reduce_norm_kernel(
    x,
    addresses,
    residual,
    weight,
    y,
    residual_row,
    eps,
    scale,
    RANKS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for each row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    keep = at < SIZE
    total = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(RANKS):
        theirs = tl.load(addresses + rank).to(tl.pointer_type(x.dtype.element_ty))
        total += tl.load(theirs + row * SIZE + at, keep, 0.0).to(tl.float32)
    total = total.to(x.dtype.element_ty).to(tl.float32)
    place = residual + row * residual_row + at
    rounded = (tl.load(place, keep, 0.0).to(tl.float32) + scale * total).to(residual.dtype.element_ty)
    tl.store(place, rounded, keep)
    value = rounded.to(tl.float32)
    factor = tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
    normed = value * factor * tl.load(weight + at, keep, 0.0)
    tl.store(y + row * SIZE + at, normed.to(y.dtype.element_ty), keep)


def _triton(
    x: Tensor, addresses: Tensor, weight: Tensor, eps: float, residual: Tensor, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    (rows, size), ranks = residual.shape, len(addresses)
    y = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    block = power_of_2(size)
    launch(
        reduce_norm_kernel,
        (rows,),
        x,
        addresses,
        residual,
        weight,
        y,
        row_stride(residual, "residual"),
        eps,
        scale,
        RANKS=ranks,
        SIZE=size,
        BLOCK=block,
        warps=row_warps(block),
    )
    return y, residual


def _inputs(make: Make, ranks: int, rows: int, size: int, scale: float = 1.0) -> Args:
    x = make.normal(ranks, rows, size)
    own = 0 if make.meta else x.data_ptr()
    addresses = make.tensor([own + rank * rows * size * x.element_size() for rank in range(ranks)], torch.int64)
    return x, addresses, make.normal(size, dtype=torch.float32), 1e-6, make.normal(rows, size), scale


REDUCE_NORM = Op(
    name="reduce_norm",
    reference=_reference,
    triton=_triton,
    inputs=_inputs,
    cases=(
        Case("one", {"ranks": 2, "rows": 1, "size": 64}),
        Case("odd", {"ranks": 3, "rows": 5, "size": 123, "scale": 0.25}),
        Case("empty", {"ranks": 2, "rows": 0, "size": 32}),
        Case("8-ranks-32x4096", {"ranks": 8, "rows": 32, "size": 4096}, bench=True),
        Case("8-ranks-256x8192", {"ranks": 8, "rows": 256, "size": 8192}, bench=True),
    ),
    tolerance={torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2},
    traffic=lambda x, addresses, weight, eps, residual, scale=1.0: x.nbytes + 3 * residual.nbytes + nbytes(weight),
    rows=lambda args: args[4].shape[0],
)
