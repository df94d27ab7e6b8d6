"""y = x Wᵀ (+ b).

On a CPU in fp32 the weight is stored transposed, [inputs, outputs], which MKL multiplies by few rows much faster than
the checkpoint's order. Measured on one core (Xeon model 167, torch 2.13, CPU time, least of 11) with four layers of a
0.5B model (1152x896, 896x896, 9728x896, 896x4864): checkpoint's order → oneDNN's prepacked → transposed, in ms:

rows       1                 4                  8                  16                 256
AVX-512    94 → 68 → 39      175 → 102 → 67     256 → 124 → 91     197 → 94 → 88      586 → 446 → 378
AVX2       80 → 60 → 42      128 → 70 → 78      180 → 107 → 99     202 → 134 → 119    646 → 514 → 479
"""

import torch
from torch import Tensor
from torch.nn import functional


def pack(weight: Tensor) -> Tensor:
    """The weight [outputs, inputs] in the memory order that `linear` multiplies fastest; drop the given one."""
    if weight.device.type == "cpu" and weight.dtype == torch.float32:
        return weight.t().contiguous().t()
    return weight


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x: [rows, inputs]; weight: [outputs, inputs] from `pack`; bias: [outputs] → [rows, outputs]."""
    return functional.linear(x, weight, bias)
