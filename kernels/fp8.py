"""Weights in float8_e4m3fn, and the products by them that a device has.

rows and channels  a scale for each row and each output: torch's own product where there is one, else kernels/fp8_matmul
blocks             a scale for each row and group of 128 inputs, and for each block of the weight: kernels/fp8_matmul
widened            activations stay as they are: kernels/fp8_matmul, on what multiplies no e4m3 and where a checkpoint
                   rounds no activations
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.e4m3 import GROUP, LARGEST, LEAST, Rounded, Rounding, to_e4m3
from kernels.fp8_matmul import FP8_MATMUL, library_product
from kernels.quantisation import ROWS_AT_ONCE
from kernels.quantize_rows import QUANTIZE_ROWS

PRODUCTS = (8, 9)  # the first compute capability of NVIDIA GPUs that multiplies e4m3
LIBRARY = (9, 10)  # major ones for which torch has the product with scales of rows and outputs in all its releases
ALIGNED = 16  # inputs and outputs of torch's product are multiples of this


@dataclass(frozen=True)
class Fp8Weight:
    """`unit` outputs share a scale; of several groups each has GROUP inputs. `rounds`: activations are to be rounded,
    by the scale `given`, [1] float32, or else by their own."""

    values: Tensor  # [outputs, inputs] float8_e4m3fn
    scales: Tensor  # [outputs / unit, groups] float32, rounded up
    unit: int = 1
    rounds: bool = True
    given: Tensor | None = None

    @property
    def blocks(self) -> bool:
        """Whether inputs have scales of their own, or outputs share one: else torch's product could serve."""
        return self.scales.shape[1] > 1 or self.unit > 1

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.values, self.scales) if self.given is None else (self.values, self.scales, self.given)

    def restored(self) -> Tensor:
        """[outputs, inputs] float32."""
        (outputs, inputs), groups = self.values.shape, self.scales.shape[1]
        rows = self.scales.repeat_interleave(self.unit, 0)[:outputs]
        return self.values.float() * rows.repeat_interleave(inputs if groups == 1 else GROUP, 1)[:, :inputs]


@dataclass(frozen=True)
class Fp8Products:
    """How a device multiplies by such weights. `rounded`: it has products of e4m3, else weights are widened.
    `library`: torch's own product is taken where it has one; else no row's sums depend on the rows beside it."""

    rounded: bool = True
    library: bool = False

    def rounding(self, weight: Fp8Weight) -> Rounding | None:
        """How rows that are multiplied by this weight are rounded; None: they stay as they are."""
        if not (self.rounded and weight.rounds):
            return None
        return Rounding(GROUP if weight.scales.shape[1] > 1 else weight.values.shape[1], weight.given)

    def multiply(self, x: Tensor | Rounded, weight: Fp8Weight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """x: [rows, inputs], or the same rounded as `rounding` says → [rows, outputs] of `dtype`, plus the bias."""
        rounding = self.rounding(weight)
        if rounding is None:
            assert isinstance(x, Tensor), "rows that are rounded belong to a product of rounded rows"
            return FP8_MATMUL(x, None, weight.values, weight.scales, weight.unit, bias, dtype)
        if isinstance(x, Tensor):
            x = Rounded(*QUANTIZE_ROWS(x, rounding.group, rounding.given))
        if self.library and _library_has(weight, dtype):
            return library_product(x.values, x.scales, weight.values, weight.scales, bias, dtype)
        return FP8_MATMUL(x.values, x.scales, weight.values, weight.scales, weight.unit, bias, dtype)


def products_of(capability: tuple[int, int] | None, *, invariant: bool) -> Fp8Products:
    """capability: of an NVIDIA GPU; None: another maker's, whose type is another one (fnuz)."""
    if capability is None or capability < PRODUCTS:
        return Fp8Products(rounded=False)
    return Fp8Products(library=capability[0] in LIBRARY and not invariant)


def _library_has(weight: Fp8Weight, dtype: torch.dtype) -> bool:
    """torch 2.11 and 2.13: scales of rows and outputs, into bfloat16 on every such GPU, multiples of 16."""
    outputs, inputs = weight.values.shape
    return not weight.blocks and dtype == torch.bfloat16 and outputs % ALIGNED == 0 and inputs % ALIGNED == 0


def to_fp8(weight: Tensor) -> Fp8Weight:
    """weight: [outputs, inputs] of any floating type, rounded with a scale for each output."""
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scales = torch.empty((len(weight), 1), device=weight.device)
    for at in range(0, len(weight), ROWS_AT_ONCE):
        part = slice(at, at + ROWS_AT_ONCE)
        wide = weight[part].float()
        scales[part] = wide.abs().amax(1, keepdim=True).clamp_(min=LEAST) / LARGEST
        values[part] = to_e4m3(wide / scales[part])
    return Fp8Weight(values, scales)
