"""Weights in 8 or 4 bits: quantized here or in the checkpoint, and dequantized.

int8    w ≈ scale · q of each output and group of inputs, |q| ≤ 128; rounded here: |q| ≤ 127, scale = largest |w| / 127
int4    w ≈ scale · (q - zero) of each output and group of inputs, 0 ≤ q ≤ 15; zero is 8 where the format has none

Activations are rounded to 8 bits in blocks of neighbouring inputs when they are multiplied (`rounded_rows`):
x ≈ scale · q of each row and block, |q| ≤ 127. A few activations are a hundred times larger than the others. Therefore
one scale per row would cost a language model 1 % of perplexity or more, and one or two such outliers of a block stay in
float.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.stored_codes import StoredCodes, unpacked

# Integers to which the weight farthest from 0 is scaled. It is clipped beyond -8 and 7, which reduces the error of the
# other weights. On matrices of SmolLM2-135M the square error is 8 % lower than with five negative integers without
# refinement.
FARTHEST = (-8.0, -8.5, -9.0, -7.5, -7.0, 7.0, 7.5, 8.0, 8.5, 6.5)
MIDDLE = 8  # the zero point of 4 bits without zero points
ROWS_AT_ONCE = 4096
CACHED = 1 << 18  # numbers that are quantized at once on a CPU; their float32 intermediate values stay in its caches
SMALL_BLOCK, LARGE_BLOCK = 32, 64  # activations with one scale
MOST_OUTLIERS = 2  # activations of a block that stay in float

Search = Callable[[Tensor, Sequence[float], int, int], tuple[Tensor, Tensor]]
"""See `search_scales`."""


@dataclass(frozen=True)
class Int8Weight:
    """The last group may be shorter than the others. `order`: column i multiplies input order[i]; None: input i."""

    values: Tensor | StoredCodes  # [outputs, inputs] int8
    scales: Tensor  # [outputs, groups] float16, bfloat16 or float32
    group: int
    order: Tensor | None = None  # [inputs] int32
    rounds: bool = False  # activations are to be rounded to int8, and all groups of an output have one scale
    static_scale: Tensor | None = None  # [1] float32, scale of the activations; None: it follows from their values

    def restored(self) -> Tensor:
        return _in_order(unpacked(self.values).float() * _wide(self.scales, self), self.order)


@dataclass(frozen=True)
class Int4Weight:
    """The last group may be shorter than the others. `order`: column i multiplies input order[i]; None: input i."""

    values: Tensor | StoredCodes  # [outputs, inputs] uint8, 0 … 15
    scales: Tensor  # [outputs, groups] float16, bfloat16 or float32
    zeros: Tensor | None  # [outputs, groups] uint8, 0 … 16; None: 8
    group: int
    order: Tensor | None = None  # [inputs] int32

    def restored(self) -> Tensor:
        zeros = float(MIDDLE) if self.zeros is None else _wide(self.zeros, self)
        return _in_order((unpacked(self.values).float() - zeros) * _wide(self.scales, self), self.order)

    @property
    def zero_points(self) -> Tensor:
        """The zero points, [outputs, groups] uint8, also of a weight that has none of its own."""
        return self.zeros if self.zeros is not None else torch.full(self.scales.shape, MIDDLE, dtype=torch.uint8)


def common_type(scales: Iterable[Tensor]) -> torch.dtype:
    """Return the type of all these scales, float32 if they differ."""
    kinds = {one.dtype for one in scales}
    return kinds.pop() if len(kinds) == 1 else torch.float32


def joined(parts: Sequence[Int8Weight | Int4Weight]) -> Int8Weight | Int4Weight:
    """Return the outputs of weights of one kind, one after another, in one weight."""
    values = torch.cat([unpacked(part.values) for part in parts])
    wide = common_type(part.scales for part in parts)
    scales = torch.cat([part.scales.to(wide) for part in parts])
    first = parts[0]
    if not isinstance(first, Int4Weight):
        eights = [part for part in parts if isinstance(part, Int8Weight)]
        static = [part.static_scale for part in eights if part.static_scale is not None]
        # One scale for all sources, because they read the same rows: the largest one.
        static_scale = torch.cat(static).amax().view(1) if static else None
        return Int8Weight(values, scales, first.group, first.order, first.rounds, static_scale)
    fours = [part for part in parts if isinstance(part, Int4Weight)]
    has_zeros = any(part.zeros is not None for part in fours)
    zeros = torch.cat([part.zero_points for part in fours]) if has_zeros else None
    return Int4Weight(values, scales, zeros, first.group, first.order)


def _wide(of_groups: Tensor, weight: Int8Weight | Int4Weight) -> Tensor:
    """[outputs, groups] → [outputs, inputs] float32."""
    return of_groups.float().repeat_interleave(weight.group, 1)[:, : weight.values.shape[1]]


def _in_order(columns: Tensor, order: Tensor | None) -> Tensor:
    """Reorder each column to the place of its input."""
    if order is None:
        return columns
    inputs = torch.empty_like(columns)
    inputs[:, order.long()] = columns
    return inputs


def row_parts(weight: Tensor) -> Iterator[slice]:
    """Yield the rows of a matrix that are quantized at once."""
    rows = ROWS_AT_ONCE
    if weight.device.type == "cpu":
        rows = max(1, min(rows, CACHED // max(1, weight.shape[1])))
    for at in range(0, len(weight), rows):
        yield slice(at, at + rows)


def to_int8(weight: Tensor, group: int) -> Int8Weight:
    """Quantize a weight, [outputs, inputs] of any floating type. Scales are bfloat16, which has the range of float32.
    The integers are computed from the rounded scales, so their rounding costs no accuracy."""
    outputs, inputs = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -inputs % group)) if inputs % group else weight
    values = torch.empty((outputs, inputs), dtype=torch.int8, device=weight.device)
    scales = torch.empty((outputs, padded.shape[1] // group), dtype=torch.bfloat16, device=weight.device)
    for part in row_parts(weight):
        groups = padded[part].float().unflatten(1, (-1, group))
        scales[part] = groups.abs().amax(2) / 127
        wide = scales[part].float().unsqueeze(2)
        rounded = torch.where(wide > 0, groups / wide, 0.0).round_().clamp_(-127, 127)
        values[part] = rounded.flatten(1)[:, :inputs]
    return Int8Weight(values, scales, group)


def to_int4(weight: Tensor, group: int, search: Search | None = None) -> Int4Weight:
    """Round without zero points. A search over `FARTHEST` minimizes the square error of each group's scale, and each
    candidate is refined once: to the least-squares scale for its integers. search: default `search_scales`."""
    outputs, inputs = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -inputs % group)) if inputs % group else weight
    values = torch.empty((outputs, inputs), dtype=torch.uint8, device=weight.device)
    scales = torch.empty((outputs, padded.shape[1] // group), dtype=torch.float16, device=weight.device)
    for part in row_parts(weight):
        groups = padded[part].float().unflatten(1, (-1, group))
        found, scales[part] = (search or search_scales)(groups, FARTHEST, -8, 7)
        values[part] = (found + 8).to(torch.uint8).flatten(1)[:, :inputs]
    return Int4Weight(values, scales, None, group)


def search_scales(groups: Tensor, farthest: Sequence[float], low: int, high: int) -> tuple[Tensor, Tensor]:
    """Quantize to integers from `low` to `high`. [outputs, groups, group] float32 → int8 of the same shape, float16
    scales [outputs, groups]. farthest: see `FARTHEST`."""
    largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))[:, :, 0]
    best_values = torch.zeros_like(groups)
    best_scales = torch.zeros_like(largest, dtype=torch.float16)
    best_error = torch.full_like(largest, torch.inf)
    for integer in farthest:
        scales = (largest / integer).half()
        for _ in range(2):
            values, error = _rounded_by(groups, scales, low, high)
            better = error < best_error
            best_values = torch.where(better.unsqueeze(2), values, best_values)
            best_scales, best_error = torch.where(better, scales, best_scales), torch.minimum(error, best_error)
            size = values.square().sum(2)
            scales = torch.where(size > 0, values.mul_(groups).sum(2) / size, 0.0).half()
    return best_values.to(torch.int8), best_scales


def _rounded_by(groups: Tensor, scales: Tensor, low: int, high: int) -> tuple[Tensor, Tensor]:
    """Return the values, and the square error [outputs, groups], of groups with these scales."""
    wide = scales.float().unsqueeze(2)
    values = (groups * torch.where(wide != 0, 1 / wide, 0.0)).round_().clamp_(low, high)
    return values, (values * wide).sub_(groups).square_().sum(2)


def activation_block(group: int) -> int:
    """Return the number of inputs that share a scale of the activations, for weights in groups of `group` inputs. A
    group consists of whole blocks (`block_of` in kernels/cpu/linear_int.h)."""
    return SMALL_BLOCK if group % LARGE_BLOCK else LARGE_BLOCK


def outlier_ratio(bits: int) -> float:
    """Return how many times larger than the next activation of its block an outlier is, for weights of 8 or 4 bits
    (`outlier_ratio` in kernels/cpu/linear_int.h). A smaller ratio is more accurate and takes more time. With 4 bits the
    rounding of the weights dominates."""
    return 2.5 if bits == 4 else 1.5


def rounded_rows(x: Tensor, block: int, ratio: float) -> tuple[Tensor, Tensor, Tensor]:
    """[rows, inputs] float32 → values (integers in float32), scales and outliers, each of the same shape. x is close to
    values · scales + outliers. The last block may be shorter than the others."""
    rows, inputs = x.shape
    blocks = torch.nn.functional.pad(x, (0, -inputs % block)).view(rows, -1, block)
    sizes, places = blocks.abs().topk(MOST_OUTLIERS + 1, dim=2)
    ends = sizes[:, :, :-1] > ratio * sizes[:, :, 1:]  # the outliers may end here
    taken = ends.flip(2).cumsum(2).flip(2) > 0
    outliers = torch.zeros_like(blocks)
    outliers.scatter_(2, places[:, :, :-1], torch.where(taken, blocks.gather(2, places[:, :, :-1]), 0.0))
    others = torch.where(outliers != 0, 0.0, blocks)
    scales = others.abs().amax(2, keepdim=True) / 127
    scales = torch.where(scales < torch.finfo(torch.float32).tiny, 0.0, scales)
    values = (others * torch.where(scales > 0, 1 / scales, 0.0)).round_()
    wide = (values, scales.expand_as(blocks), outliers)
    first, second, third = (part.flatten(1)[:, :inputs] for part in wide)
    return first, second, third
