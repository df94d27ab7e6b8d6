"""Selection of the keys that sparse attention reads (DeepSeek sparse attention, arXiv:2512.02556, section 2.1). Token t
of a row reads the `top_k` positions s ≤ t with the largest

    score[t, s] = Σ_h weights[t, h] · max(q[t, h] · key[s], 0)

and the first among equals. Positions are written in ascending order, with -1 after them if there are fewer. Pages:
[blocks, layers, 1, block_tokens, 1, dim].

A program takes one token after another. It writes the scores of a token to memory of its own, finds the score of the
last key by a search that tests eight values at once, and writes the positions that reach it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.attention.common import SCORE_ELEMENTS, check_heads, page_inputs, row_of_token
from kernels.jit import jit, launch, power_of_2, resident_programs, tl
from kernels.op import Args, Case, Make, Op
from kernels.sampling.float_order import order_key
from kernels.tuning import settings


def _reference(
    q: Tensor,
    weights: Tensor,
    pages: Tensor,
    layer: int,
    table: Tensor,
    slot: Tensor,
    query_start: Tensor,
    lengths: Tensor,
    selected: Tensor,
) -> tuple[Tensor]:
    """q: [tokens, heads, dim]; weights: [tokens, heads] fp32; pages: of q's type; table: [slots, blocks] int32, where
    line slot[i] belongs to row i of the step; slot, lengths: [rows] int32; query_start: [rows + 1] int32 → selected:
    [tokens, top_k] int32."""
    top_k, block_tokens = selected.shape[1], pages.shape[3]
    for row, (first, stop) in enumerate(zip(query_start.tolist(), query_start.tolist()[1:], strict=False)):
        length = int(lengths[row])
        if stop == first or not length:
            continue
        blocks = table[slot[row], : -(-length // block_tokens)].long()
        keys = pages[blocks, layer, 0, :, 0].flatten(0, 1)[:length].float()
        step = max(1, SCORE_ELEMENTS // (q.shape[1] * length))
        for at in range(first, stop, step):
            end = min(at + step, stop)
            products = torch.einsum("thd,ld->thl", q[at:end].float(), keys).relu_()
            scores = (products * weights[at:end].unsqueeze(2)).sum(1)
            position = length - stop + torch.arange(at, end, device=q.device)
            hidden = torch.arange(length, device=q.device) > position[:, None]
            order = scores.masked_fill(hidden, float("-inf")).sort(dim=1, descending=True, stable=True)
            found = order.indices[:, :top_k]
            found = found.masked_fill(found > position[:, None], length).sort(dim=1).values
            selected[at:end] = -1
            selected[at:end, : found.shape[1]] = found.masked_fill(found == length, -1).int()
    return (selected,)


@jit
def _threshold(scores, keys, top_k, CHUNK: tl.constexpr):
    """Return the order key of the score of the last selected position, and the number of larger scores."""
    pivot = tl.arange(0, 8)
    low = tl.full((), -2147483648, tl.int64)
    high = tl.full((), 2147483648, tl.int64)
    above = tl.full((), 0, tl.int32)
    while high - low > 1:
        value = low + (high - low) * (pivot + 1).to(tl.int64) // 9
        counts = tl.zeros((8,), tl.int32)
        for start in range(0, keys, CHUNK):
            at = start + tl.arange(0, CHUNK)
            key = order_key(tl.load(scores + at, at < keys, 0.0)).to(tl.int64)
            counts += tl.sum(((key[:, None] >= value[None, :]) & (at < keys)[:, None]).to(tl.int32), 0)
        enough = counts >= top_k
        above = tl.max(tl.where(enough, above, counts), 0)
        low, high = tl.max(tl.where(enough, value, low), 0), tl.min(tl.where(enough, high, value), 0)
    return low.to(tl.int32), above


@jit(varying=("layer", "rows", "tokens", "table_row", "capacity"))
def select_keys_kernel(
    q,
    weights,
    pages,
    table,
    slot,
    query_start,
    lengths,
    selected,
    scores,
    layer,
    rows,
    tokens,
    q_row,
    weights_row,
    table_row,
    capacity,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TOP_K: tl.constexpr,
    LAYERS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDE: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The last tokens of a row read the most keys, so they start first."""
    own = scores + tl.program_id(0).to(tl.int64) * capacity
    head, dim = tl.arange(0, GROUP), tl.arange(0, WIDE)
    for number in range(tl.program_id(0), tokens, tl.num_programs(0)):
        token = tokens - 1 - number
        row = row_of_token(token, query_start, rows)
        row_end = tl.load(query_start + row + 1)
        at_token = token.to(tl.int64)
        out = selected + at_token * TOP_K
        keys = tl.load(lengths + row) - (row_end - 1 - token)
        if (token < row_end) & (keys <= TOP_K):
            for start in range(0, TOP_K, CHUNK):
                at = start + tl.arange(0, CHUNK)
                tl.store(out + at, tl.where(at < keys, at, -1), at < TOP_K)
        elif token < row_end:
            line = table + tl.load(slot + row).to(tl.int64) * table_row
            place = q + at_token * q_row + head[:, None] * DIM + dim[None, :]
            queries = tl.load(place, (head < HEADS)[:, None] & (dim < DIM)[None, :], 0.0)
            factor = tl.load(weights + at_token * weights_row + head, head < HEADS, 0.0)[:, None]
            for start in range(0, keys, TILE):
                at_key = start + tl.arange(0, TILE)
                seen = at_key < keys
                block = tl.load(line + at_key // BLOCK_TOKENS, seen, 0).to(tl.int64)
                at_page = pages + ((block * LAYERS + layer) * BLOCK_TOKENS + at_key % BLOCK_TOKENS) * DIM
                vectors = tl.load(at_page[:, None] + dim[None, :], seen[:, None] & (dim < DIM)[None, :], 0.0)
                products = tl.dot(queries, tl.trans(vectors), input_precision="ieee")
                tl.store(own + at_key, tl.sum(tl.maximum(products, 0.0) * factor, 0), seen)
            tl.debug_barrier()
            threshold, above = _threshold(own, keys, TOP_K, CHUNK)
            written = tl.full((), 0, tl.int32)
            ties = tl.full((), 0, tl.int32)
            for start in range(0, keys, CHUNK):
                position = start + tl.arange(0, CHUNK)
                key = order_key(tl.load(own + position, position < keys, 0.0))
                equal = (position < keys) & (key == threshold)
                place_of_tie = ties + tl.cumsum(equal.to(tl.int32), 0)
                keep = (position < keys) & ((key > threshold) | (equal & (place_of_tie <= TOP_K - above)))
                tl.store(out + written + tl.cumsum(keep.to(tl.int32), 0) - 1, position, keep)
                written += tl.sum(keep.to(tl.int32), 0)
                ties += tl.sum(equal.to(tl.int32), 0)
            tl.debug_barrier()  # the next token overwrites the scores


def _triton(
    q: Tensor,
    weights: Tensor,
    pages: Tensor,
    layer: int,
    table: Tensor,
    slot: Tensor,
    query_start: Tensor,
    lengths: Tensor,
    selected: Tensor,
) -> tuple[Tensor]:
    tokens, heads, dim = q.shape
    if pages.dtype != q.dtype:
        raise ValueError(f"pages: {pages.dtype} where q is {q.dtype}; both must have the same type")
    if not pages.is_contiguous() or pages.shape[2] != 1 or pages.shape[4] != 1 or pages.shape[5] != dim:
        raise ValueError(
            f"pages {tuple(pages.shape)}: must be contiguous, [blocks, layers, 1, block_tokens, 1, dim], with the dim "
            f"of q, {dim}"
        )
    if not selected.is_contiguous() or selected.dtype != torch.int32:
        raise ValueError("selected: must be contiguous int32")
    programs, capacity = min(resident_programs(q.device, each=2), tokens), table.shape[1] * pages.shape[3]
    scores = torch.empty((programs, capacity), dtype=torch.float32, device=q.device)
    group = max(16, power_of_2(heads))
    size = {"heads": group, "dim": power_of_2(dim), "size": q.element_size()}
    chosen = settings("select_keys", {"tile": 64, "warps": 4, "stages": 2}, q.device, **size)
    launch(
        select_keys_kernel,
        (programs if len(lengths) else 0,),
        q,
        weights,
        pages,
        table,
        slot,
        query_start,
        lengths,
        selected,
        scores,
        layer,
        lengths.shape[0],
        tokens,
        check_heads(q, "q"),
        weights.stride(0),
        table.stride(0),
        capacity,
        HEADS=heads,
        DIM=dim,
        TOP_K=selected.shape[1],
        LAYERS=pages.shape[1],
        BLOCK_TOKENS=pages.shape[3],
        GROUP=group,
        WIDE=max(16, power_of_2(dim)),
        TILE=chosen["tile"],
        CHUNK=256,
        warps=chosen["warps"],
        stages=chosen["stages"],
    )
    return (selected,)


def _inputs(
    make: Make,
    rows: Sequence[tuple[int, int]],
    heads: int,
    dim: int,
    top_k: int,
    block_tokens: int = 4,
    layers: int = 2,
    equal: bool = False,
) -> Args:
    """equal: round the inputs, so that many scores are equal."""
    tokens = sum(count for count, _ in rows)
    q, weights = make.normal(tokens, heads, dim), make.normal(tokens, heads, dtype=torch.float32)
    pages, *places = page_inputs(make, rows, dim, block_tokens, layers)
    if equal and not make.meta:
        q, weights, pages = q.round(), weights.round(), pages.round()
    selected = torch.empty((tokens, top_k), dtype=torch.int32, device=make.device)
    return q, weights, pages, *places, selected


def single_row_of(*by_token: int, lengths: int) -> Callable[..., Any]:
    """Return `Op.single_row` for arguments with slot, query_start and lengths in this order, `lengths` at this place.
    The arguments at `by_token` and the output have a row for each token."""

    def single_row(args: Args, row: int) -> tuple[Args, Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]]:
        slot, start, length = args[lengths - 2 : lengths + 1]
        tokens = slice(int(start[row]), int(start[row + 1]))
        own = [arg[tokens] if at in by_token else arg for at, arg in enumerate(args)]
        line = slice(row, row + 1)
        own[lengths - 2 : lengths + 1] = slot[line], start[row : row + 2] - start[row], length[line]
        return tuple(own), lambda outputs: (outputs[0][tokens],)

    return single_row


