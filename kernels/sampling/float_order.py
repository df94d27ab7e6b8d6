"""Floats as whole numbers in the same order, so that thresholds can be searched bit by bit and the best of many found
with integer maxima, which do not depend on the order in which they are taken.

    key(x) = bits(x) if bits(x) ≥ 0 else bits(x) xor 0x7FFFFFFF;   -0 counts as 0, NaN is above all
"""

import torch
from torch import Tensor

from kernels.jit import jit, tl

NAN_KEY = 0x7FFFFFFF


@jit
def order_key(x):
    """Convert fp32 to its int32 key."""
    bits = tl.where(x == 0.0, 0, x.to(tl.int32, bitcast=True))
    return tl.where(x != x, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@jit
def key_value(key):
    """Convert an int32 key to its fp32."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def best_of(score, token):
    """Return the largest key of a block of scores and the first token that has it."""
    key = order_key(score)
    best = tl.max(key, 0)
    return best, tl.min(tl.where(key == best, token, 0x7FFFFFFF), 0)


def key_value_of(key: Tensor) -> Tensor:
    """Convert int32 keys to fp32 with torch."""
    return (key ^ ((key >> 31) & NAN_KEY)).view(torch.float32)


def keys(x: Tensor) -> Tensor:
    """Compute keys with torch."""
    bits = torch.where(x == 0, 0, x.view(torch.int32))
    return torch.where(x.isnan(), NAN_KEY, bits ^ ((bits >> 31) & 0x7FFFFFFF))
