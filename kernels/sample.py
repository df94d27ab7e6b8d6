"""One token a row: the most likely one of greedy rows, argmax(logit / temperature + noise) of the others, among the
tokens that min_p, top_k and top_p keep.

`draw` looks at every logit once and finds the best of those that are surely kept; in rows with cuts it writes down the
tokens of the bracket (see kernels/truncation.py), in any order. `finish` finds the border among these, and the best
token of all. Equal scores: the lower id. Where a logit is NaN or infinite, the score is NaN; where none is possible, it
is -inf. A row is cut into tiles of the vocabulary, and nothing depends on the rows beside it.
"""

import torch
from torch import Tensor

from kernels.columns import DeviceColumns
from kernels.float_order import best_of, key_value, keys, order_key
from kernels.gumbel import noise, noise_key, noise_of
from kernels.jit import jit, launch, power_of_2, rows_of, tl
from kernels.op import Args, Case, Make, Op
from kernels.truncation import (
    CAPACITY,
    PART,
    TILE,
    bracket,
    brackets,
    least_kept,
    mass_of,
    scaled,
    wide_sum,
)

STRIP = 1024  # logits whose noise is computed together
CHUNK = 512  # candidates looked at together


@jit
def _collect(
    logits, t, narrow, start, end, at, step, values, tokens, tile,
    VOCAB: tl.constexpr, TILE: tl.constexpr, STRIP: tl.constexpr, CAPACITY: tl.constexpr,
):
    """Writes down s and id of a tile's tokens from `start` to below `end` (of logits as they are where the bracket is
    narrow), in strips, as above, at the places from `at` on, forward or (step -1) backward."""
    for strip in range(0, TILE, STRIP):
        token = tile * TILE + strip + tl.arange(0, STRIP)
        x = tl.load(logits + token, token < VOCAB, float("-inf")).to(tl.float32)
        s = scaled(x, t)
        compared = tl.where(narrow, x, s)
        inside = ((compared >= start) & (compared < end)).to(tl.int32)
        count = tl.sum(inside, 0)
        if count > 0:
            out = at + step * (tl.cumsum(inside, 0) - 1)
            keep = (inside > 0) & (out < CAPACITY) & (out >= 0)
            tl.store(values + out, s, keep)
            tl.store(tokens + out, token, keep)
        at += step * count


@jit
def _noisy_best(
    logits, t, border, seed_low, seed_high, position, tile, VOCAB: tl.constexpr, TILE: tl.constexpr, STRIP: tl.constexpr
):
    """Key and id of the best token of a tile whose s is at or above the border. In strips, as the arithmetic of many
    tokens at once takes more registers than there are."""
    key, other = noise_key(seed_low, seed_high, position)
    lane = tl.arange(0, STRIP)
    best, where = tl.full((STRIP,), -0x80000000, tl.int32), lane
    for strip in range(0, TILE, STRIP):
        token = tile * TILE + strip + lane
        s = scaled(tl.load(logits + token, token < VOCAB, float("-inf")).to(tl.float32), t)
        score = tl.where(s < border, float("-inf"), s + noise(token, key, other))  # NaN stays
        here = order_key(score)
        better = here > best
        best, where = tl.where(better, here, best), tl.where(better, token, where)
    top = tl.max(best, 0)
    return top, tl.min(tl.where(best == top, where, 0x7FFFFFFF), 0)


