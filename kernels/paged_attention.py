"""Attention of ragged rows over paged keys and values: softmax(scale · q kᵀ + mask) v, grouped heads, no copy of K or V
per query head.

What a step reads is planned once for each group of layers (`plan_reads`) and used by all of them: rows with one new
token go together in buckets of similar length, as one padded gather and two batched products for each KV head; each
longer row is one call of torch's fused attention over its own gathered pages, or over the step's own keys where nothing
precedes them. Position p reads positions max(0, p - window + 1) … p. `softcap` c: scores become c · tanh(s / c).

A masked score is -inf, so its weight is exactly 0; pages are finite (see paged_kv), so what it weighs does not matter.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

# Elements of one gather of keys: 16 MiB of fp32 stays in the last-level cache between the gather and its product.
GATHER_ELEMENTS = 1 << 22
# Elements of one score matrix of the softcap path, which has no fused kernel.
SCORE_ELEMENTS = 1 << 23


@dataclass(frozen=True)
class Bucket:
    """Rows with one token each, padded to the same number of blocks."""

    tokens: Tensor  # [rows] int64, where the row's token stands in the step
    planes: Tensor  # [layers, 2, rows · blocks] int64, pages of the flat view of K and V
    bias: Tensor  # [rows, 1, blocks · block_tokens] fp32, 0 or -inf


@dataclass(frozen=True)
class Span:
    """A row of several tokens. `planes` None: nothing precedes it, the step's own keys and values are all it reads.
    `mask` None: plain causal."""

    start: int
    stop: int
    length: int  # keys that are read
    planes: Tensor | None  # [layers, 2, blocks] int64
    mask: Tensor | None  # [tokens, length] fp32, 0 or -inf


@dataclass(frozen=True)
class Reads:
    buckets: tuple[Bucket, ...]
    spans: tuple[Span, ...]


def plan_reads(
    table: Tensor,
    first: Sequence[int],
    count: Sequence[int],
    *,
    layers: int,
    block_tokens: int,
    window: int | None,
    page_elements: int,
) -> Reads:
    """What the rows of a step read in one group. table: [rows, blocks] int64; row i computes `count[i]` positions from
    `first[i]`; page_elements: numbers in one layer's K of one block."""
    singles: list[tuple[int, int, int, int]] = []  # blocks, row, token, first block
    spans = []
    plane = torch.arange(2 * layers, device=table.device).view(layers, 2, 1)
    token = 0
    for row, (begin, size) in enumerate(zip(first, count, strict=True)):
        needed = 0 if window is None else max(0, begin - window + 1)
        low, high = needed // block_tokens, -(-(begin + size) // block_tokens)
        if size == 1:
            singles.append((high - low, row, token, low))
        else:
            blocks = table[row, low:high]
            spans.append(_span(blocks, begin, size, token, low * block_tokens, window, plane))
        token += size
    buckets = [
        _bucket(table, first, members, plane, block_tokens, window)
        for members in _similar(singles, max(1, GATHER_ELEMENTS // page_elements))
    ]
    return Reads(tuple(buckets), tuple(spans))


def paged_attention(
    q: Tensor, k: Tensor, v: Tensor, pages: Tensor, layer: int, reads: Reads, *, scale: float, softcap: float | None
) -> Tensor:
    """q: [tokens, heads, dim]; k, v: [tokens, kv_heads, dim], written to the pages already;
    pages: [blocks, layers, 2, block_tokens, kv_heads, dim] → [tokens, heads, dim] of q's type."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    flat = pages.view(-1, *pages.shape[-3:])  # [blocks · layers · 2, block_tokens, kv_heads, dim]
    for bucket in reads.buckets:
        rows, whole = bucket.tokens.shape[0], bucket.tokens.shape[0] == q.shape[0]
        some = q if whole else q.index_select(0, bucket.tokens)
        keys, values = (
            flat.index_select(0, planes).view(rows, -1, *pages.shape[-2:]).to(q.dtype)
            for planes in bucket.planes[layer]
        )
        result = _decode(some, keys, values, bucket.bias, scale, softcap)
        if whole:
            out = result
        else:
            out.index_copy_(0, bucket.tokens, result)
    for span in reads.spans:
        own = slice(span.start, span.stop)
        if span.planes is None:
            keys, values = k[own], v[own]
        else:
            keys, values = (
                flat.index_select(0, planes).flatten(0, 1)[: span.length].to(q.dtype) for planes in span.planes[layer]
            )
        attend = _fused if softcap is None else _capped
        out[own] = attend(q[own], keys, values, span.mask, scale, softcap)
    return out


def _decode(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, softcap: float | None) -> Tensor:
    """q: [rows, heads, dim]; k, v: [rows, length, kv_heads, dim]; bias: [rows, 1, length]."""
    rows, kv_heads = q.shape[0], k.shape[2]
    grouped = q.view(rows, kv_heads, -1, q.shape[-1])
    scores = torch.empty((kv_heads, rows, grouped.shape[2], k.shape[1]), dtype=q.dtype, device=q.device)
    for head in range(kv_heads):
        torch.bmm(grouped[:, head], k[:, :, head].transpose(1, 2), out=scores[head])
    scores.mul_(scale)
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    weights = scores.add_(bias).softmax(-1)
    out = torch.empty_like(grouped)
    for head in range(kv_heads):
        out[:, head] = torch.bmm(weights[head], v[:, :, head])
    return out.view_as(q)


def _fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float | None) -> Tensor:
    """q: [tokens, heads, dim]; k, v: [length, kv_heads, dim]. A KV head is a batch entry, its query heads its heads, so
    that K and V are shared by a stride of 0 and not repeated."""
    kv_heads = k.shape[1]
    grouped = q.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
    shape = (kv_heads, grouped.shape[1], k.shape[0], k.shape[2])
    keys, values = (x.permute(1, 0, 2).unsqueeze(1).expand(shape) for x in (k, v))
    bias = None if mask is None else mask.to(q.dtype)
    out = functional.scaled_dot_product_attention(
        grouped, keys, values, attn_mask=bias, is_causal=mask is None, scale=scale
    )
    return out.permute(2, 0, 1, 3).flatten(1, 2)


def _capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float | None) -> Tensor:
    """The same with softcap, in slices of the queries so that the scores stay small."""
    assert softcap is not None, "spans without softcap use the fused kernel"
    tokens, heads, _ = q.shape
    if mask is None:
        mask = _mask(tokens, 0, 0, tokens, None, q.device)
    step = max(1, SCORE_ELEMENTS // (heads * k.shape[0]))
    grouped = q.unflatten(1, (k.shape[1], -1)).permute(1, 2, 0, 3)
    keys, values = k.permute(1, 2, 0).unsqueeze(1), v.permute(1, 0, 2).unsqueeze(1)
    pieces = []
    for at in range(0, tokens, step):
        scores = (grouped[:, :, at : at + step] @ keys).mul_(scale).div_(softcap).tanh_().mul_(softcap)
        weights = scores.add_(mask[at : at + step]).softmax(-1)
        pieces.append(weights @ values)
    return torch.cat(pieces, 2).permute(2, 0, 1, 3).flatten(1, 2)


def _span(blocks: Tensor, first: int, count: int, token: int, low: int, window: int | None, plane: Tensor) -> Span:
    """`low`: position of the first key that the blocks hold."""
    stop = token + count
    if first == 0:
        masked = window is not None and window < count
        mask = _mask(count, 0, 0, count, window, blocks.device) if masked else None
        return Span(token, stop, count, None, mask)
    length = first + count - low
    return Span(
        token, stop, length, blocks * plane.numel() + plane, _mask(count, first, low, length, window, blocks.device)
    )


def _mask(count: int, first: int, low: int, length: int, window: int | None, device: torch.device) -> Tensor:
    """[count, length] fp32: 0 where position first + i reads position low + j, else -inf."""
    query = torch.arange(first, first + count, device=device).unsqueeze(1)
    key = torch.arange(low, low + length, device=device)
    hidden = key > query if window is None else (key > query) | (key <= query - window)
    return torch.zeros(hidden.shape, device=device).masked_fill_(hidden, float("-inf"))


def _similar(singles: list[tuple[int, int, int, int]], most: int) -> list[list[tuple[int, int, int, int]]]:
    """Cuts rows into buckets of at most `most` padded blocks in which no row is less than three quarters as long as the
    longest, a few blocks aside."""
    buckets: list[list[tuple[int, int, int, int]]] = []
    longest = 0
    for row in sorted(singles, key=lambda one: (-one[0], one[1])):
        if not buckets or row[0] < longest * 0.75 - 4 or (len(buckets[-1]) + 1) * longest > most:
            buckets.append([])
            longest = row[0]
        buckets[-1].append(row)
    return [sorted(bucket, key=lambda one: one[1]) for bucket in buckets]


def _bucket(
    table: Tensor,
    first: Sequence[int],
    members: list[tuple[int, int, int, int]],
    plane: Tensor,
    block_tokens: int,
    window: int | None,
) -> Bucket:
    device = table.device
    width = max(member[0] for member in members)
    rows = torch.tensor([member[1] for member in members], device=device)
    low = torch.tensor([member[3] for member in members], device=device).unsqueeze(1)
    position = torch.tensor([first[member[1]] for member in members], device=device).unsqueeze(1)
    # Past its own end a row reads its last column again; the bias hides it.
    columns = (low + torch.arange(width, device=device)).clamp_(max=table.shape[1] - 1)
    blocks = table[rows.unsqueeze(1), columns]
    key = low * block_tokens + torch.arange(width * block_tokens, device=device)
    hidden = key > position if window is None else (key > position) | (key <= position - window)
    bias = torch.zeros(hidden.shape, device=device).masked_fill_(hidden, float("-inf"))
    return Bucket(
        tokens=torch.tensor([member[2] for member in members], device=device),
        planes=blocks.flatten() * plane.numel() + plane,
        bias=bias.unsqueeze(1),
    )
