"""Scale and soft-cap logits: y = a · x, then c · tanh(y / c) if there is a cap c (Gemma 2, arXiv:2408.00118).

tanh(z) is 1 - 2 / (exp(2z) + 1), and near 0, where that cancels, z - z³/3 + 2z⁵/15 - 17z⁷/315 + 62z⁹/2835.
"""

import torch
from torch import Tensor

from kernels.cpu import logit_processors
from kernels.jit import jit, launch, row_stride, tl
from kernels.op import Args, Case, Make, Op, independent_rows


def _reference(x: Tensor, scale: float, cap: float) -> Tensor:
    """x: [rows, vocab]; cap 0: none → fp32, the same tensor changed in place if x is fp32."""
    y = x.float().mul_(scale)
    return y if cap == 0.0 else y.div_(cap).tanh_().mul_(cap)


@jit
def cap_logits_kernel(x, y, x_row, y_row, scale, cap, VOCAB: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr):
    """One program for each block of a row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + row * x_row + at, at < VOCAB, 0.0).to(tl.float32) * scale
    if CAPPED:
        z = value / cap
        whole = 1.0 - 2.0 / (tl.exp(2.0 * z) + 1.0)
        square = z * z
        series = -0.3333333333 + square * (0.1333333333 + square * (-0.05396825397 + square * 0.02186948854))
        near = z * (1.0 + square * series)
        value = cap * tl.where(tl.abs(z) < 0.3, near, whole)
    tl.store(y + row * y_row + at, value, at < VOCAB)


def _triton(x: Tensor, scale: float, cap: float) -> Tensor:
    y = x if x.dtype == torch.float32 else torch.empty(x.shape, dtype=torch.float32, device=x.device)
    rows, vocab = x.shape
    block = 2048
    launch(
        cap_logits_kernel,
        (rows, -(-vocab // block)),
        x,
        y,
        row_stride(x, "x"),
        row_stride(y, "y"),
        scale,
        cap if cap else 1.0,
        VOCAB=vocab,
        CAPPED=cap != 0.0,
        BLOCK=block,
    )
    return y


def _inputs(make: Make, rows: int, vocab: int, scale: float, cap: float) -> Args:
    return make.normal(rows, vocab, scale=20.0), scale, cap


CAP_LOGITS = Op(
    name="cap_logits",
    reference=_reference,
    triton=_triton,
    inputs=_inputs,
    cases=(
        Case("cap", {"rows": 3, "vocab": 97, "scale": 1.0, "cap": 30.0}),
        Case("both", {"rows": 2, "vocab": 2050, "scale": 0.0625, "cap": 5.0}),
        Case("scale", {"rows": 2, "vocab": 33, "scale": 0.25, "cap": 0.0}),
        Case("empty", {"rows": 0, "vocab": 32, "scale": 1.0, "cap": 30.0}),
        Case("256x256000", {"rows": 256, "vocab": 256000, "scale": 1.0, "cap": 30.0}, bench=True),
        Case("scale-256x256000", {"rows": 256, "vocab": 256000, "scale": 0.0625, "cap": 0.0}, bench=True),
    ),
    tolerance={torch.float32: 1e-6, torch.float16: 1e-6, torch.bfloat16: 1e-6},
    compiled=logit_processors.cap_logits,
    cpu_cases=(Case("8x151936", {"rows": 8, "vocab": 151936, "scale": 1.0, "cap": 30.0}),),
    traffic=lambda x, scale, cap: x.nbytes + 4 * x.numel(),
    single_row=independent_rows(0),
    strided=(0,),
)
