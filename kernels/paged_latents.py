"""Latent attention of ragged rows over paged latents: softmax(scale · q kᵀ + mask) v, where k is a token's latent and
shared key, and v the latent alone. All query heads read the same k. Sparse attention reads only the keys that
`select_paged_keys` selects by the keys of an indexer (arXiv:2512.02556, section 2.1).

Reads are planned as those of keys and values (kernels/paged_attention.py), from pages with a single plane. Scores and
weights are fp32. Source: arXiv:2405.04434, section 2.1, with absorbed matrices.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.paged_attention import SCORE_ELEMENTS, Reads, span_mask
from kernels.paged_kv import stored


def paged_latent_attention(
    q: Tensor,
    latents: Tensor,
    pages: Tensor,
    layer: int,
    reads: Reads,
    *,
    value_dim: int,
    scale: float,
    selected: Tensor | None = None,
) -> Tensor:
    """q: [tokens, heads, dim], absorbed; latents: [tokens, dim], written to the pages already; pages: [blocks, layers,
    1, block_tokens, 1, dim]; selected: [tokens, top_k] int32, positions of the keys that are read, with -1 after them →
    [tokens, heads, value_dim] of q's type."""
    out = torch.empty((*q.shape[:2], value_dim), dtype=q.dtype, device=q.device)
    for tokens, keys, mask in _gathered(latents, pages, layer, reads):
        if selected is not None:
            mask = mask + _selection_mask(selected[tokens], mask.shape[-1])
        if isinstance(tokens, Tensor):
            out[tokens] = _decode(q[tokens], keys.to(q.dtype), mask, value_dim, scale)
        else:
            out[tokens] = _span(q[tokens], keys.to(q.dtype), mask, value_dim, scale)
    return out


def select_paged_keys(
    q: Tensor, weights: Tensor, keys: Tensor, pages: Tensor, layer: int, reads: Reads, *, top_k: int
) -> Tensor:
    """q: [tokens, heads, dim]; weights: [tokens, heads]; keys: [tokens, dim], written to the pages already; pages:
    [blocks, layers, 1, block_tokens, 1, dim] → [tokens, top_k] int32: for each token the positions with the largest
    Σ weight · max(q · key, 0), the first among equals, in ascending order, with -1 after them."""
    out = torch.full((len(q), top_k), -1, dtype=torch.int32, device=q.device)
    for tokens, read, mask in _gathered(keys, pages, layer, reads):
        some, wide = weights[tokens].float(), read.float()
        step = max(1, SCORE_ELEMENTS // (q.shape[1] * mask.shape[-1]))
        pieces = []
        for at in range(0, len(some), step):
            own = slice(at, at + step)
            products = q[tokens][own].float() @ (wide[own] if wide.ndim == 3 else wide).transpose(-1, -2)
            pieces.append((products.relu_() * some[own].unsqueeze(2)).sum(1).add_(mask[own]))
        scores = torch.cat(pieces)
        best = scores.sort(dim=-1, descending=True, stable=True)
        count = min(top_k, scores.shape[1])
        hidden = best.values[:, :count] == float("-inf")
        found = best.indices[:, :count].masked_fill(hidden, scores.shape[1]).sort(-1).values
        out[tokens, :count] = found.masked_fill(found == scores.shape[1], -1).int()
    return out


def _gathered(own: Tensor, pages: Tensor, layer: int, reads: Reads) -> Iterator[tuple[Tensor | slice, Tensor, Tensor]]:
    """Yield the rows of a step: the indexes of their tokens, the vectors that the tokens read, from position 0 on, and
    a mask, [tokens, length] fp32, -inf for those that a token does not see.

    Rows of one token come together, with vectors [tokens, length, dim]; a row of several tokens has [length, dim]. own:
    [tokens, dim], vectors of the step's tokens, in the type of the activations.
    """
    flat = pages.view(-1, pages.shape[3], pages.shape[-1])  # [blocks · layers, block_tokens, dim]
    for bucket, planes in zip(reads.window_reads.buckets, reads.buckets, strict=True):
        read = flat.index_select(0, planes[layer][0]).view(len(bucket.tokens), -1, pages.shape[-1])
        yield bucket.tokens, read, bucket.bias.squeeze(1)
    for span, planes in zip(reads.window_reads.spans, reads.spans, strict=True):
        tokens = slice(span.start, span.stop)
        if planes is None:
            read = stored(own[tokens], pages.dtype)  # the result of a prompt does not depend on its chunks
        else:
            read = flat.index_select(0, planes[layer][0]).flatten(0, 1)[: span.length]
        yield tokens, read, span_mask(span, own.device)


def _selection_mask(selected: Tensor, length: int) -> Tensor:
    """Return 0 for selected positions, else -inf, [tokens, length] fp32. selected: [tokens, top_k], negative after the
    last."""
    mask = torch.full((len(selected), length + 1), float("-inf"), device=selected.device)
    mask.scatter_(1, selected.long().masked_fill(selected < 0, length), 0.0)
    return mask[:, :length]


def _decode(q: Tensor, k: Tensor, mask: Tensor, value_dim: int, scale: float) -> Tensor:
    """q: [rows, heads, dim]; k: [rows, length, dim]; mask: [rows, length]."""
    scores = torch.bmm(q, k.transpose(1, 2)).float().mul_(scale).add_(mask.unsqueeze(1))
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
