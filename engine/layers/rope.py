"""Frequencies of a declared rope, with its scaling, and the angles of a step's tokens.

A pair i of `dim` dimensions turns by theta^(-2i/dim) a position, changed by the scaling (source of each formula:
transformers modeling_rope_utils.py, whose fp32 rounding is kept):

linear    all divided by a factor
dynamic   theta grows with the length L of the sequence: theta · (factor · L / original - factor + 1)^(dim / (dim - 2))
llama3    long wavelengths divided by a factor, short ones kept, a smooth passage between
yarn      the same idea over dimensions instead of wavelengths; cos and sin are multiplied (arXiv:2309.00071)
longrope  one divisor a frequency, of two lists: for lengths up to the original one, and past it (arXiv:2402.13753)

Two of them depend on L, so each token brings the length whose rotation it uses.
"""

import math

import torch
from torch import Tensor

from engine.models.parts import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    Rope,
    YarnScaling,
)
from kernels.rope import rope_angles


def angles(rope: Rope, positions: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin, [tokens, 1, dim]. lengths: [tokens] int64, at least position + 1."""
    attention = rope.scaling.attention if isinstance(rope.scaling, YarnScaling | LongScaling) else 1.0
    return rope_angles(positions, frequencies(rope, lengths), attention, rope.interleaved)


def frequencies(rope: Rope, lengths: Tensor) -> Tensor:
    """[dim / 2] fp32, or [tokens, dim / 2] where they depend on the sequence's length."""
    exponents = torch.arange(0, rope.dim, 2, device=lengths.device).float() / rope.dim
    plain = 1.0 / rope.theta**exponents
    match rope.scaling:
        case None:
            return plain
        case LinearScaling(factor=factor):
            return plain / factor
        case DynamicScaling(factor=factor, original=original):
            grown = factor * lengths.clamp(min=original).float() / original - (factor - 1)
            theta = rope.theta * grown ** (rope.dim / (rope.dim - 2))
            return 1.0 / theta.unsqueeze(1) ** exponents
        case Llama3Scaling():
            return _llama3(plain, rope.scaling)
        case YarnScaling():
            return _yarn(rope, exponents, rope.scaling)
        case LongScaling(short=short, long=long, original=original):
            divisors = torch.tensor([short, long], device=lengths.device)
            both = 1.0 / (divisors * rope.theta**exponents)
            return both[(lengths > original).long()]


def _llama3(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    wavelengths = 2 * math.pi / plain
    longest, shortest = scaling.original / scaling.low_freq, scaling.original / scaling.high_freq
    smooth = (scaling.original / wavelengths - scaling.low_freq) / (scaling.high_freq - scaling.low_freq)
    between = (1 - smooth) * plain / scaling.factor + smooth * plain
    changed = torch.where(wavelengths > longest, plain / scaling.factor, between)
    return torch.where(wavelengths < shortest, plain, changed)


def _yarn(rope: Rope, exponents: Tensor, scaling: YarnScaling) -> Tensor:
    """Dimensions that turn over beta_fast times within the trained length are kept, those under beta_slow divided."""

    def dimension(turns: float) -> float:
        return rope.dim * math.log(scaling.original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    span = high - low or 0.001  # equal bounds would divide by zero
    ramp = ((torch.arange(rope.dim // 2, device=exponents.device).float() - low) / span).clamp(0, 1)
    periods = rope.theta**exponents
    return ramp / (scaling.factor * periods) + (1 - ramp) / periods