@jit
def draw_kernel(
    logits,
    slot,
    lengths,
    temperature,
    top_k,
    top_p,
    top_p_rest,
    log_min_p,
    log_min_p_rest,
    seed_low,
    seed_high,
    kind,
    low,
    peak,
    total,
    found,
    rounds,
    pivots,
    counts,
    masses,
    ends,
    base,
    values,
    tokens,
    border,
    above,
    best,
    first,
    logits_row,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_UP: tl.constexpr,
    CAPACITY: tl.constexpr,
    STRIP: tl.constexpr,
    CUTS: tl.constexpr,
):
    """One program for each tile of a row. values, tokens: [rows, CAPACITY], of tokens in the bracket from the front and,
    where there is place for all, of those above it from the back; else best, first: [rows, TILES] are the best of these.
    border: [rows], the bracket's upper end; above: [rows, 2], count and mass from there."""
    # from the last tile to the first: what the sketch read last is still in the cache
    row, tile = tl.program_id(0), TILES - 1 - tl.program_id(1)
    line = tl.load(slot + row)
    t = tl.load(temperature + line)
    own = logits + row.to(tl.int64) * logits_row
    of, start, end = 0, float("-inf"), float("-inf")
    best_key, best_token = -0x80000000, 0
    sure = 1
    if CUTS:
        of = tl.load(kind + row)
        sure = (of == 0).to(tl.int32)
        if (of == 1) | (of == 2):
            token = tile * TILE + tl.arange(0, TILE)
            s = tl.load(own + token, token < VOCAB, float("-inf")).to(tl.float32)
            if of == 1:  # a narrow bracket is of logits as they are
                start, end = tl.load(low + row), float("inf")
                high_count = tl.full((), 0, tl.int32)
            else:
                s = scaled(s, t)
                k, mass, most = tl.load(top_k + line), tl.load(total + row), tl.load(peak + row)
                p = wide_sum(tl.load(top_p + line), tl.load(top_p_rest + line))
                drop = wide_sum(tl.load(log_min_p + line), tl.load(log_min_p_rest + line))
                at = tl.load(rounds + row) * tl.num_programs(0) + row
                start, end, count_end, mass_end, count_start = bracket(
                    pivots, counts, masses, ends, base, at, PARTS, mass, most, k, p, drop, PARTS_UP
                )
                if tile == 0:
                    tl.store(border + row, end)
                    tl.store(above + row * 2, count_end)
                    tl.store(above + row * 2 + 1, mass_end)
                high_count = tl.sum((s >= end).to(tl.int32), 0)
                if count_start > CAPACITY:  # there is no place for those that are surely kept
                    sure = high_count
                    high_count = 0
            some, theirs = values + row.to(tl.int64) * CAPACITY, tokens + row.to(tl.int64) * CAPACITY
            count = tl.sum(((s >= start) & (s < end)).to(tl.int32), 0)
            if count > 0:
                at = tl.atomic_add(found + row * 2, count)
                _collect(own, t, of == 1, start, end, at, 1, some, theirs, tile, VOCAB, TILE, STRIP, CAPACITY)
            if high_count > 0:
                at = CAPACITY - 1 - tl.atomic_add(found + row * 2 + 1, high_count)
                _collect(own, t, False, end, float("inf"), at, -1, some, theirs, tile, VOCAB, TILE, STRIP, CAPACITY)
    if sure > 0:
        if t == 0.0:
            token = tile * TILE + tl.arange(0, TILE)
            x = tl.load(own + token, token < VOCAB, float("-inf")).to(tl.float32)
            best_key, best_token = best_of(x, token)
        else:
            best_key, best_token = _noisy_best(
                own, t, end, tl.load(seed_low + line), tl.load(seed_high + line), tl.load(lengths + row), tile,
                VOCAB, TILE, STRIP,
            )
    tl.store(best + row * TILES + tile, best_key)
    tl.store(first + row * TILES + tile, best_token)


@jit
def _candidates(logits, values, tokens, at, keep, is_row, t):
    """s and id of some candidates, or of some of a whole row's logits."""
    token = at
    if is_row:
        s = scaled(tl.load(logits + at, keep, float("-inf")).to(tl.float32), t)
    else:
        s = tl.load(values + at, keep, float("-inf"))
        token = tl.load(tokens + at, keep, 0)
    return s, token


@jit
def _search(
    logits, values, tokens, n, is_row, t, peak, tied, start, end, amount, target,
    MASS: tl.constexpr, TIES: tl.constexpr, CHUNK: tl.constexpr,
):
    """The largest key at or above which the candidates' amount (mass, or their number) reaches the target, with the
    amount above that key and the amount at or above it. Known: at `start` it does, with this amount; at `end` not. TIES:
    of candidates whose key is `tied`, by falling ids."""
    pivot = tl.arange(0, 8)
    above = tl.full((), 0, tl.int64)
    while end - start > 1:
        value = start + (end - start) * (pivot + 1).to(tl.int64) // 9
        sums = tl.zeros((8,), tl.int64)
        for begin in range(0, n, CHUNK):
            at = begin + tl.arange(0, CHUNK)
            keep = at < n
            s, token = _candidates(logits, values, tokens, at, keep, is_row, t)
            key = order_key(s)
            each = (keep.to(tl.int32) + key * 0).to(tl.int64)
            if MASS:
                each *= mass_of(s, peak)
            if TIES:
                each = tl.where(key == tied, each, 0)
                key = -1 - token
            sums += tl.sum(tl.where(key.to(tl.int64)[:, None] >= value[None, :], each[:, None], 0), 0)
        enough = sums >= target
        above = tl.max(tl.where(enough, above, sums), 0)
        amount = tl.min(tl.where(enough, sums, amount), 0)
        start, end = tl.max(tl.where(enough, value, start), 0), tl.min(tl.where(enough, end, value), 0)
    return start, above, amount


