"""The pass over all logits that draws tokens. It finds the best score of each tile of a row among tokens that are
certainly kept, and writes down the tokens that may be kept (see kernels/sampling/sample.py)."""

from kernels.jit import jit, tl
from kernels.sampling.float_order import best_of, key_value
from kernels.sampling.gumbel import noise_bits, noise_from, noise_key
from kernels.sampling.token_mass import float64_at, scaled
from kernels.sampling.truncation import bracket


@jit
def _collect(
    logits,
    t,
    narrow,
    start,
    end,
    at,
    step,
    values,
    tokens,
    tile,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
    STRIP: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Write down s and id of a tile's tokens from `start` to below `end` (compared to logits if the bracket is narrow,
    else to s), in strips, at the places from `at` on, forward or (step -1) backward."""
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
    logits,
    t,
    threshold,
    reached,
    low,
    high,
    tile,
    first_token,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
    STRIP: tl.constexpr,
):
    """Return key and id of the best token of a tile whose s is at or above the threshold, if it is the best of the row
    so far (`reached`). The noise of a token takes two logarithms, which cost several times as much as reading its
    logit, so a cheap bound comes first: noise is at most 22.2, and -log(-log(1 - u)) > x requires u < exp(-x). Usually
    no token of a strip passes it. A token that fails it cannot be the best, so the result does not depend on the order
    of tiles."""
    before = tl.load(reached, volatile=True)
    best, where = before, tl.full((), 0x7FFFFFFF, tl.int32)
    for strip in range(0, TILE, STRIP):
        token = tile * TILE + strip + tl.arange(0, STRIP)
        x = tl.load(logits + token, token < VOCAB, float("-inf")).to(tl.float32)
        score = key_value(best)
        goal = (score - 0.001 - 1e-6 * tl.abs(score)) * t  # less than any rounding on the way
        if tl.max(((x < goal - 22.25 * t) == 0).to(tl.int32), 0) > 0:  # NaN too
            bits = noise_bits(token + first_token, low, high)
            needed = tl.exp2(tl.minimum((x - goal) * (1.4426950408889634 / t), 31.0) + 31.0)
            if tl.max(((bits.to(tl.float32) > needed) == 0).to(tl.int32), 0) > 0:
                s = scaled(x, t)
                top, first = best_of(tl.where(s < threshold, float("-inf"), s + noise_from(bits)), token)
                where = tl.where(top > best, first, tl.where(top == best, tl.minimum(where, first), where))
                best = tl.maximum(best, top)
    if best > before:
        tl.atomic_max(reached, best, sem="relaxed")
    return tl.where(where == 0x7FFFFFFF, -0x80000000, best), where


@jit(varying=("first_token",))
def draw_kernel(
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
    threshold,
    above,
    reached,
    best,
    first,
    first_token,
    logits_row,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_UP: tl.constexpr,
    CAPACITY: tl.constexpr,
    STRIP: tl.constexpr,
    TRUNCATED: tl.constexpr,
):
    """One program for each tile of a row. values, tokens: [rows, CAPACITY], tokens in the bracket from the front and,
    if all fit, tokens above it from the back; otherwise best, first: [rows, TILES] are the best of the tokens above it.
    threshold: [rows], the bracket's upper end; above: [rows, 2], count and mass at or above it."""
    # From the last tile to the first: the statistics pass read the last tiles most recently, so they are in the cache.
    row, tile = tl.program_id(0), TILES - 1 - tl.program_id(1)
    line = tl.load(slot + row)
    t = tl.load(temperature + line)
    own = logits + row.to(tl.int64) * logits_row
    of, start, end = 0, float("-inf"), float("-inf")
    best_key, best_token = -0x80000000, 0
    sure = 1
    if TRUNCATED:
        of = tl.load(kind + row)
        sure = (of == 0).to(tl.int32)
        if (of == 1) | (of == 2):
            token = tile * TILE + tl.arange(0, TILE)
            s = tl.load(own + token, token < VOCAB, float("-inf")).to(tl.float32)
            if of == 1:  # a narrow bracket is a range of logits
                start, end = tl.load(low + row), float("inf")
                high_count = tl.full((), 0, tl.int32)
            else:
                s = scaled(s, t)
                k, mass, most = tl.load(top_k + line), tl.load(total + row), tl.load(peak + row)
                p = float64_at(top_p_low, top_p_high, line)
                drop = float64_at(log_min_p_low, log_min_p_high, line)
                at = tl.load(rounds + row) * tl.num_programs(0) + row
                start, end, count_end, mass_end, count_start = bracket(
                    pivots, counts, masses, ends, base, at, PARTS, mass, most, k, p, drop, PARTS_UP
                )
                if tile == 0:
                    tl.store(threshold + row, end)
                    tl.store(above + row * 2, count_end)
                    tl.store(above + row * 2 + 1, mass_end)
                high_count = tl.sum((s >= end).to(tl.int32), 0)
                if count_start > CAPACITY:  # tokens that are certainly kept would not fit
                    sure = high_count
                    high_count = 0
            some, theirs = values + row.to(tl.int64) * CAPACITY, tokens + row.to(tl.int64) * CAPACITY
            count = tl.sum(((s >= start) & (s < end)).to(tl.int32), 0)
            if count > 0:
                at = tl.atomic_add(found + row * 2, count)
                _collect(own, t, of == 1, start, end, at, 1, some, theirs, tile, VOCAB, TILE, STRIP // 2, CAPACITY)
            if high_count > 0:
                at = CAPACITY - 1 - tl.atomic_add(found + row * 2 + 1, high_count)
                _collect(
                    own, t, False, end, float("inf"), at, -1, some, theirs, tile, VOCAB, TILE, STRIP // 2, CAPACITY
                )
    if sure > 0:
        if t == 0.0:
            token = tile * TILE + tl.arange(0, TILE)
            x = tl.load(own + token, token < VOCAB, float("-inf")).to(tl.float32)
            best_key, best_token = best_of(x, token)
        else:
            key, other = noise_key(tl.load(seed_low + line), tl.load(seed_high + line), tl.load(lengths + row))
            best_key, best_token = _noisy_best(
                own, t, end, reached + row, key, other, tile, first_token, VOCAB, TILE, STRIP
            )
    tl.store(best + row * TILES + tile, best_key)
    tl.store(first + row * TILES + tile, best_token)
