"""Attention of ragged rows over paged keys and values: softmax(scale · q kᵀ + mask) v, grouped heads, no copy of K or V
per query head.

The reads of a step are planned once, for each window (`causal_reads`) and each group of layers (`group_reads`), and
used by all of its layers. Rows with one new token are grouped in buckets of similar length, as one padded gather and
two batched products for each KV head. Each longer row is one call of torch's fused attention over its own gathered
pages, or over the step's own keys if no token precedes them. Position p reads positions max(0, p - window + 1) … p,
or with `chunk` positions floor(p / chunk) · chunk … p.
`softcap` c: scores become c · tanh(s / c). `slopes`: then the head's slope · (position of the key - position of the
query) is added (ALiBi). `biases`: the head's bias for that distance is added (T5). `sinks`: an additional logit of each
head, whose value is zero (kernels/attention/common.py).

A masked score is -inf, so its weight is exactly 0; pages are finite (see paged_kv), so masked values have no effect.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kernels.attention.common import distance_biases
from kernels.paged_kv import read, rounded

# Elements of one gather of keys: 16 MiB of fp32 stays in the last-level cache between the gather and its product.
GATHER_ELEMENTS = 1 << 22
# Elements of one score matrix of a softcap, of slopes, of biases or of sinks, for which there is no fused kernel.
SCORE_ELEMENTS = 1 << 23


@dataclass(frozen=True)
class Bucket:
    """Rows with one token each, padded to the same number of blocks."""

    tokens: Tensor  # [rows] int64, index of the row's token in the step
    rows: Tensor  # [rows, 1] int64, the row of the block table
    columns: Tensor  # [rows, blocks] int64, which of its blocks are read
    offset: Tensor  # [rows, 1, 1] int64, position of the first key that is read minus the position of the query
    bias: Tensor  # [rows, 1, blocks * block_tokens] fp32, 0 or -inf


@dataclass(frozen=True)
class Span:
    """A row of several tokens. `columns` None: no token precedes it, so it reads only the step's own keys and values.
    `mask` None: plain causal."""

    start: int
    stop: int
    row: int
    columns: slice | None
    length: int  # keys that are read
    mask: Tensor | None  # [tokens, length] fp32, 0 or -inf


@dataclass(frozen=True)
class WindowReads:
    """Reads of a step's rows under one window or chunk. Groups of layers with the same one share them."""

    buckets: tuple[Bucket, ...]
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Reads:
    """Reads of the pages of one group: planes of the flat view, [layers, planes, blocks] int64, for each bucket and for
    each span that reads pages."""

    window_reads: WindowReads
    buckets: tuple[Tensor, ...]
    spans: tuple[Tensor | None, ...]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the pages and tables that a step reads."""

    block_tokens: int
    columns: int  # blocks in a row of the tables
    page_elements: int  # elements in one layer's K of one block
    device: torch.device


def causal_reads(
    first: Sequence[int],
    count: Sequence[int],
    sizes: Sizes,
    *,
    window: int | None,
    chunk: int | None = None,
    key_starts: Sequence[int] | None = None,
    spans: Tensor | None = None,
) -> WindowReads:
    """Plan the reads of rows: row i computes `count[i]` positions from `first[i]`, and reads none before
    `key_starts[i]` (default: 0). spans: [tokens, 2] int64, begin and end of each token's span (see
    kernels/attention/prefill.py), which ends within its row; equal for none."""
    singles: list[_Single] = []
    several = []
    token = 0
    for row, (at, size, begin) in enumerate(zip(first, count, key_starts or (0,) * len(first), strict=True)):
        low = max(begin, 0 if window is None else at - window + 1, 0 if chunk is None else at // chunk * chunk)
        low //= sizes.block_tokens
        if size == 1:
            singles.append((at // sizes.block_tokens + 1 - low, row, token, low, at, begin))
        else:
            own = None if spans is None else spans[token : token + size]
            several.append(_span(row, at, size, token, low, begin, (window, chunk), sizes, own))
        token += size
    return WindowReads(_buckets(singles, (window, chunk), sizes), tuple(several))


def cross_reads(lengths: Sequence[int], count: Sequence[int], sizes: Sizes) -> WindowReads:
    """Plan reads without a causal mask: each of the `count[i]` tokens of row i reads the first `lengths[i]`
    positions."""
    singles: list[_Single] = []
    spans = []
    token = 0
    for row, (length, size) in enumerate(zip(lengths, count, strict=True)):
        blocks = -(-length // sizes.block_tokens)
        if size == 1:
            singles.append((blocks, row, token, 0, length - 1, 0))
        else:
            everything = torch.zeros((size, length), device=sizes.device)
            spans.append(Span(token, token + size, row, slice(0, blocks), length, everything))
        token += size
    return WindowReads(_buckets(singles, _ALL, sizes), tuple(spans))


def _buckets(singles: "list[_Single]", limits: "_Limits", sizes: Sizes) -> tuple[Bucket, ...]:
    most = max(1, GATHER_ELEMENTS // sizes.page_elements)
    return tuple(_bucket(members, limits, sizes) for members in _similar(singles, most))


def group_reads(window_reads: WindowReads, table: Tensor, layers: int, planes: int = 2) -> Reads:
    """table: [rows, blocks] int64, block ids of one group, whose blocks hold `layers` layers."""
    plane = torch.arange(planes * layers, device=table.device).view(layers, planes, 1)

    def places(blocks: Tensor) -> Tensor:
        return blocks.flatten() * (planes * layers) + plane

    return Reads(
        window_reads,
        tuple(places(table[bucket.rows, bucket.columns]) for bucket in window_reads.buckets),
        tuple(None if span.columns is None else places(table[span.row, span.columns]) for span in window_reads.spans),
    )


def paged_attention(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    pages: Tensor,
    layer: int,
    reads: Reads,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    biases: Tensor | None = None,
) -> Tensor:
    """q: [tokens, heads, dim]; k, v: [tokens, kv_heads, dim], written to the pages already, or None where only pages
    are read; pages: [blocks, layers, 2, block_tokens, kv_heads, dim]; sinks, slopes: [heads]; biases: [heads, 2 · reach
    + 1], see `distance_biases` → [tokens, heads, dim] of q's type."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    flat = pages.view(-1, *pages.shape[-3:])  # [blocks · layers · 2, block_tokens, kv_heads, dim]
    for bucket, planes in zip(reads.window_reads.buckets, reads.buckets, strict=True):
        rows, whole = bucket.tokens.shape[0], bucket.tokens.shape[0] == q.shape[0]
        some = q if whole else q.index_select(0, bucket.tokens)
        keys, values = (
            read(flat.index_select(0, plane), q.dtype).view(rows, -1, pages.shape[-2], q.shape[-1])
            for plane in planes[layer]
        )
        result = _decode(some, keys, values, bucket, scale, softcap, sinks, slopes, biases)
        if whole:
            return result
        out.index_copy_(0, bucket.tokens, result)
    for span, planes in zip(reads.window_reads.spans, reads.spans, strict=True):
        own = slice(span.start, span.stop)
        if planes is None:
            assert k is not None and v is not None, "a row that reads no pages reads its own keys"
            keys, values = k[own], v[own]
            if pages.dtype != q.dtype:  # the result of a prompt does not depend on its chunks
                keys, values = (rounded(x, pages.dtype) for x in (keys, values))
        else:
            keys, values = (
                read(flat.index_select(0, plane).flatten(0, 1)[: span.length], q.dtype) for plane in planes[layer]
            )
        if softcap is None and sinks is None and slopes is None and biases is None:
            out[own] = _fused(q[own], keys, values, span.mask, scale)
        else:
            out[own] = _by_scores(q[own], keys, values, span.mask, scale, softcap, sinks, slopes, biases)
    return out