@jit
def _border(
    logits, values, tokens, n, is_row, t, peak, total, k, p, log_min_p, high, count_high, mass_high,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr,
):
    """Key and id of the last candidate that is kept. Kept already are count_high tokens of mass_high, at or above
    `high`; if none of the candidates is, the border is there."""
    lowest = order_key(least_kept(peak, log_min_p)).to(tl.int64)
    tau, end = order_key(high).to(tl.int64), order_key(peak).to(tl.int64) + 1
    count, mass = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    nothing = tau
    for begin in range(0, n, CHUNK):
        at = begin + tl.arange(0, CHUNK)
        keep = at < n
        s, token = _candidates(logits, values, tokens, at, keep, is_row, t)
        key = order_key(s).to(tl.int64)
        passes = keep & (key >= lowest)
        count += tl.sum(passes.to(tl.int64), 0)
        mass += tl.sum(tl.where(passes, mass_of(s, peak), 0), 0)
        tau = tl.minimum(tau, tl.min(tl.where(passes, key, nothing), 0))
    room = tl.full((), 1 << 62, tl.int64)  # how many of the candidates equal to the last one are kept
    tied = tl.full((), 0, tl.int64)
    left = mass
    if (k > 0) & (count_high + count > k):
        room = k - count_high
        if room <= 0:
            tau = nothing
            left = tl.full((), 0, tl.int64)
            mass = left
        else:
            tau, over, at = _search(
                logits, values, tokens, n, is_row, t, peak, 0, tau, end, count, room, False, False, CHUNK
            )
            room, tied = room - over, at - over
            each = mass_of(key_value(tau.to(tl.int32)), peak)
            left = room * each
            mass = tied * each
            for begin in range(0, n, CHUNK):
                place = begin + tl.arange(0, CHUNK)
                keep = place < n
                s, token = _candidates(logits, values, tokens, place, keep, is_row, t)
                over = tl.sum(tl.where(keep & (order_key(s) > tau), mass_of(s, peak), 0), 0)
                left += over
                mass += over
    if p < 1.0:
        first = (k > 0) | (log_min_p > float("-inf"))
        whole = tl.where(first, left + mass_high, total)
        target = tl.maximum(tl.ceil(p * whole.to(tl.float64)).to(tl.int64), 1) - mass_high
        if target <= 0:
            tau = nothing
            tied = tl.full((), 0, tl.int64)
        elif target <= left:
            before = tau
            tau, over, at = _search(
                logits, values, tokens, n, is_row, t, peak, 0, tau, end, mass, target, True, False, CHUNK
            )
            each = tl.maximum(mass_of(key_value(tau.to(tl.int32)), peak), 1)
            needed, tied = (target - over + each - 1) // each, (at - over) // each
            room = tl.where(tau == before, tl.minimum(room, needed), needed)
    final = tl.full((), VOCAB - 1, tl.int64)
    if room < tied:
        end = tl.full((), 0, tl.int64)
        key, over, at = _search(
            logits, values, tokens, n, is_row, t, peak, tau, end - VOCAB, end, tied, room, False, True, CHUNK
        )
        final = -1 - key
    return tau.to(tl.int32), final.to(tl.int32)


