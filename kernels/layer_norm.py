"""Layer norm: y = (x - mean) / sqrt(var + eps) · w (+ b), over the last axis, in fp32. Source: arXiv:1607.06450."""

import torch
from torch import Tensor


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """x: [..., size]; weight, bias: [size], or [heads, size] where each head has its own."""
    wide = torch.nn.functional.layer_norm(x.float(), x.shape[-1:], None, None, eps).mul_(weight)
    return (wide if bias is None else wide.add_(bias)).to(x.dtype)
