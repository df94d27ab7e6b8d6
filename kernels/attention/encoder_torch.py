"""Bidirectional attention of whole sequences over their own keys and values in torch, one row after another.

A window limits the distance between positions on both sides. The GPU kernel for the same attention is
kernels/attention/encoder.py.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels.attention.common import attend, distance_biases


def encoder_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    count: Sequence[int],
    scale: float,
    window: int | None,
    softcap: float | None,
    biases: Tensor | None = None,
    keys: Tensor | None = None,
) -> Tensor:
    """q: [tokens, heads, dim]; k, v: [tokens, kv_heads, dim]; count: tokens of each row; biases: [heads, distances];
    keys: [tokens] bool, the tokens that others attend to (None: all) → [tokens, heads, dim]."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    first = 0
    for tokens in count:
        own = slice(first, first + tokens)
        seen = _seen(tokens, window, q.device)
        if keys is not None and not bool(keys[own].all()):
            seen = keys[own].expand(tokens, -1) if seen is None else seen & keys[own]
        if softcap is None:
            heads = (x[own].transpose(0, 1).unsqueeze(0) for x in (q, k, v))
            mask = seen if biases is None else _biased(biases, tokens, seen).to(q.dtype)
            y = scaled_dot_product_attention(*heads, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
            out[own] = y[0].transpose(0, 1)
        else:
            everything = torch.ones((tokens, tokens), dtype=torch.bool, device=q.device)
            seen = everything if seen is None else seen
            out[own] = attend(q[own], k[own], v[own], seen, scale, softcap, None, None, biases)
        first += tokens
    return out


def _biased(biases: Tensor, tokens: int, seen: Tensor | None) -> Tensor:
    """Return the numbers that are added to the scores, [heads, tokens, tokens]."""
    position = torch.arange(tokens, device=biases.device)
    added = distance_biases(biases, position - position.unsqueeze(1))
    return added if seen is None else added.masked_fill(~seen, float("-inf"))


def _seen(tokens: int, window: int | None, device: torch.device) -> Tensor | None:
    """Return which positions a position reads, [tokens, tokens], or None if each position reads all of them."""
    if window is None or window >= tokens:
        return None
    position = torch.arange(tokens, device=device)
    return (position.unsqueeze(1) - position).abs() < window
