"""y = x Wᵀ (+ b).

On a CPU in fp32 the weight is packed once, at load, into the blocked layout of oneDNN. Measured on one core (Xeon
model 167, torch 2.13, CPU time, least of 9) with the shapes of a 0.5B model (1152x896, 896x896, 9728x896, 896x4864)
against torch's plain fp32 product: 28 → 21 ms at 1 row, 58 → 24 at 8, 48 → 29 at 16, 199 → 132 at 128 with AVX-512;
38 → 32, 85 → 43, 93 → 51 and 202 → 178 ms with AVX2.
"""

import torch
from torch import Tensor
from torch.nn import functional

# Rows that the packed layout is chosen for. Any number of rows may be multiplied; measured best over 1 to 128.
PACKED_FOR_ROWS = 16


def pack(weight: Tensor) -> Tensor:
    """The form of a weight [outputs, inputs] that `linear` multiplies fastest; the caller drops the given one."""
    if weight.device.type == "cpu" and weight.dtype == torch.float32 and torch.backends.mkldnn.is_available():
        return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_FOR_ROWS)
    return weight


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x: [rows, inputs]; weight: [outputs, inputs] from `pack`; bias: [outputs] → [rows, outputs]."""
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return functional.linear(x, weight, bias)
