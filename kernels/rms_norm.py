"""Root mean square norm: y = x / sqrt(mean(x²) + eps) · w, over the last axis.

The sum is taken in fp32: a running bf16 sum of thousands of squares stalls. `weight` includes any offset already (a
checkpoint that stores w - 1 is corrected when it is loaded). Source: arXiv:1910.07467.
"""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x: [..., size]; weight: [size], or [heads, size] where each head has its own."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    return (wide * scale).mul_(weight).to(x.dtype)


def rms_norm_shared(x: Tensor, weight: Tensor, eps: float, square_sum: Tensor, size: int) -> Tensor:
    """The norm of a piece of longer rows. square_sum: [..., 1] fp32, of the whole row, which has `size` elements."""
    return (x.float() * torch.rsqrt(square_sum / size + eps)).mul_(weight).to(x.dtype)
