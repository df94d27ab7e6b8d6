"""Weights in 8 or 4 bits: rounded here, or as a checkpoint has them; and back.

int8    w ≈ scale · q of each output, |q| ≤ 128; rounded here: |q| ≤ 127, scale = largest |w| / 127
groups  w ≈ scale · q of each output and group of inputs, |q| ≤ 128
int4    w ≈ scale · (q - zero) of each output and group of inputs, 0 ≤ q ≤ 15; zero is 8 where the format has none

Activations are rounded to 8 bits row by row when they are multiplied (`rounded_rows`): x ≈ scale · q, |q| ≤ 127.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# Ratios of the scale to the one that just reaches the largest weight: a smaller one clips that and serves the others.
TRIES = (1.0, 0.95, 0.9, 0.86, 0.82)
ROWS_AT_ONCE = 4096


@dataclass(frozen=True)
class Int8Weight:
    values: Tensor  # [outputs, inputs] int8
    scales: Tensor  # [outputs] float32

    def restored(self) -> Tensor:
        return self.values.float() * self.scales[:, None]


@dataclass(frozen=True)
class Int8Groups:
    """The last group may be shorter than the others. `order`: column i multiplies input order[i]; None: input i."""

    values: Tensor  # [outputs, inputs] int8
    scales: Tensor  # [outputs, groups] float16, bfloat16 or float32
    group: int
    order: Tensor | None = None  # [inputs] int32

    def restored(self) -> Tensor:
        return _in_order(self.values.float() * _wide(self.scales, self), self.order)


@dataclass(frozen=True)
class Int4Weight:
    """The last group may be shorter than the others. `order`: column i multiplies input order[i]; None: input i."""

    values: Tensor  # [outputs, inputs] uint8, 0 … 15
    scales: Tensor  # [outputs, groups] float16, bfloat16 or float32
    zeros: Tensor | None  # [outputs, groups] uint8, 0 … 16; None: 8
    group: int
    order: Tensor | None = None  # [inputs] int32

    def restored(self) -> Tensor:
        zeros = 8.0 if self.zeros is None else _wide(self.zeros, self)
        return _in_order((self.values.float() - zeros) * _wide(self.scales, self), self.order)


def _wide(of_groups: Tensor, weight: Int8Groups | Int4Weight) -> Tensor:
    """[outputs, groups] → [outputs, inputs] float32."""
    return of_groups.float().repeat_interleave(weight.group, 1)[:, : weight.values.shape[1]]


def _in_order(columns: Tensor, order: Tensor | None) -> Tensor:
    """Each column at the place of its input."""
    if order is None:
        return columns
    inputs = torch.empty_like(columns)
    inputs[:, order.long()] = columns
    return inputs


def to_int8(weight: Tensor) -> Int8Weight:
    """weight: [outputs, inputs] of any floating type."""
    scales = weight.abs().amax(1).float() / 127
    inverse = torch.where(scales > 0, 1 / scales, 0.0)
    values = torch.empty(weight.shape, dtype=torch.int8)
    for at in range(0, len(weight), ROWS_AT_ONCE):
        part = slice(at, at + ROWS_AT_ONCE)
        values[part] = (weight[part].float() * inverse[part, None]).round_().clamp_(-127, 127)
    return Int8Weight(values, scales)


def to_int4(weight: Tensor, group: int) -> Int4Weight:
    """Without zero points: the scale of each group is the one of a few that leaves the least square error."""
    outputs, inputs = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -inputs % group)) if inputs % group else weight
    values = torch.empty((outputs, inputs), dtype=torch.uint8)
    scales = torch.empty((outputs, padded.shape[1] // group), dtype=torch.float16)
    for at in range(0, outputs, ROWS_AT_ONCE):
        part = slice(at, at + ROWS_AT_ONCE)
        found, scales[part] = _groups_to_int4(padded[part].float().unflatten(1, (-1, group)))
        values[part] = found.flatten(1)[:, :inputs]
    return Int4Weight(values, scales, None, group)


def _groups_to_int4(groups: Tensor) -> tuple[Tensor, Tensor]:
    """[outputs, groups, group] → values of the same shape, scales [outputs, groups]."""
    # The number farthest from 0 becomes -8, the end of the range that reaches farther.
    farthest = groups.gather(2, groups.abs().argmax(2, keepdim=True))[:, :, 0]
    best_values, best_scales, best_error = None, None, None
    for ratio in TRIES:
        scales = (farthest * (ratio / -8)).half()
        inverse = torch.where(scales != 0, 1 / scales.float(), 0.0).unsqueeze(2)
        values = (groups * inverse).round_().clamp_(-8, 7)
        error = (values * scales.float().unsqueeze(2)).sub_(groups).square_().sum(2)
        if best_values is None:
            best_values, best_scales, best_error = values, scales, error
            continue
        better = error < best_error
        best_values = torch.where(better.unsqueeze(2), values, best_values)
        best_scales, best_error = torch.where(better, scales, best_scales), torch.minimum(error, best_error)
    return (best_values + 8).to(torch.uint8), best_scales


def rounded_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, inputs] float32 → values of the same shape, whole numbers in float32, and scales [rows]."""
    scales = x.abs().amax(1) / 127
    inverse = torch.where(scales > 0, 1 / scales, 0.0)
    return (x * inverse[:, None]).round_(), scales