@jit
def finish_kernel(
    logits,
    slot,
    lengths,
    temperature,
    top_k,
    top_p,
    top_p_rest,
    log_min_p,
    log_min_p_rest,
    seed_low,
    seed_high,
    kind,
    peak,
    total,
    found,
    values,
    tokens,
    border,
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
    CUTS: tl.constexpr,
):
    """One program a row."""
    row = tl.program_id(0)
    tile = tl.arange(0, TILES_UP)
    tops = tl.load(best + row * TILES + tile, tile < TILES, -0x80000000)
    top = tl.max(tops, 0)
    id = tl.min(tl.where(tops == top, tl.load(first + row * TILES + tile, tile < TILES, 0), 0x7FFFFFFF), 0)
    limit, final, count = float("-inf"), VOCAB - 1, VOCAB
    if CUTS:
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
                high = tl.load(border + row)
                count_high, mass_high = tl.load(above + row * 2), tl.load(above + row * 2 + 1)
            own = logits + row.to(tl.int64) * logits_row
            some, theirs = values + row.to(tl.int64) * CAPACITY, tokens + row.to(tl.int64) * CAPACITY
            p = wide_sum(tl.load(top_p + line), tl.load(top_p_rest + line))
            drop = wide_sum(tl.load(log_min_p + line), tl.load(log_min_p_rest + line))
            k, mass = tl.load(top_k + line), tl.load(total + row)
            tau, final = _border(
                own, some, theirs, n, is_row, t, most, mass, k, p, drop, high, count_high, mass_high, VOCAB, CHUNK
            )
            limit = key_value(tau)
            count = tl.where(more > 0, 0, count_high.to(tl.int32))
            low, other = noise_key(tl.load(seed_low + line), tl.load(seed_high + line), tl.load(lengths + row))
            for begin in range(0, n + more, CHUNK):
                place = begin + tl.arange(0, CHUNK)
                keep = place < n + more
                place = tl.where(place < n, place, CAPACITY - 1 - (place - n))
                s, token = _candidates(own, some, theirs, place, keep, is_row, t)
                key = order_key(s)
                keep = keep & ((key > tau) | ((key == tau) & (token <= final))) & (s > float("-inf"))
                count += tl.sum(keep.to(tl.int32), 0)
                score = tl.where(keep, s + noise(token, low, other), float("-inf"))
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
    logits: Tensor, slot: Tensor, lengths: Tensor, columns: DeviceColumns, cuts: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """logits: [rows, vocab] of any float type, rows may lie apart; slot, lengths: [rows] int32, the line of each row's
    parameters and its known tokens, which are the new one's position; cuts: whether some row may have min_p, top_k or
    top_p. → by row: ids int32, scores fp32, kept int32 (tokens with a chance, all of a row without cuts), floor fp32
    and last int32: kept are tokens above the floor (of logit / temperature), and at it those with ids up to `last`.
    NaN: the row's logits are not finite; -inf: no token is possible (see `scores`)."""
    rows, vocab = logits.shape
    tiles, device = -(-vocab // TILE), logits.device

    def fresh(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    parameters = (
        *(logits, slot, lengths, columns.temperature, columns.top_k, columns.top_p, columns.top_p_rest),
        *(columns.log_min_p, columns.log_min_p_rest, columns.seed_low, columns.seed_high),
    )
    best, first = fresh(rows, tiles), fresh(rows, tiles)
    known = brackets(logits, slot, columns) if cuts else None
    places = CAPACITY if cuts else 0
    values, tokens = fresh(rows, places, dtype=torch.float32), fresh(rows, places)
    border, above = fresh(rows, dtype=torch.float32), fresh(rows, 2, dtype=torch.int64)
    if known is None:
        found, sums = (slot,) * 5, (slot,) * 6  # of these nothing is read
    else:
        found = known.kind, known.low, known.peak, known.total, known.found
        sums = known.rounds, known.pivots, known.counts, known.masses, known.ends, known.base
    sizes = {"VOCAB": vocab, "TILES": tiles, "CAPACITY": CAPACITY, "CUTS": cuts}
    parts = -(-vocab // PART)
    launch(
        draw_kernel,
        (rows, tiles),
        *parameters,
        *found,
        *sums,
        *(values, tokens, border, above, best, first, rows_of(logits, "logits")),
        TILE=TILE,
        PARTS=parts,
        PARTS_UP=power_of_2(parts),
        STRIP=STRIP,
        warps=8,
        **sizes,
    )
    ids, kept, last = fresh(rows), fresh(rows), fresh(rows)
    scores, floor = fresh(rows, dtype=torch.float32), fresh(rows, dtype=torch.float32)
    launch(
        finish_kernel,
        (rows,),
        *parameters,
        *(found[0], *found[2:], values, tokens, border, above, best, first),
        *(ids, scores, kept, floor, last, rows_of(logits, "logits")),
        TILES_UP=power_of_2(tiles),
        CHUNK=CHUNK,
        warps=8 if cuts else 1,
        **sizes,
    )
    return ids, scores, kept, floor, last
