"""Latent attention of ragged rows over paged latents: softmax(scale · q kᵀ + mask) v, where k is a token's latent and
shared key, and v the latent alone. All query heads read the same k.

Reads are planned as those of keys and values (kernels/paged_attention.py), from pages with a single plane. Scores and
weights are fp32. Source: arXiv:2405.04434, section 2.1, with absorbed matrices.
"""

import torch
from torch import Tensor

from kernels.paged_attention import SCORE_ELEMENTS, Bucket, Reads, span_mask
from kernels.paged_kv import stored


def paged_latent_attention(
    q: Tensor, latents: Tensor, pages: Tensor, layer: int, reads: Reads, *, value_dim: int, scale: float
) -> Tensor:
    """q: [tokens, heads, dim], absorbed; latents: [tokens, dim], written to the pages already; pages: [blocks, layers,
    1, block_tokens, 1, dim] → [tokens, heads, value_dim] of q's type."""
    out = torch.empty((*q.shape[:2], value_dim), dtype=q.dtype, device=q.device)
    flat = pages.view(-1, pages.shape[3], pages.shape[-1])  # [blocks · layers, block_tokens, dim]
    for bucket, planes in zip(reads.window_reads.buckets, reads.buckets, strict=True):
        keys = flat.index_select(0, planes[layer][0]).view(len(bucket.tokens), -1, pages.shape[-1]).to(q.dtype)
        out[bucket.tokens] = _decode(q[bucket.tokens], keys, bucket, value_dim, scale)
    for span, planes in zip(reads.window_reads.spans, reads.spans, strict=True):
        own = slice(span.start, span.stop)
        if planes is None:
            keys = stored(latents[own], pages.dtype)  # the result of a prompt does not depend on its chunks
        else:
            keys = flat.index_select(0, planes[layer][0]).flatten(0, 1)[: span.length]
        out[own] = _span(q[own], keys.to(q.dtype), span_mask(span, q.device), value_dim, scale)
    return out


def _decode(q: Tensor, k: Tensor, bucket: Bucket, value_dim: int, scale: float) -> Tensor:
    """q: [rows, heads, dim]; k: [rows, length, dim]."""
    scores = torch.bmm(q, k.transpose(1, 2)).float().mul_(scale).add_(bucket.bias)
    return torch.bmm(scores.softmax(-1).to(q.dtype), k[..., :value_dim])


def _span(q: Tensor, k: Tensor, mask: Tensor, value_dim: int, scale: float) -> Tensor:
    """q: [tokens, heads, dim]; k: [length, dim]; mask: [tokens, length]. Slices of the queries limit the size of the
    scores."""
    tokens, heads, _ = q.shape
    step = max(1, SCORE_ELEMENTS // (heads * len(k)))
    pieces = []
    for at in range(0, tokens, step):
        scores = (q[at : at + step] @ k.t()).float().mul_(scale).add_(mask[at : at + step].unsqueeze(1))
        scores = scores.softmax(-1)
        pieces.append(scores.to(q.dtype) @ k[:, :value_dim])
    return torch.cat(pieces)
