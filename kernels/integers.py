"""Weights of 4 and 8 bits on a GPU, where they stay packed (kernels/integer_matmul.py), and weights of 8 bits that
multiply activations of 8 bits (kernels/int8_matmul.py)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.experts.int8_matmul import INT8_EXPERT_MATMUL
from kernels.experts.integer_matmul import INTEGER_EXPERT_MATMUL
from kernels.int8_matmul import INT8_MATMUL
from kernels.integer_matmul import INTEGER_MATMUL, packed, restored
from kernels.quantisation import Int4Weight, Int8Weight
from kernels.quantize_int8 import QUANTIZE_INT8
from kernels.stored_codes import unpacked


@dataclass(frozen=True)
class IntegerWeight:
    """Packed weight. `order`: column i multiplies input order[i]; None: input i.

    With `rounds`, values are [outputs, inputs] int8, scales [1, outputs] float32, and activations are rounded. In a
    stack of experts, each tensor has the experts along its first axis."""

    values: Tensor  # [outputs, bytes] uint8
    scales: Tensor  # [groups, outputs] float16, bfloat16 or float32
    zeros: Tensor | None  # [groups, outputs] uint8; None: the middle of the range
    bits: int
    group: int
    inputs: int
    order: Tensor | None = None  # [inputs] int32
    rounds: bool = False
    static_scale: Tensor | None = None  # [1] float32, scale of the activations; of a stack: [experts]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        found = self.values, self.scales, self.zeros, self.order, self.static_scale
        return tuple(one for one in found if one is not None)

    @property
    def outputs(self) -> int:
        return self.values.shape[-2]

    def restored(self) -> Tensor:
        """Return the weight as [outputs, inputs] float32."""
        if self.rounds:
            return self.values.float() * self.scales.t()
        columns = restored(self.values, self.scales, self.zeros, self.bits, self.group, self.inputs)
        if self.order is None:
            return columns
        found = torch.empty_like(columns)
        found[:, self.order.long()] = columns
        return found

    def multiply(self, x: Tensor, bias: Tensor | None, dtype: torch.dtype, *, by_size: bool) -> Tensor:
        """x: [rows, inputs] → [rows, outputs] of `dtype`, plus the bias. by_size: use the fastest tiles for the number
        of rows; otherwise a row's sums do not depend on it."""
        if self.rounds:
            return INT8_MATMUL(*QUANTIZE_INT8(x, self.static_scale), self.values, self.scales[0], bias, dtype)
        ordered = x if self.order is None else x.index_select(1, self.order)
        return INTEGER_MATMUL(
            ordered, self.values, self.scales, self.zeros, self.bits, self.group, bias, dtype, by_size
        )


def multiply_experts(
    stack: IntegerWeight,
    x: Tensor,
    pairs: Tensor,
    tiles: Tensor,
    pairs_per_row: int,
    rows: int,
    bias: Tensor | None,
    scales: Tensor | None,
) -> Tensor:
    """Multiply by the experts of a layer as kernels/experts/matmul.py does. A token goes to several experts, so all
    have one scale of the activations: the largest of their static ones."""
    rest: tuple[Any, ...] = pairs, tiles, pairs_per_row, rows, bias, scales
    if not stack.rounds:
        return INTEGER_EXPERT_MATMUL(x, stack.values, stack.scales, stack.zeros, stack.bits, stack.group, *rest)
    static = None if stack.static_scale is None else stack.static_scale.amax().view(1)
    return INT8_EXPERT_MATMUL(*QUANTIZE_INT8(x, static), stack.values, stack.scales[:, 0], *rest, x.dtype)


def pack_integers(weight: Int4Weight | Int8Weight, device: torch.device) -> IntegerWeight:
    """Pack a weight and move it to a device."""
    if isinstance(weight, Int8Weight) and weight.rounds:
        scales = weight.scales[:, :1].t().to(device, torch.float32, copy=True).contiguous()
        static = None if weight.static_scale is None else weight.static_scale.to(device, torch.float32, copy=True)
        values, inputs = unpacked(weight.values).to(device, copy=True), weight.values.shape[1]
        return IntegerWeight(values, scales, None, 8, inputs, inputs, rounds=True, static_scale=static)
    four = isinstance(weight, Int4Weight)
    zeros = weight.zeros if isinstance(weight, Int4Weight) else None
    bits = 4 if four else 8
    return IntegerWeight(
        packed(unpacked(weight.values).to(device), bits, weight.group),
        weight.scales.t().to(device, copy=True).contiguous(),
        None if zeros is None else zeros.t().to(device, copy=True).contiguous(),
        bits,
        weight.group,
        weight.values.shape[1],
        None if weight.order is None else weight.order.to(device, copy=True),
    )
