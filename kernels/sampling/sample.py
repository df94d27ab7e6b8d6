"""Draw one token for each row: the most likely token of greedy rows, argmax(logit / temperature + noise) of other rows,
among the tokens that min_p, top_k and top_p keep.

`draw` reads every logit once and finds the best token among those that are certainly kept. In rows with cuts it writes
down the tokens of the bracket (see truncation.py), in any order. `finish` finds the threshold among these, and the best
token of all. The lower id wins between equal scores. A row is cut into tiles of the vocabulary, and its result does not
depend on the other rows. Logits are read once, in rows with cuts twice, in wide rows three or four times.
"""

from typing import Any

import torch
from torch import Tensor

from kernels.jit import jit, launch, power_of_2, row_stride, tl
from kernels.op import Args, Case, Make, Op, independent_rows
from kernels.sampling.columns import DeviceColumns, join_float64, split_float64
from kernels.sampling.draw import draw_kernel
from kernels.sampling.float_order import best_of, key_value, order_key
from kernels.sampling.gumbel import noise_bits, noise_from, noise_key, noise_of
from kernels.sampling.threshold import candidates, threshold_of
from kernels.sampling.token_mass import float64_at
from kernels.sampling.truncation import CAPACITY, PART, TILE, brackets

STRIP = 2048  # logits whose noise is computed together
CHUNK = 512  # candidates that are compared together


