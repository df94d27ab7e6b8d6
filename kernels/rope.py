"""Rotary positions: pairs of each head's first `dim` elements are turned by position · frequency.

Pair i is (x[i], x[i + dim/2]), or (x[2i], x[2i+1]) where interleaved. With c = cos and s = sin of the pair's angle:
(a, b) → (a·c - b·s, b·c + a·s). Source: arXiv:2104.09864.
"""

import torch
from torch import Tensor


def rope_angles(positions: Tensor, frequencies: Tensor, attention: float, interleaved: bool) -> tuple[Tensor, Tensor]:
    """cos and sin for `rotate_`, each [tokens, 1, dim] fp32; sin carries the sign of its place in the pair.

    positions: [tokens] int64; frequencies: [dim / 2], or [tokens, dim / 2] where they depend on the token's sequence;
    attention multiplies both (yarn, longrope).
    """
    angles = positions.float().unsqueeze(1) * frequencies
    cos, sin = angles.cos().mul_(attention), angles.sin().mul_(attention)
    if interleaved:
        both = cos.repeat_interleave(2, -1), torch.stack((-sin, sin), -1).flatten(-2)
    else:
        both = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    return both[0].unsqueeze(1), both[1].unsqueeze(1)


def rotate_(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
    """Turns the first `dim` elements of x: [tokens, heads, head_dim] in place."""
    part = x[..., : cos.shape[-1]]
    if interleaved:
        swapped = part.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        low, high = part.chunk(2, -1)
        swapped = torch.cat((high, low), -1)
    if x.dtype == torch.float32:
        part.mul_(cos).addcmul_(swapped, sin)
    else:
        part.copy_(part * cos + swapped * sin)
