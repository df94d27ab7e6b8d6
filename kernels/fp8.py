"""Weights in float8_e4m3fn, and their products on the available device.

rows and channels  a scale for each row and each output: torch's own product if it exists, else kernels/fp8_matmul
blocks             a scale for each row and group of 128 inputs, and for each block of the weight: kernels/fp8_matmul
widened            activations are not rounded: kernels/fp8_matmul, on devices without products of e4m3 and for
                   checkpoints that round no activations
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.e4m3 import GROUP, LARGEST, MIN_AMAX, Rounded, Rounding, to_e4m3
from kernels.fp8_matmul import FP8_MATMUL, library_product
from kernels.quantisation import ROWS_AT_ONCE
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
    for at in range(0, len(weight), ROWS_AT_ONCE):
        part = slice(at, at + ROWS_AT_ONCE)
        wide = weight[part].float()
        scales[part] = wide.abs().amax(1, keepdim=True).clamp_(min=MIN_AMAX) / LARGEST
        values[part] = to_e4m3(wide / scales[part])
    return Fp8Weight(values, scales)
