"""Activation functions of MLPs, and act(gate) · up of a fused projection (source: arXiv:2002.05202).

silu x · sigmoid(x); gelu x · Φ(x); gelu_tanh its tanh approximation; relu max(x, 0).
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.nn import functional

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
}


def gated(act: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """x: [tokens, 2 · inner], gate rows first, then up rows → [tokens, inner]."""
    gate, up = x.chunk(2, -1)
    return act(gate).mul_(up)