def _traffic(*args: Any) -> int:
    q, weights, pages, _, _, _, query_start, lengths, selected = args
    if lengths.is_meta:
        return int(pages.nbytes // pages.shape[1] + q.nbytes + selected.nbytes)
    counts = query_start.diff().tolist()
    keys = sum(length for count, length in zip(counts, lengths.tolist(), strict=True) if count)
    return int(keys * pages[0, 0, 0, 0].nbytes + q.nbytes + weights.nbytes + selected.nbytes)


def _operations(*args: Any) -> int:
    q, _, _, _, _, _, query_start, lengths, _ = args
    if lengths.is_meta:
        return 0
    counts = zip(query_start.diff().tolist(), lengths.tolist(), strict=True)
    total = sum(count * length - count * (count - 1) // 2 for count, length in counts)
    return int(2 * total * q.shape[1] * q.shape[2])


DEEPSEEK = {"heads": 64, "dim": 128, "top_k": 2048, "block_tokens": 16, "layers": 1}
SMALL = {"heads": 5, "dim": 16, "top_k": 6}

SELECT_KEYS = Op(
    name="select_keys",
    reference=_reference,
    triton=_triton,
    inputs=_inputs,
    cases=(
        Case("one", SMALL | {"rows": ((1, 1),)}),
        Case("mixed", SMALL | {"rows": ((1, 37), (3, 9), (0, 0), (4, 70), (1, 6), (7, 7))}),
        Case("long", SMALL | {"rows": ((1, 1100), (2, 513)), "top_k": 600, "block_tokens": 16}),
        Case("equal", SMALL | {"rows": ((2, 60), (5, 30)), "top_k": 16, "equal": True}),
        Case("first", {"rows": ((4, 20),), "heads": 17, "dim": 10, "top_k": 1}),
        Case("empty", SMALL | {"rows": ()}),
        Case("64x8192", DEEPSEEK | {"rows": ((1, 8192),) * 64}, bench=True),
        Case("1x65536", DEEPSEEK | {"rows": ((1, 65536),)}, bench=True),
        Case("4096", DEEPSEEK | {"rows": ((4096, 4096),)}, bench=True),
        Case("1024-of-8192-glm", DEEPSEEK | {"rows": ((1024, 8192),), "heads": 32}, bench=True),
    ),
    tolerance=dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), 0.0),
    traffic=_traffic,
    flops=_operations,
    single_row=single_row_of(0, 1, 8, lengths=7),
    rows=lambda args: args[7].shape[0],
    strided=(0, 1),
    tunable={"tile": (32, 64, 128), "warps": (4, 8), "stages": (2, 3)},
)
