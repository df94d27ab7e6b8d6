"""Sparse latent attention: each token reads the keys at the positions that kernels/attention/select.py selected
(DeepSeek sparse attention, arXiv:2512.02556, section 2.1). Keys and sums are those of kernels/attention/latent.py:

    out[t, h] = softmax(scale · q[t, h] kᵀ) k[:, : rank]

A program has up to 16 heads of a token, and reads its keys in the order of their positions, in splits of 128 or 256
keys. If a step has fewer programs than run at the same time, each split is a program, and a second launch adds them up
in the same order: the result of a token is the same in every step, bit for bit. Rows with one token and with several
take the same path.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.attention.common import LOG2_E, add_scaled, check_heads, final_factor, page_inputs, row_of_token
from kernels.attention.latent import attend_tile, check_latents, kernel_sizes, latent_settings, load_queries
from kernels.attention.select import single_row_of
from kernels.jit import jit, launch, power_of_2, resident_programs, tl
from kernels.op import Args, Case, Make, Op

HEADS_AT_ONCE = 16


def _reference(
    q: Tensor,
    pages: Tensor,
    layer: int,
    table: Tensor,
    slot: Tensor,
    query_start: Tensor,
    lengths: Tensor,
    selected: Tensor,
    out: Tensor,
    scale: float,
) -> tuple[Tensor]:
    """q: [tokens, heads, dim]; pages: [blocks, layers, 1, block_tokens, 1, dim] of q's type; table: [slots, blocks]
    int32, where line slot[i] belongs to row i of the step; slot, lengths: [rows] int32; query_start: [rows + 1] int32;
    selected: [tokens, top_k] int32, as SELECT_KEYS writes them → out: [tokens, heads, rank]."""
    rank, block_tokens = out.shape[2], pages.shape[3]
    for row, (first, stop) in enumerate(zip(query_start.tolist(), query_start.tolist()[1:], strict=False)):
        for token in range(first, stop):
            position = selected[token][selected[token] >= 0].long()
            blocks = table[slot[row].long(), position // block_tokens].long()
            keys = pages[blocks, layer, 0, position % block_tokens, 0].float()
            weights = (q[token].float() @ keys.T * scale).softmax(-1)
            out[token] = (weights @ keys[:, :rank]).to(out.dtype)
    return (out,)


@jit
def _attend_selected(
    q_latent,
    q_key,
    pages,
    line,
    chosen,
    start,
    stop,
    layer,
    scale,
    LAYERS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    DIM: tl.constexpr,
    RANK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Attend to the selected keys from number `start` to `stop` → sums of weighted latents, the largest score, and the
    sum of weights (kernels/attention/common.py). chosen: pointer to the token's positions."""
    GROUP: tl.constexpr = q_latent.shape[0]
    part = tl.zeros([GROUP, q_latent.shape[1]], tl.float32)
    top = tl.full([GROUP], -1.0e30, tl.float32)
    weights = tl.zeros([GROUP, TILE], tl.float32)  # summed over the tiles, and over their keys at the end
    for tile in range(start, stop, TILE):
        number = tile + tl.arange(0, TILE)
        seen = number < stop
        position = tl.load(chosen + number, seen, 0)
        block = tl.load(line + position // BLOCK_TOKENS, seen, 0).to(tl.int64)
        place = pages + ((block * LAYERS + layer) * BLOCK_TOKENS + position % BLOCK_TOKENS) * DIM
        part, top, weights = attend_tile(q_latent, q_key, place, seen, part, top, weights, scale, DIM, RANK)
    return part, top, tl.sum(weights, 1)


@jit
def _joined(acc, top, total, part, part_top, part_total):
    """Return the state of a softmax with that of a further split."""
    best = tl.maximum(top, part_top)
    keep = tl.exp2(top - best)
    add = tl.exp2(part_top - best)
    return add_scaled(acc, keep, part, add), best, tl.fma(total, keep, part_total * add)


@jit(varying=("layer", "rows", "table_row"))
def sparse_latent_kernel(
    q,
    pages,
    table,
    slot,
    query_start,
    lengths,
    selected,
    out,
    sums,
    stats,
    layer,
    rows,
    q_row,
    out_row,
    table_row,
    scale,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    RANK: tl.constexpr,
    TOP_K: tl.constexpr,
    LAYERS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDE: tl.constexpr,
    KEY: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    DIVIDED: tl.constexpr,
):
    """One program for each token and block of heads, and with DIVIDED for each split of the keys."""
    token = tl.program_id(1)
    row = row_of_token(token, query_start, rows)
    row_end = tl.load(query_start + row + 1)
    keys = tl.minimum(tl.load(lengths + row) - (row_end - 1 - token), TOP_K)
    first = tl.program_id(2) * SPLIT
    if (token < row_end) & (first < keys):
        line = table + tl.load(slot + row).to(tl.int64) * table_row
        heads = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
        at_token = token.to(tl.int64)
        q_latent, q_key = load_queries(q + at_token * q_row, heads, HEADS, DIM, RANK, WIDE, KEY)
        chosen = selected + at_token * TOP_K
        end = keys
        if DIVIDED:
            end = tl.minimum(first + SPLIT, keys)
        acc = tl.zeros([GROUP, WIDE], tl.float32)
        top = tl.full([GROUP], -1.0e30, tl.float32)
        total = tl.zeros([GROUP], tl.float32)
        for start in range(first, end, SPLIT):
            stop = tl.minimum(start + SPLIT, end)
            part, part_top, part_total = _attend_selected(
                q_latent, q_key, pages, line, chosen, start, stop, layer, scale, LAYERS, BLOCK_TOKENS, DIM, RANK, TILE
            )
            acc, top, total = _joined(acc, top, total, part, part_top, part_total)
        live = heads < HEADS
        mask = live[:, None] & (tl.arange(0, WIDE) < RANK)[None, :]
        spot = heads[:, None] * RANK + tl.arange(0, WIDE)[None, :]
        if DIVIDED and keys > SPLIT:
            item = at_token * tl.num_programs(2) + tl.program_id(2)
            tl.store(sums + item * (HEADS * RANK) + spot, acc, mask)
            tl.store(stats + item * (2 * HEADS) + heads, top, live)
            tl.store(stats + item * (2 * HEADS) + HEADS + heads, total, live)
        else:
            factor = final_factor(top, total, 0.0, 1.0, False)[:, None]
            tl.store(out + at_token * out_row + spot, (acc * factor).to(out.dtype.element_ty), mask)


@jit(varying=("rows",))
def sparse_reduce_kernel(
    query_start,
    lengths,
    out,
    sums,
    stats,
    rows,
    out_row,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    TOP_K: tl.constexpr,
    WIDE: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Add up the splits of one head of a token, in the order of their keys."""
    token = tl.program_id(1)
    row = row_of_token(token, query_start, rows)
    row_end = tl.load(query_start + row + 1)
    keys = tl.minimum(tl.load(lengths + row) - (row_end - 1 - token), TOP_K)
    if (token < row_end) & (keys > SPLIT):
        at, head, at_token = tl.arange(0, WIDE), tl.program_id(0), token.to(tl.int64)
        acc = tl.zeros([1, WIDE], tl.float32)
        top = tl.full([1], -1.0e30, tl.float32)
        total = tl.zeros([1], tl.float32)
        for number in range(0, (keys + SPLIT - 1) // SPLIT):
            item = at_token * SPLITS + number
            part = tl.load(sums + item * (HEADS * RANK) + head * RANK + at, at < RANK, 0.0)[None, :]
            at_stats = stats + item * (2 * HEADS) + head + tl.arange(0, 1)
            acc, top, total = _joined(acc, top, total, part, tl.load(at_stats), tl.load(at_stats + HEADS))
        found = acc * final_factor(top, total, 0.0, 1.0, False)[:, None]
        spot = out + at_token * out_row + head * RANK + at
        tl.store(spot[None, :], found.to(out.dtype.element_ty), (at < RANK)[None, :])


def _split(heads: int) -> int:
    """Return the keys of a split. It depends on the model alone, so the sums of a token are the same in every step."""
    return 256 if heads > 2 * HEADS_AT_ONCE else 128


def _triton(
    q: Tensor,
    pages: Tensor,
    layer: int,
    table: Tensor,
    slot: Tensor,
    query_start: Tensor,
    lengths: Tensor,
    selected: Tensor,
    out: Tensor,
    scale: float,
) -> tuple[Tensor]:
    check_latents(q, pages, out)
    if not selected.is_contiguous():
        raise ValueError("selected: must be contiguous")
    tokens, heads, _ = q.shape
    top_k, rank = selected.shape[1], out.shape[2]
    chosen, split = latent_settings("sparse_latent", q, out, HEADS_AT_ONCE), _split(heads)
    blocks, splits = -(-heads // HEADS_AT_ONCE) if len(lengths) else 0, -(-top_k // split)
    divided = splits > 1 and tokens * blocks < resident_programs(q.device, 1)
    items = tokens * splits if divided else 0
    sums = torch.empty((items, heads, rank), dtype=torch.float32, device=q.device)
    stats = torch.empty((items, 2, heads), dtype=torch.float32, device=q.device)
    rows, out_row = lengths.shape[0], check_heads(out, "out")
    launch(
        sparse_latent_kernel,
        (blocks, tokens, splits if divided else 1),
        q,
        pages,
        table,
        slot,
        query_start,
        lengths,
        selected,
        out,
        sums,
        stats,
        layer,
        rows,
        check_heads(q, "q"),
        out_row,
        table.stride(0),
        scale * LOG2_E,
        **kernel_sizes(q, pages, out, HEADS_AT_ONCE),
        TOP_K=top_k,
        TILE=chosen["tile"],
        SPLIT=split,
        DIVIDED=divided,
        warps=chosen["warps"],
        stages=chosen["stages"],
    )
    if divided:
        sizes = {"HEADS": heads, "RANK": rank, "TOP_K": top_k, "WIDE": power_of_2(rank)}
        launch(
            sparse_reduce_kernel,
            (heads if len(lengths) else 0, tokens),
            query_start,
            lengths,
            out,
            sums,
            stats,
            rows,
            out_row,
            **sizes,
            SPLIT=split,
            SPLITS=splits,
            warps=4,
        )
    return (out,)


def _inputs(
    make: Make,
    rows: Sequence[tuple[int, int]],
    heads: int,
    rank: int,
    key: int,
    top_k: int,
    block_tokens: int = 4,
    layers: int = 2,
) -> Args:
    tokens = sum(count for count, _ in rows)
    places = page_inputs(make, rows, rank + key, block_tokens, layers)
    selected = make.zeros(tokens, top_k, dtype=torch.int32)
    if not make.meta:
        seen = [length - count + 1 + number for count, length in rows for number in range(count)]
        for line, length in zip(selected, seen, strict=True):
            chosen = make.permutation(length)[:top_k].sort().values
            line[: len(chosen)], line[len(chosen) :] = chosen, -1
    q, out = make.normal(tokens, heads, rank + key), make.normal(tokens, heads, rank)
    return q, *places, selected, out, (rank + key) ** -0.5


def _keys(args: Sequence[Any]) -> int:
    """Return the number of keys that are read."""
    query_start, lengths, top_k = args[5], args[6], args[7].shape[1]
    counts = zip(query_start.diff().tolist(), lengths.tolist(), strict=True)
    return sum(min(length - number, top_k) for count, length in counts for number in range(count))


def _traffic(*args: Any) -> int:
    q, pages, *_, selected, out, _ = args
    if args[6].is_meta:
        return int(pages.nbytes // pages.shape[1] + q.nbytes + out.nbytes)
    return int(_keys(args) * pages[0, 0, 0, 0].nbytes // pages.shape[3] + q.nbytes + selected.nbytes + out.nbytes)


DEEPSEEK = {"heads": 128, "rank": 512, "key": 64, "top_k": 2048, "block_tokens": 16, "layers": 1}
SMALL = {"heads": 4, "rank": 32, "key": 8, "top_k": 6}

SPARSE_LATENT = Op(
    name="sparse_latent",
    reference=_reference,
    triton=_triton,
    inputs=_inputs,
    cases=(
        Case("one", SMALL | {"rows": ((1, 1),)}),
        Case("mixed", SMALL | {"rows": ((1, 37), (3, 9), (0, 0), (5, 70), (1, 6), (4, 4)), "heads": 18}),
        Case("many", SMALL | {"rows": ((1, 300), (2, 90)), "top_k": 81, "block_tokens": 16}),
        Case("odd", {"rows": ((3, 50), (1, 17)), "heads": 5, "rank": 19, "key": 6, "top_k": 1}),
        Case("divided", SMALL | {"rows": ((1, 700),), "top_k": 300, "block_tokens": 16}),
        Case("splits", SMALL | {"rows": ((1, 700), (3, 131), (1, 129)), "top_k": 300, "heads": 18}),
        Case("empty", SMALL | {"rows": ()}),
        Case("1x65536", DEEPSEEK | {"rows": ((1, 65536),)}, bench=True),
        Case("64x8192", DEEPSEEK | {"rows": ((1, 8192),) * 64}, bench=True),
        Case("1024-of-8192-glm", DEEPSEEK | {"rows": ((1024, 8192),), "heads": 64}, bench=True),
    ),
    tolerance={torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2},
    traffic=_traffic,
    flops=lambda *args: (
        0 if args[6].is_meta else int(2 * _keys(args) * args[0].shape[1] * (args[0].shape[2] + args[8].shape[2]))
    ),
    single_row=single_row_of(0, 7, 8, lengths=6),
    rows=lambda args: args[6].shape[0],
    strided=(0, 8),
    tunable={"tile": (16, 32, 64), "warps": (4, 8, 16), "stages": (2, 3, 4)},
)
