"""Attention of positions to those shortly before them, with scores for their distance (Gemma 4's Conformer).

    score(i, j) = softcap(c · k_j · q'_i + q'_i · r_(i - j)),  0 ≤ i - j < window,  c = log(1 + e) / log(2)

where q' is q times the factors, and r the projected distances. Source: transformers modeling_gemma4.py.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

KEY_SCALE = math.log(1 + math.e) / math.log(2)


def distance_waves(window: int, width: int) -> Tensor:
    """Return sines and cosines of the distances window - 1 … 0, [window, width] fp32."""
    count = width // 2
    steps = torch.exp(torch.arange(count) * (-math.log(10_000.0) / max(count - 1, 1)))
    angles = torch.arange(window - 1, -1, -1).unsqueeze(1) * steps
    return torch.cat((angles.sin(), angles.cos()), 1)


def local_attention(qkv: Tensor, count: Sequence[int], factors: Tensor, distances: Tensor, softcap: float) -> Tensor:
    """Return the outputs of all heads in float32. qkv: [rows, 3 · heads · dim]; count: rows of each clip; factors:
    [dim]; distances: [window, heads, dim], the farthest first → [rows, heads · dim]."""
    _, heads, dim = distances.shape
    clips = (piece.float().view(-1, 3, heads, dim) for piece in torch.split(qkv, list(count)))
    return torch.cat([_of_clip(piece, factors, distances, softcap) for piece in clips])


def _of_clip(qkv: Tensor, factors: Tensor, distances: Tensor, softcap: float) -> Tensor:
    """Return the outputs of a clip. The queries of a block of `window` positions share a run of keys."""
    rows, window = len(qkv), len(distances)
    q, k, v = qkv.unbind(1)
    rest = -rows % window
    queries = pad(q * factors, (0, 0, 0, 0, 0, rest)).unflatten(0, (-1, window)).transpose(1, 2)
    keys, values = (pad(one, (0, 0, 0, 0, window - 1, rest)).unfold(0, 2 * window - 1, window) for one in (k, v))
    columns, places = torch.arange(2 * window - 1, device=qkv.device), torch.arange(window, device=qkv.device)
    apart = columns - places.unsqueeze(1)  # window - 1 - distance
    first = torch.arange(0, rows + rest, window, device=qkv.device)[:, None, None] - (window - 1)
    seen = (apart >= 0) & (apart < window) & (first + columns >= 0)
    shifts = apart.clamp(0, window - 1).expand(*queries.shape[:2], -1, -1)
    scores = queries @ (keys * KEY_SCALE) + (queries @ distances.permute(1, 2, 0)).gather(3, shifts)
    scores = (torch.tanh(scores / softcap) * softcap).masked_fill(~seen.unsqueeze(1), float("-inf"))
    y = scores.softmax(-1) @ values.transpose(2, 3)
    return y.transpose(1, 2).flatten(0, 1)[:rows].flatten(1)
