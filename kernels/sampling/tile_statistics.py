"""First two passes of truncation (see truncation.py): statistics of the tiles of each row, and the bracket derived from
it."""

from kernels.jit import jit, tl
from kernels.sampling.token_mass import float64_at, is_truncated, least_kept, scaled


@jit
def tile_statistics_kernel(
    logits,
    slot,
    temperature,
    top_k,
    top_p_low,
    top_p_high,
    log_min_p_low,
    log_min_p_high,
    largest,
    sums,
    least,
    logits_row,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """One program for each tile of a row. largest, sums: [rows, TILES · BLOCKS]; least: [rows, TILES]."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    line = tl.load(slot + row)
    t = tl.load(temperature + line)
    p, drop = float64_at(top_p_low, top_p_high, line), float64_at(log_min_p_low, log_min_p_high, line)
    if is_truncated(t, tl.load(top_k + line), p, drop):
        # The logits of a block have a stride of BLOCKS, so that each thread has whole columns.
        block = tl.arange(0, BLOCKS)
        at = tile * TILE + tl.arange(0, TILE // BLOCKS)[:, None] * BLOCKS + block[None, :]
        x = tl.load(logits + row * logits_row + at, at < VOCAB, float("-inf")).to(tl.float32)
        top = tl.max(x, 0)
        level = tl.where(top == float("-inf"), 0.0, top)
        mass = tl.sum(tl.exp2((x - level[None, :]) * (1.4426950408889634 / t)), 0)
        out = (row * TILES + tile) * BLOCKS + block
        tl.store(largest + out, top)
        tl.store(sums + out, mass)
        lowest = tl.min(tl.where(x == float("-inf"), float("inf"), x), 0)
        tl.store(least + row * TILES + tile, tl.min(lowest, 0))


@jit
def plan_brackets_kernel(
    logits,
    slot,
    temperature,
    top_k,
    top_p_low,
    top_p_high,
    log_min_p_low,
    log_min_p_high,
    largest,
    sums,
    least,
    kind,
    low,
    peak,
    total,
    found,
    rounds,
    pivots,
    ends,
    base,
    logits_row,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    TILES_UP: tl.constexpr,
    COUNT: tl.constexpr,
    COUNT_UP: tl.constexpr,
    SIZE: tl.constexpr,
    FEW: tl.constexpr,
):
    """One program for each row: COUNT blocks of SIZE logits."""
    row = tl.program_id(0)
    line = tl.load(slot + row)
    t, k = tl.load(temperature + line), tl.load(top_k + line)
    exact_p, exact_drop = float64_at(top_p_low, top_p_high, line), float64_at(log_min_p_low, log_min_p_high, line)
    p, drop = exact_p.to(tl.float32), exact_drop.to(tl.float32)
    tl.store(found + row * 2 + tl.arange(0, 2), tl.zeros((2,), tl.int32))
    tl.store(rounds + row, 0)
    is_of = tl.full((), 0, tl.int32)
    if is_truncated(t, k, exact_p, exact_drop):
        at = tl.arange(0, COUNT_UP)
        m = tl.load(largest + row * COUNT + at, at < COUNT, float("-inf"))
        own = tl.load(sums + row * COUNT + at, at < COUNT, 0.0)
        best, broken = tl.max(m, 0), tl.sum(own, 0)  # NaN where a logit is NaN or infinite
        if (best == float("-inf")) | (broken != broken):
            is_of += 3
            tl.store(peak + row, tl.where(broken != broken, float("nan"), float("-inf")))
        else:
            unit = 1.4426950408889634 / t
            y = (m - best) * unit
            w = tl.exp2(y)
            mass = w * own
            whole = tl.sum(mass, 0)
            first = (k > 0) | (drop > float("-inf"))
            # By bisection: the largest y with certainly a share p of the mass, and the largest logit with k tokens, at
            # or above it.
            y_none, y_all = 0.0, -64.0
            x_none, x_all = best, tl.min(tl.where(m == float("-inf"), best, m), 0)
            p_holds = _mass_at(y, w, mass, y_all, SIZE) >= p * whole
            k_holds = tl.sum((m >= x_all).to(tl.int32), 0) >= k
            for _ in range(16):
                middle = 0.5 * (y_none + y_all)
                enough = _mass_at(y, w, mass, middle, SIZE) >= p * whole
                y_all, y_none = tl.where(enough, middle, y_all), tl.where(enough, y_none, middle)
                middle = 0.5 * (x_none + x_all)
                enough = tl.sum((m >= middle).to(tl.int32), 0) >= k
                x_all, x_none = tl.where(enough, middle, x_all), tl.where(enough, x_none, middle)
            x_p = tl.where(p_holds, best + y_all / unit, float("-inf"))
            x_first = tl.maximum(best + drop * t, tl.where((k > 0) & k_holds, x_all, float("-inf")))
            # top_p takes its share of the mass that the first two cuts keep, so all of that must be in the bracket.
            threshold = tl.where(first, x_first, x_p)
            # Different logits may be equal after the division: extend by a few units in the last place.
            tile = tl.arange(0, TILES_UP)
            end = tl.min(tl.load(least + row * TILES + tile, tile < TILES, float("inf")), 0)
            threshold = tl.maximum(threshold - 4e-6 * (tl.abs(best) + tl.abs(best - threshold)), end)
            share = tl.minimum(own * tl.exp2(tl.minimum((m - threshold) * unit, 10.0)), SIZE)
            most = tl.sum(tl.where(m >= threshold, share, 0.0), 0)
            is_of += tl.where(most <= FEW, 1, 2)
            top = tl.div_rn(best, t)
            tl.store(low + row, threshold)
            tl.store(peak + row, top)
            tl.store(total + row, tl.sum((mass * 1099511627776.0).to(tl.int64), 0))
            if is_of == 2:
                pivot = tl.arange(0, 8)
                start = tl.div_rn(threshold, t)
                value = start + (top - start) * (pivot + 1).to(tl.float32) / 7.0
                if first:
                    exact = least_kept(top, exact_drop)
                    value = tl.where(pivot == 0, tl.maximum(exact, start), value)
                else:
                    value = _guess(logits + row.to(tl.int64) * logits_row, t, start, top, (1.0 - p) * whole, VOCAB)
                tl.store(pivots + row * 8 + pivot, tl.where(pivot < 6, value, float("inf")))
                tl.store(ends + row * 2, start)
                tl.store(ends + row * 2 + 1, float("inf"))
                tl.store(base + row * 2 + tl.arange(0, 2), tl.zeros((2,), tl.int64))
    tl.store(kind + row, is_of)


@jit
def _guess(logits, t, start, peak, tail, VOCAB: tl.constexpr):
    """Guess six values around the value below which the mass is `tail`, from a sample of 64 pieces of 16 tokens."""
    at = tl.arange(0, 1024)
    s = scaled(tl.load(logits + (at // 16) * (VOCAB // 64) + at % 16).to(tl.float32), t)
    w = tl.exp2((s - peak) * 1.4426950408889634) * (VOCAB / 1024)
    pivot = tl.arange(0, 8)
    close = tl.where(pivot == 0, 0.4, tl.where(pivot == 1, 0.75, 0.9))
    far = tl.where(pivot == 3, 1.1, tl.where(pivot == 4, 1.3, 2.0))
    wanted = tail * tl.where(pivot < 3, close, far)
    under, over = start + tl.zeros((8,), tl.float32), peak + tl.zeros((8,), tl.float32)
    for _ in range(14):
        middle = 0.5 * (under + over)
        below = tl.sum(tl.where(s[:, None] < middle[None, :], w[:, None], 0.0), 0)
        under, over = tl.where(below < wanted, middle, under), tl.where(below < wanted, over, middle)
    return over


@jit
def _mass_at(y, w, mass, t, SIZE: tl.constexpr):
    """Return a lower bound of the mass at or above t, for blocks whose largest is at y and has weight w."""
    below = mass - (SIZE - 1) * tl.exp2(t)
    return tl.sum(tl.where(y >= t, tl.maximum(w, below), 0.0), 0)