def _decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bucket: Bucket,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    slopes: Tensor | None,
    biases: Tensor | None,
) -> Tensor:
    """q: [rows, heads, dim]; k, v: [rows, length, kv_heads, dim]."""
    rows, kv_heads = q.shape[0], k.shape[2]
    grouped = q.view(rows, kv_heads, -1, q.shape[-1])
    scores = torch.empty((kv_heads, rows, grouped.shape[2], k.shape[1]), dtype=q.dtype, device=q.device)
    for head in range(kv_heads):
        torch.bmm(grouped[:, head], k[:, :, head].transpose(1, 2), out=scores[head])
    scores.mul_(scale)
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    if slopes is not None:
        distance = bucket.offset + torch.arange(k.shape[1], device=k.device)  # [rows, 1, length]
        scores.addcmul_(slopes.view(kv_heads, 1, -1, 1), distance.float())
    if biases is not None:
        distance = bucket.offset.squeeze(2) + torch.arange(k.shape[1], device=k.device)  # [rows, length]
        scores.add_(distance_biases(biases, distance).unflatten(0, (kv_heads, -1)).transpose(1, 2))
    weights = _weights(scores.add_(bucket.bias), None if sinks is None else sinks.view(kv_heads, 1, -1))
    out = torch.empty_like(grouped)
    for head in range(kv_heads):
        out[:, head] = torch.bmm(weights[head], v[:, :, head])
    return out.view_as(q)


