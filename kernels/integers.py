"""Weights of 4 and 8 bits on a GPU, where they stay packed (kernels/integer_matmul.py)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.integer_matmul import INTEGER_MATMUL, packed, restored
from kernels.quantisation import Int4Weight, Int8Weight


@dataclass(frozen=True)
class IntegerWeight:
    """Packed weight. `order`: column i multiplies input order[i]; None: input i."""

    values: Tensor  # [outputs, bytes] uint8
    scales: Tensor  # [groups, outputs] float16, bfloat16 or float32
    zeros: Tensor | None  # [groups, outputs] uint8; None: the middle of the range
    bits: int
    group: int
    inputs: int
    order: Tensor | None = None  # [inputs] int32

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(one for one in (self.values, self.scales, self.zeros, self.order) if one is not None)

    def restored(self) -> Tensor:
        """Return the weight as [outputs, inputs] float32."""
        columns = restored(self.values, self.scales, self.zeros, self.bits, self.group, self.inputs)
        if self.order is None:
            return columns
        found = torch.empty_like(columns)
        found[:, self.order.long()] = columns
        return found

    def multiply(self, x: Tensor, bias: Tensor | None, dtype: torch.dtype, *, by_size: bool) -> Tensor:
        """x: [rows, inputs] → [rows, outputs] of `dtype`, plus the bias. by_size: use the fastest tiles for the number
        of rows; otherwise a row's sums do not depend on it."""
        ordered = x if self.order is None else x.index_select(1, self.order)
        return INTEGER_MATMUL(
            ordered, self.values, self.scales, self.zeros, self.bits, self.group, bias, dtype, by_size
        )


def pack_integers(weight: Int4Weight | Int8Weight, device: torch.device) -> IntegerWeight:
    """Pack a weight and move it to a device."""
    four = isinstance(weight, Int4Weight)
    zeros = weight.zeros if isinstance(weight, Int4Weight) else None
    bits = 4 if four else 8
    return IntegerWeight(
        packed(weight.values.to(device), bits, weight.group),
        weight.scales.t().to(device, copy=True).contiguous(),
        None if zeros is None else zeros.t().to(device, copy=True).contiguous(),
        bits,
        weight.group,
        weight.values.shape[1],
        None if weight.order is None else weight.order.to(device, copy=True),
    )
