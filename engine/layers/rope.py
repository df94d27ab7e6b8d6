"""Frequencies of a declared RoPE with its scaling, and the angles of a step's tokens.

Pair i of `dim` dimensions rotates by theta^(-2i/dim) per position, modified by the scaling (source of the formulas:
transformers modeling_rope_utils.py, whose fp32 rounding is reproduced):

linear    all frequencies divided by a factor
dynamic   theta grows with the length L of the sequence: theta · (factor · L / original - factor + 1)^(dim / (dim - 2))
llama3    long wavelengths divided by a factor, short ones unchanged, interpolated in between
yarn      likewise, by dimension instead of wavelength; cos and sin are multiplied (arXiv:2309.00071)
proportional  the first frequencies divided by a factor, all others 0
longrope  one divisor per frequency, from one of two lists: up to the original length, and beyond it (arXiv:2402.13753)

dynamic and longrope depend on L, so each token has a length that determines its scaling.
"""

import math

import torch
from torch import Tensor

from engine.models.parts import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    NoRotation,
    ProportionalScaling,
    Rope,
    YarnScaling,
)
from kernels.rope import rope_angles


def angles(rope: Rope, positions: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin, [tokens, 1, dim]; see `Rotation.angles`."""
    return Rotation(rope, positions.device).angles(positions, lengths)


class Rotation:
    """A declared RoPE on a device. Frequencies that do not depend on lengths are computed once. `attention` multiplies
    cos and sin."""

    def __init__(self, rope: Rope, device: torch.device) -> None:
        self.rope = rope
        self.attention = rope.scaling.attention if isinstance(rope.scaling, YarnScaling | LongScaling) else 1.0
        self._exponents = torch.arange(0, rope.dim, 2, device=device).float() / rope.dim
        self._fixed = self._made()

    def angles(self, positions: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin, [tokens, 1, dim]. positions: [tokens], or [tokens, dim / 2] if pairs have different ones
        (M-RoPE). lengths: [tokens] int64, at least position + 1."""
        return rope_angles(positions, self.frequencies(lengths), self.attention, self.rope.interleaved)

    def frequencies(self, lengths: Tensor) -> Tensor:
        """Return [dim / 2] fp32, or [tokens, dim / 2] if they depend on the sequence's length. lengths: [tokens]."""
        match self.rope.scaling:
            case DynamicScaling(factor=factor, original=original):
                grown = factor * lengths.clamp(min=original).float() / original - (factor - 1)
                theta = self.rope.theta * grown ** (self.rope.dim / (self.rope.dim - 2))
                return 1.0 / theta.unsqueeze(1) ** self._exponents
            case LongScaling(original=original):
                return self._fixed[(lengths > original).long()]
            case _:
                return self._fixed

    def _made(self) -> Tensor:
        """Return [dim / 2], or for longrope [2, dim / 2]: short and long frequencies."""
        rope = self.rope
        plain = 1.0 / rope.theta**self._exponents
        match rope.scaling:
            case NoRotation():
                return torch.zeros_like(plain)
            case ProportionalScaling(pairs=pairs, factor=factor):
                return torch.where(torch.arange(len(plain), device=plain.device) < pairs, plain / factor, 0.0)
            case LinearScaling(factor=factor):
                return plain / factor
            case Llama3Scaling():
                return _llama3(plain, rope.scaling)
            case YarnScaling():
                return _yarn(rope, self._exponents, rope.scaling)
            case LongScaling(short=short, long=long):
                return 1.0 / (torch.tensor([short, long], device=plain.device) * rope.theta**self._exponents)
            case _:
                return plain


def _llama3(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    wavelengths = 2 * math.pi / plain
    longest, shortest = scaling.original / scaling.low_freq, scaling.original / scaling.high_freq
    smooth = (scaling.original / wavelengths - scaling.low_freq) / (scaling.high_freq - scaling.low_freq)
    between = (1 - smooth) * plain / scaling.factor + smooth * plain
    changed = torch.where(wavelengths > longest, plain / scaling.factor, between)
    return torch.where(wavelengths < shortest, plain, changed)


def _yarn(rope: Rope, exponents: Tensor, scaling: YarnScaling) -> Tensor:
    """Dimensions with more than beta_fast rotations within the trained length are unchanged; dimensions with fewer than
    beta_slow are divided by the factor."""

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