def _weights(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """softmax of [.., queries, length]; sinks: one for each [.., queries], or fit to be expanded."""
    if sinks is None:
        return scores.softmax(-1)
    sink = sinks.to(scores.dtype).expand(scores.shape[:-1]).unsqueeze(-1)
    return torch.cat((scores, sink), -1).softmax(-1)[..., :-1]


def _fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """q: [tokens, heads, dim]; k, v: [length, kv_heads, dim]. A KV head is a batch entry with its query heads as heads,
    so that K and V are shared by a stride of 0 instead of a copy."""
    kv_heads = k.shape[1]
    grouped = q.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
    shape = (kv_heads, grouped.shape[1], k.shape[0], k.shape[2])
    keys, values = (x.permute(1, 0, 2).unsqueeze(1).expand(shape) for x in (k, v))
    bias = None if mask is None else mask.to(q.dtype)
    out = functional.scaled_dot_product_attention(
        grouped, keys, values, attn_mask=bias, is_causal=mask is None, scale=scale
    )
    return out.permute(2, 0, 1, 3).flatten(1, 2)


def _by_scores(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    slopes: Tensor | None,
    biases: Tensor | None,
) -> Tensor:
    """Compute attention with softcap, slopes, biases or sinks, in slices of the queries that limit the size of the
    scores. The last key has the position of the last query."""
    tokens, heads, _ = q.shape
    if mask is None:
        mask = _mask(tokens, 0, 0, tokens, _ALL, 0, q.device)
    step = max(1, SCORE_ELEMENTS // (heads * k.shape[0]))
    grouped = q.unflatten(1, (k.shape[1], -1)).permute(1, 2, 0, 3)
    keys, values = k.permute(1, 2, 0).unsqueeze(1), v.permute(1, 0, 2).unsqueeze(1)
    own = None if sinks is None else sinks.view(k.shape[1], -1, 1)
    pieces = []
    for at in range(0, tokens, step):
        scores = (grouped[:, :, at : at + step] @ keys).mul_(scale)
        if softcap is not None:
            scores.div_(softcap).tanh_().mul_(softcap)
        if slopes is not None:
            query = torch.arange(at, at + scores.shape[2], device=k.device).unsqueeze(1)
            distance = torch.arange(tokens - k.shape[0], tokens, device=k.device) - query
            scores.addcmul_(slopes.view(k.shape[1], -1, 1, 1), distance.float())
        if biases is not None:
            query = torch.arange(at, at + scores.shape[2], device=k.device).unsqueeze(1)
            distance = torch.arange(tokens - k.shape[0], tokens, device=k.device) - query
            scores.add_(distance_biases(biases, distance).unflatten(0, (k.shape[1], -1)))
        pieces.append(_weights(scores.add_(mask[at : at + step]), own) @ values)
    return torch.cat(pieces, 2).permute(2, 0, 1, 3).flatten(1, 2)


_Single = tuple[int, int, int, int, int, int]  # blocks, row, token, first block, position, first position
_Limits = tuple[int | None, int | None]  # window and chunk
_ALL: _Limits = (None, None)


def _span(
    row: int,
    first: int,
    count: int,
    token: int,
    low: int,
    begin: int,
    limits: _Limits,
    sizes: Sizes,
    spans: Tensor | None = None,
) -> Span:
    """low: the first block that is read. begin: the first position that is read without a window or chunks. spans: of
    its tokens."""
    stop, device = token + count, sizes.device
    if first == begin:
        masked = spans is not None or any(limit is not None and limit < count for limit in limits)
        mask = _mask(count, first, first, count, limits, begin, device, spans) if masked else None
        return Span(token, stop, row, None, count, mask)
    at = low * sizes.block_tokens
    length = first + count - at
    columns = slice(low, -(-(first + count) // sizes.block_tokens))
    return Span(token, stop, row, columns, length, _mask(count, first, at, length, limits, begin, device, spans))


def span_mask(span: Span, device: torch.device) -> Tensor:
    """Return the mask of a row of several tokens, [tokens, length] fp32, also if it is plain causal."""
    count = span.stop - span.start
    return _mask(count, 0, 0, count, _ALL, 0, device) if span.mask is None else span.mask


def _mask(
    count: int,
    first: int,
    low: int,
    length: int,
    limits: _Limits,
    begin: int,
    device: torch.device,
    spans: Tensor | None = None,
) -> Tensor:
    """[count, length] fp32: 0 where position first + i reads position low + j, else -inf."""
    query = torch.arange(first, first + count, device=device).unsqueeze(1)
    return _bias(query, torch.arange(low, low + length, device=device), limits, begin, spans)


def _bias(query: Tensor, key: Tensor, limits: _Limits, begin: Tensor | int, spans: Tensor | None = None) -> Tensor:
    """Return 0 where the position `query` reads the position `key`, else -inf. Positions before `begin` are not
    read."""
    window, chunk = limits
    hidden = key > query
    if chunk is not None:
        hidden |= key < query - query % chunk
    if window is not None:
        hidden |= key <= query - window
    if spans is not None:
        hidden &= (key < spans[:, :1]) | (key >= spans[:, 1:])
    hidden |= key < begin
    return torch.zeros(hidden.shape, device=key.device).masked_fill_(hidden, float("-inf"))


def _similar(singles: list[_Single], most: int) -> list[list[_Single]]:
    """Group rows into buckets of at most `most` padded blocks. The shortest row of a bucket has at least three quarters
    of the blocks of the longest, minus four."""
    buckets: list[list[_Single]] = []
    longest = 0
    for single in sorted(singles, key=lambda one: (-one[0], one[1])):
        if not buckets or single[0] < longest * 0.75 - 4 or (len(buckets[-1]) + 1) * longest > most:
            buckets.append([])
            longest = single[0]
        buckets[-1].append(single)
    return [sorted(bucket, key=lambda one: one[1]) for bucket in buckets]


def _bucket(members: list[_Single], limits: _Limits, sizes: Sizes) -> Bucket:
    table = torch.tensor(members, device=sizes.device)
    _, rows, tokens, *places = table.unbind(1)
    width = max(member[0] for member in members)
    low, position, begin = (place.unsqueeze(1) for place in places)
    key = low * sizes.block_tokens + torch.arange(width * sizes.block_tokens, device=sizes.device)
    # After its own end a row reads the last column again; the bias masks it.
    reached = (low + torch.arange(width, device=sizes.device)).clamp_(max=sizes.columns - 1)
    offset = (low * sizes.block_tokens - position).unsqueeze(1)
    return Bucket(tokens, rows.unsqueeze(1), reached, offset, _bias(position, key, limits, begin).unsqueeze(1))
