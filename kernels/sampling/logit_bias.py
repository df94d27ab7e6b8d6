"""Add a number to some logits: logits[row, token] += value, each pair at most once."""

import torch
from torch import Tensor

from kernels.cpu import logit_processors
from kernels.jit import jit, launch, row_stride, tl
from kernels.op import Args, Case, Make, Op, nbytes


def _reference(logits: Tensor, rows: Tensor, tokens: Tensor, values: Tensor) -> Tensor:
    """logits: [rows, vocab] fp32; rows, tokens: [n] int32, different pairs; values: [n] fp32 → logits, changed in
    place."""
    logits[rows.long(), tokens.long()] += values
    return logits


@jit(varying=("count",))
def logit_bias_kernel(logits, rows, tokens, values, count, logits_row, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """One program for each block of entries."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = at < count
    row, token = tl.load(rows + at, keep, 0).to(tl.int64), tl.load(tokens + at, keep, 0)
    keep = keep & (token < VOCAB)
    place = logits + row * logits_row + token
    tl.store(place, tl.load(place, keep, 0.0) + tl.load(values + at, keep, 0.0), keep)


def _triton(logits: Tensor, rows: Tensor, tokens: Tensor, values: Tensor) -> Tensor:
    count, block = rows.shape[0], 256
    launch(
        logit_bias_kernel,
        (-(-count // block),),
        *(logits, rows, tokens, values, count, row_stride(logits, "logits")),
        VOCAB=logits.shape[1],
        BLOCK=block,
    )
    return logits


def _inputs(make: Make, rows: int, each: int, vocab: int) -> Args:
    """`each` different tokens of each row."""
    token = torch.arange(each, device=make.device) * (vocab // max(1, each))
    return (
        make.normal(rows, vocab, dtype=torch.float32),
        torch.arange(rows, device=make.device).repeat_interleave(each).int(),
        token.repeat(rows).int(),
        make.normal(rows * each, dtype=torch.float32, scale=50.0),
    )


LOGIT_BIAS = Op(
    name="logit_bias",
    reference=_reference,
    triton=_triton,
    inputs=_inputs,
    cases=(
        Case("few", {"rows": 3, "each": 2, "vocab": 97}),
        Case("many", {"rows": 3, "each": 100, "vocab": 300}),
        Case("nobody", {"rows": 3, "each": 0, "vocab": 64}),
        Case("empty", {"rows": 0, "each": 0, "vocab": 32}),
        Case("64x300", {"rows": 64, "each": 300, "vocab": 151936}, bench=True),
    ),
    tolerance={torch.float32: 0.0, torch.bfloat16: 0.0},
    compiled=logit_processors.logit_bias,
    cpu_cases=(Case("8x300", {"rows": 8, "each": 300, "vocab": 151936}),),
    traffic=lambda logits, rows, tokens, values: nbytes(rows, tokens, values) + 2 * nbytes(values),
    strided=(0,),
)