def _reference(
    logits: Tensor, slot: Tensor, lengths: Tensor, columns: DeviceColumns, truncated: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """See `sample`; ids, scores and kept."""
    line = slot.long()
    t = columns.temperature[line]
    s = logits.float() / torch.where(t == 0, 1.0, t)[:, None]
    keep = _kept(s, line, columns)
    noise = noise_of(columns.seed_low[line], columns.seed_high[line], lengths, s.shape[1])
    scores = torch.where(keep, s + torch.where(t == 0, 0.0, 1.0)[:, None] * noise, -torch.inf)
    best, ids = scores.max(1)
    best = torch.where(s.isnan().any(1) | (best == torch.inf), torch.nan, best)
    fine = best.isfinite()
    p, log_min_p = _limits(line, columns)
    is_truncated = (t > 0) & ((columns.top_k[line] > 0) | (p < 1) | (log_min_p > -torch.inf))
    kept = torch.where(is_truncated, (keep & (s > -torch.inf)).sum(1), s.shape[1])
    return torch.where(fine, ids, 0).int(), best, torch.where(fine, kept, 0).int()


def _kept(s: Tensor, line: Tensor, columns: DeviceColumns) -> Tensor:
    """Compute the kept tokens by sorting, in float64. s: [rows, vocab] → bool."""
    values, order = s.sort(dim=1, descending=True, stable=True)
    wide = values.double()
    p, log_min_p = _limits(line, columns)
    count = (wide >= wide[:, :1] + log_min_p[:, None]).sum(1)
    k = columns.top_k[line]
    count = torch.where(k > 0, torch.minimum(count, k), count).clamp(min=1)
    sums = (values - values[:, :1]).double().exp().cumsum(1)
    reached = (sums < p[:, None] * sums.gather(1, count[:, None] - 1)).sum(1) + 1
    count = torch.where(p < 1, torch.minimum(count, reached), count)
    count = torch.where(columns.temperature[line] == 0, s.shape[1], count)
    first = torch.arange(s.shape[1], device=s.device) < count[:, None]
    return torch.zeros_like(first).scatter_(1, order, first)


@jit
def finish_kernel(
    logits,
    slot,
    lengths,
    temperature,
    top_k,
    top_p_low,
    top_p_high,
    log_min_p_low,
    log_min_p_high,
    seed_low,
    seed_high,
    kind,
    peak,
    total,
    found,
    values,
    tokens,
    threshold,
    above,
    best,
    first,
    ids,
    scores,
    kept,
    floor,
    last,
    logits_row,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    TILES_UP: tl.constexpr,
    CAPACITY: tl.constexpr,
    CHUNK: tl.constexpr,
    TRUNCATED: tl.constexpr,
):
    """One program a row."""
    row = tl.program_id(0)
    tile = tl.arange(0, TILES_UP)
    tops = tl.load(best + row * TILES + tile, tile < TILES, -0x80000000)
    top = tl.max(tops, 0)
    id = tl.min(tl.where(tops == top, tl.load(first + row * TILES + tile, tile < TILES, 0), 0x7FFFFFFF), 0)
    limit, final, count = float("-inf"), VOCAB - 1, VOCAB
    if TRUNCATED:
        of, most = tl.load(kind + row), tl.load(peak + row)
        if of == 3:
            top = order_key(most)
        elif of > 0:
            line = tl.load(slot + row)
            t, n, more = tl.load(temperature + line), tl.load(found + row * 2), tl.load(found + row * 2 + 1)
            is_row = n > CAPACITY
            high = tl.full((), float("inf"), tl.float32)
            count_high, mass_high = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
            if is_row:
                n = VOCAB
            elif of == 2:
                high = tl.load(threshold + row)
                count_high, mass_high = tl.load(above + row * 2), tl.load(above + row * 2 + 1)
            own = logits + row.to(tl.int64) * logits_row
            some, theirs = values + row.to(tl.int64) * CAPACITY, tokens + row.to(tl.int64) * CAPACITY
            p = float64_at(top_p_low, top_p_high, line)
            drop = float64_at(log_min_p_low, log_min_p_high, line)
            k, mass = tl.load(top_k + line), tl.load(total + row)
            tau, final = threshold_of(
                own, some, theirs, n, is_row, t, most, mass, k, p, drop, high, count_high, mass_high, VOCAB, CHUNK
            )
            limit = key_value(tau)
            count = tl.where(more > 0, 0, count_high.to(tl.int32))
            low, other = noise_key(tl.load(seed_low + line), tl.load(seed_high + line), tl.load(lengths + row))
            for begin in range(0, n + more, CHUNK):
                place = begin + tl.arange(0, CHUNK)
                keep = place < n + more
                place = tl.where(place < n, place, CAPACITY - 1 - (place - n))
                s, token = candidates(own, some, theirs, place, keep, is_row, t)
                key = order_key(s)
                keep = keep & ((key > tau) | ((key == tau) & (token <= final))) & (s > float("-inf"))
                count += tl.sum(keep.to(tl.int32), 0)
                score = tl.where(keep, s + noise_from(noise_bits(token, low, other)), float("-inf"))
                best_here, first_here = best_of(score, tl.where(keep, token, 0x7FFFFFFF))
                nearer = tl.where(best_here == top, tl.minimum(first_here, id), id)
                id = tl.where(best_here > top, first_here, nearer)
                top = tl.maximum(top, best_here)
    score = key_value(top)
    fine = (score < float("inf")) & (score > float("-inf"))
    tl.store(ids + row, tl.where(fine, id, 0))
    tl.store(scores + row, tl.where(score < float("inf"), score, float("nan")))
    tl.store(kept + row, tl.where(fine, count, 0))
    tl.store(floor + row, limit)
    tl.store(last + row, final)


def sample(
    logits: Tensor, slot: Tensor, lengths: Tensor, columns: DeviceColumns, truncated: bool, first_token: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """logits: [rows, vocab] of any float type, rows need not be contiguous; slot, lengths: [rows] int32, the line of
    each row's parameters and its number of known tokens, which is the position of the new token; truncated: whether any
    row may have min_p, top_k or top_p; first_token: token of the first column, which its noise depends on; ids
    count from the first column. → by row: ids int32, scores fp32, kept int32 (number of possible tokens, all of
    a row without cuts), floor fp32 and last int32: tokens are kept if their logit / temperature is above the floor, or
    equal to it and their id is at most `last`. Score NaN: the row's logits are not finite; -inf: no token is possible
    (see `scores`)."""
    rows, vocab = logits.shape
    assert not (truncated and first_token), "truncation needs the whole vocabulary"
    tiles, device = -(-vocab // TILE), logits.device

    def fresh(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    parameters = (
        *(logits, slot, lengths, columns.temperature, columns.top_k, columns.top_p_low, columns.top_p_high),
        *(columns.log_min_p_low, columns.log_min_p_high, columns.seed_low, columns.seed_high),
    )
    best, first = fresh(rows, tiles), fresh(rows, tiles)
    reached = torch.full((rows,), -(2**31), dtype=torch.int32, device=device)
    known = brackets(logits, slot, columns) if truncated else None
    places = CAPACITY if truncated else 0
    values, tokens = fresh(rows, places, dtype=torch.float32), fresh(rows, places)
    threshold, above = fresh(rows, dtype=torch.float32), fresh(rows, 2, dtype=torch.int64)
    if known is None:
        found, sums = (slot,) * 5, (slot,) * 6  # placeholders that are never read
    else:
        found = known.kind, known.low, known.peak, known.total, known.found
        sums = known.rounds, known.pivots, known.counts, known.masses, known.ends, known.base
    sizes = {"VOCAB": vocab, "TILES": tiles, "CAPACITY": CAPACITY, "TRUNCATED": truncated}
    parts = -(-vocab // PART)
    launch(
        draw_kernel,
        (rows, tiles),
        *parameters,
        *found,
        *sums,
        *(values, tokens, threshold, above, reached, best, first, first_token, row_stride(logits, "logits")),
        TILE=TILE,
        PARTS=parts,
        PARTS_UP=power_of_2(parts),
        STRIP=STRIP,
        warps=4 if truncated else 8,  # with cuts, more warps would have too few registers
        **sizes,
    )
    ids, kept, last = fresh(rows), fresh(rows), fresh(rows)
    scores, floor = fresh(rows, dtype=torch.float32), fresh(rows, dtype=torch.float32)
    launch(
        finish_kernel,
        (rows,),
        *parameters,
        *(found[0], *found[2:], values, tokens, threshold, above, best, first),
        *(ids, scores, kept, floor, last, row_stride(logits, "logits")),
        TILES_UP=power_of_2(tiles),
        CHUNK=CHUNK,
        warps=8 if truncated else 1,
        **sizes,
    )
    return ids, scores, kept, floor, last


def _limits(line: Tensor, columns: DeviceColumns) -> tuple[Tensor, Tensor]:
    """Return top_p and log min_p of rows, float64."""
    return (
        join_float64(columns.top_p_low[line], columns.top_p_high[line]),
        join_float64(columns.log_min_p_low[line], columns.log_min_p_high[line]),
    )


def _triton(
    logits: Tensor, slot: Tensor, lengths: Tensor, columns: DeviceColumns, truncated: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return sample(logits, slot, lengths, columns, truncated)[:3]


def _inputs(
    make: Make,
    rows: int,
    vocab: int,
    scale: float = 3.0,
    step: float = 0.0,
    temperature: tuple[float, ...] = (1.0,),
    top_k: tuple[int, ...] = (0,),
    top_p: tuple[float, ...] = (1.0,),
    min_p: tuple[float, ...] = (0.0,),
) -> Args:
    """Parameters are repeated from slot to slot. step: logits are multiples of it, so that many are equal."""
    logits = make.normal(rows, vocab, scale=scale)
    if step:
        logits = (logits / step).round() * step
    slots = rows + 1

    def column(values: tuple[Any, ...], dtype: torch.dtype = torch.float64) -> Tensor:
        return make.tensor([values[line % len(values)] for line in range(slots)], dtype)

    p, log_min_p = split_float64(column(top_p)), split_float64(column(min_p).log())
    columns = DeviceColumns(
        temperature=column(temperature, torch.float32),
        top_k=column(top_k, torch.int32),
        top_p_low=p[0],
        top_p_high=p[1],
        log_min_p_low=log_min_p[0],
        log_min_p_high=log_min_p[1],
        seed_low=make.integers(-(2**31), 2**31, slots),
        seed_high=make.integers(-(2**31), 2**31, slots),
        repetition=column((1.0,), torch.float32),
        frequency=column((0.0,), torch.float32),
        presence=column((0.0,), torch.float32),
        prompt_tokens=column((0,), torch.int32),
    )
    cuts = any(top_k) or min(top_p) < 1 or any(min_p)
    return logits, make.permutation(slots)[:rows].contiguous(), make.integers(1, 1000, rows), columns, cuts


def _peer(logits: Tensor, slot: Tensor, lengths: Tensor, columns: DeviceColumns, truncated: bool) -> Tensor:
    """Draw with torch's own operations, for rows that all have the same parameters."""
    p = (logits.float() / columns.temperature[slot.long()].clamp(min=0.01)[:, None]).softmax(1)
    if truncated:
        values, order = p.sort(1, descending=True)
        values[values.cumsum(1) - values > _limits(slot.long(), columns)[0][:, None]] = 0
        p = torch.zeros_like(p).scatter_(1, order, values)
    return p.div_(torch.empty_like(p).exponential_()).argmax(1)


_MIX = {
    "temperature": (1.0, 0.7, 0.0, 1.6, 0.01),
    "top_k": (0, 3, 0, 50),
    "top_p": (1.0, 0.9, 0.5),
    "min_p": (0.0, 0.0, 0.05, 0.0, 0.3, 0.0, 0.001),
}
_SERVED = {"rows": 256, "vocab": 151936}

SAMPLE = Op(
    name="sample",
    reference=_reference,
    triton=_triton,
    inputs=_inputs,
    cases=(
        Case("plain", {"rows": 4, "vocab": 97, "temperature": (0.0, 1.0, 0.7)}),
        Case("mix", {"rows": 5, "vocab": 300, **_MIX}),
        Case("ties", {"rows": 4, "vocab": 200, "step": 0.5, **_MIX}),
        Case("tiles", {"rows": 1, "vocab": 9001, "top_p": (0.95,)}),
        Case("wide", {"rows": 1, "vocab": 5001, "scale": 0.1, "top_p": (0.95,)}),
        Case("two", {"rows": 1, "vocab": 2, "top_p": (0.5,)}),
        Case("empty", {"rows": 0, "vocab": 32, "top_p": (0.5,)}),
        Case("top_p-256x151936", {**_SERVED, "scale": 6.0, "top_p": (0.95,)}, bench=True),
        Case("top_p-wide-256x151936", {**_SERVED, "scale": 3.0, "top_p": (0.95,)}, bench=True),
        Case("top_p-flat-256x151936", {**_SERVED, "scale": 1.0, "top_p": (0.95,)}, bench=True),
        Case("top_p-1x151936", {"rows": 1, "vocab": 151936, "scale": 6.0, "top_p": (0.95,)}, bench=True),
        Case("top_k-top_p-256x151936", {**_SERVED, "top_k": (20,), "top_p": (0.8,)}, bench=True),
        Case("plain-256x151936", dict(_SERVED), bench=True),
        Case("greedy-256x151936", {**_SERVED, "temperature": (0.0,)}, bench=True),
        Case("greedy-1x151936", {"rows": 1, "vocab": 151936, "temperature": (0.0,)}, bench=True),
    ),
    tolerance={torch.float32: 1e-6, torch.bfloat16: 1e-6},
    traffic=lambda logits, *rest: logits.nbytes,
    single_row=independent_rows(0, 1, 2),
    strided=(0,),
    peer=_peer,
    may_spill=True,  # 8 bytes of draw_kernel with Triton 3.6, outside of its loops
)
