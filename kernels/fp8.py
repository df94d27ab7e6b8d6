"""Weights in float8_e4m3fn, and their products on the available device.

rows and channels  a scale for each row and each output: torch's own product if it exists, else kernels/fp8_matmul
blocks             a scale for each row and group of 128 inputs, and for each block of the weight: kernels/fp8_matmul
widened            activations are not rounded: kernels/fp8_matmul, on devices without products of e4m3 and for
                   checkpoints that round no activations
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kernels.e4m3 import GROUP, LARGEST, MIN_AMAX, Rounded, Rounding, to_e4m3
from kernels.experts.fp8_matmul import FP8_EXPERT_MATMUL
from kernels.fp8_matmul import FP8_MATMUL, library_product
from kernels.quantisation import row_parts
from kernels.quantize_rows import QUANTIZE_ROWS

PRODUCTS = (8, 9)  # first compute capability of NVIDIA GPUs that multiplies e4m3
LIBRARY = (9, 10)  # major versions for which all torch releases have the product with scales of rows and outputs
ALIGNED = 16  # inputs and outputs of torch's product are multiples of this


@dataclass(frozen=True)
class Fp8Weight:
    """Weight in e4m3 with its scales. Groups consist of GROUP inputs if there are several."""

    values: Tensor  # [outputs, inputs] float8_e4m3fn
    scales: Tensor  # [outputs / unit, groups] float32, rounded up
    unit: int = 1  # outputs that share a scale
    rounds: bool = True  # whether activations are to be rounded
    static_scale: Tensor | None = None
    """[1] float32, scale of the activations. By default it follows from their values."""

    @property
    def blocks(self) -> bool:
        """Return whether inputs have scales of their own, or outputs share one, which rules out torch's product."""
        return self.scales.shape[1] > 1 or self.unit > 1

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (
            (self.values, self.scales) if self.static_scale is None else (self.values, self.scales, self.static_scale)
        )

    def restored(self) -> Tensor:
        """Return the weight as [outputs, inputs] float32."""
        (outputs, inputs), groups = self.values.shape, self.scales.shape[1]
        scales = self.scales.repeat_interleave(self.unit, 0)[:outputs]
        return self.values.float().mul_(scales if groups == 1 else scales.repeat_interleave(GROUP, 1)[:, :inputs])


@dataclass(frozen=True)
class Fp8Products:
    """Method by which a device multiplies by weights in e4m3."""

    rounded: bool = True  # whether the device has products of e4m3; otherwise weights are widened
    library: bool = False  # use torch's own product if it exists; otherwise a row's sums do not depend on other rows

    def rounding(self, weight: Fp8Weight) -> Rounding | None:
        """Return how to round rows before multiplication by this weight, or None if they must not be rounded."""
        if not (self.rounded and weight.rounds):
            return None
        return Rounding(GROUP if weight.scales.shape[1] > 1 else weight.values.shape[1], weight.static_scale)

    def multiply(self, x: Tensor | Rounded, weight: Fp8Weight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """x: [rows, inputs], or the result of rounding by `rounding` → [rows, outputs] of `dtype`, plus the bias."""
        rounding = self.rounding(weight)
        if rounding is None:
            assert isinstance(x, Tensor), "rounded rows need a product of rounded rows"
            return FP8_MATMUL(x, None, weight.values, weight.scales, weight.unit, bias, dtype)
        if isinstance(x, Tensor):
            x = Rounded(*QUANTIZE_ROWS(x, rounding.group, rounding.static_scale))
        if self.library and _library_has(weight, dtype):
            return library_product(x.values, x.scales, weight.values, weight.scales, bias, dtype)
        return FP8_MATMUL(x.values, x.scales, weight.values, weight.scales, weight.unit, bias, dtype)


@dataclass(eq=False)
class Fp8Experts:
    """Weights of the experts of a layer. Each tensor has the experts along its first axis.

    A token goes to several experts, so all have one scale of the activations: the largest of their static ones."""

    values: Tensor  # [experts, outputs, inputs] float8_e4m3fn
    scales: Tensor  # [experts, outputs / unit, groups] float32
    unit: int
    rounds: bool
    static_scales: Tensor | None = None  # [experts] float32

    @staticmethod
    def empty(count: int, first: Fp8Weight) -> "Fp8Experts":
        """Allocate the weights of `count` experts that are stored as the first one."""
        values, scales = (one.new_empty((count, *one.shape)) for one in (first.values, first.scales))
        static = None if first.static_scale is None else first.scales.new_empty(count)
        return Fp8Experts(values, scales, first.unit, first.rounds, static)

    def put(self, number: int, matrix: Fp8Weight) -> Fp8Weight | None:
        """Copy a matrix to its place, and return it there. None if it is stored differently."""
        static = matrix.static_scale is not None
        own = matrix.scales.shape, matrix.unit, matrix.rounds, static
        if own != (self.scales.shape[1:], self.unit, self.rounds, self.static_scales is not None):
            return None
        self.values[number], self.scales[number] = matrix.values, matrix.scales
        scale = None
        if self.static_scales is not None and matrix.static_scale is not None:
            scale = self.static_scales[number : number + 1].copy_(matrix.static_scale)
        return Fp8Weight(self.values[number], self.scales[number], self.unit, self.rounds, scale)

    @cached_property
    def static_scale(self) -> Tensor | None:
        return None if self.static_scales is None else self.static_scales.amax().view(1)

    def multiply(
        self, products: Fp8Products, x: Tensor, pairs: Tensor, tiles: Tensor, pairs_per_row: int, rows: int, *more: Any
    ) -> Tensor:
        """Multiply as kernels/experts/matmul.py does."""
        x_scales, dtype = None, x.dtype
        if products.rounded and self.rounds:
            group = GROUP if self.scales.shape[2] > 1 else x.shape[1]
            x, x_scales = QUANTIZE_ROWS(x, group, self.static_scale)
        matrix = self.values, self.scales, self.unit
        return FP8_EXPERT_MATMUL(x, x_scales, *matrix, pairs, tiles, pairs_per_row, rows, *more, dtype)


def products_of(capability: tuple[int, int] | None, *, invariant: bool) -> Fp8Products:
    """capability: of an NVIDIA GPU. GPUs of other vendors, None, have a different e4m3 format (fnuz)."""
    if capability is None or capability < PRODUCTS:
        return Fp8Products(rounded=False)
    return Fp8Products(library=capability[0] in LIBRARY and not invariant)


def _library_has(weight: Fp8Weight, dtype: torch.dtype) -> bool:
    """torch 2.11 and 2.13: scales of rows and outputs, into bfloat16 on every such GPU, multiples of 16."""
    outputs, inputs = weight.values.shape
    return not weight.blocks and dtype == torch.bfloat16 and outputs % ALIGNED == 0 and inputs % ALIGNED == 0


def to_fp8(weight: Tensor) -> Fp8Weight:
    """Round a weight, [outputs, inputs] of any floating type, with a scale for each output."""
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scales = torch.empty((len(weight), 1), device=weight.device)
    for part in row_parts(weight):
        wide = weight[part].float()
        scales[part] = wide.abs().amax(1, keepdim=True).clamp_(min=MIN_AMAX) / LARGEST
        values[part] = to_e4m3(wide / scales[part])
    return Fp8Weight(values, scales)
