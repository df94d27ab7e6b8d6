"""Where the tokens of a row end that min_p, top_k and top_p keep, without sorting: brackets that surely hold the border.

Tokens stand in descending order of s = logit / temperature, equal ones by id; each cut keeps a prefix (min_p first, then
top_k, then top_p of the mass that these two left), so together they are one border (s, id). It is found in passes of
which each looks at less:

sketch   of every 64 logits the largest and the sum of exp: one pass over the vocabulary. Of a block's mass m at least
         max(w, m - 63 exp(t)) lies at or above t, where its largest weight w = exp(s) does: what no bound reaches is cut.
plan     by row: the least t that a cut could keep. Mostly few tokens are left above it (`NARROW`). Else the row is
         `WIDE`, and six values around the border are guessed from a sample: the mass below it is that of many tokens.
refine   of wide rows: how many tokens and how much mass lie at or above the six values; once more where the guess was
         bad. Rows that need none end at once.
finish   in kernels/sample.py: the exact border among the tokens of the bracket. If these are more than `CAPACITY`
         (thousands of equal logits), it reads the row itself instead: slow, and exact too.

Counts are whole numbers, and so is mass: in units of 2^-40 of the largest token's, so that sums do not depend on their
order. A weight is exp2 of an fp32 difference, 3e-7 exact: the border is the float64 reference's except where a prefix's
mass comes within 1e-6 of what top_p asks for. Blocks and parts are pieces of the vocabulary, whatever the batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.columns import DeviceColumns
from kernels.float_order import key_value, order_key
from kernels.jit import jit, launch, power_of_2, rows_of, tl

TILE = 4096  # logits of one program
BLOCKS = 64  # of a tile; each has TILE / BLOCKS logits
PART = 4 * TILE  # logits of one program of `refine`
FEW = 4096  # tokens of a narrow bracket
CAPACITY = 16384  # of any


@dataclass(frozen=True)
class Brackets:
    """What is known of each row. Of wide rows two rounds: of the second, if there was one, and else of the first, the
    draw makes the bracket. Lanes 6 and 7 of the pivots are infinite."""

    kind: Tensor  # [rows] int32: 0 no cuts, 1 narrow, 2 wide, 3 failed
    low: Tensor  # [rows] fp32: the least logit, as it is, of a narrow row's bracket
    peak: Tensor  # [rows] fp32: the largest s; NaN or -inf: the row failed
    total: Tensor  # [rows] int64: mass of the vocabulary
    found: Tensor  # [rows, 2] int32: zero; the draw counts in it what it writes down
    rounds: Tensor  # [rows] int32: the last round, 0 or 1
    pivots: Tensor  # [2, rows, 8] fp32
    counts: Tensor  # [2, rows, parts, 8] int32: tokens at or above each pivot
    masses: Tensor  # [2, rows, parts, 8] int64
    ends: Tensor  # [2, rows, 2] fp32: the bracket that the pivots lie in
    base: Tensor  # [2, rows, 2] int64: count and mass at or above its upper end


@jit
def wide_sum(x, rest):
    """The float64 of two fractions."""
    return x.to(tl.float64) + rest.to(tl.float64)


@jit
def is_cut(temperature, top_k, top_p, log_min_p):
    return (temperature > 0.0) & ((top_k > 0) | (top_p < 1.0) | (log_min_p > float("-inf")))


@jit
def scaled(x, temperature):
    """s of fp32 logits: the division is exact, as equal s are told apart by their ids."""
    if temperature != 1.0:
        x = tl.div_rn(x, temperature)
    return x


@jit
def mass_of(s, peak):
    """int64 in units of 2^-40."""
    return (tl.exp2((s - peak) * 1.4426950408889634) * 1099511627776.0).to(tl.int64)


@jit
def least_kept(peak, log_min_p):
    """The least fp32 that is not below peak + log_min_p (float64)."""
    exact = peak.to(tl.float64) + log_min_p
    rounded = exact.to(tl.float32)
    return tl.where(rounded.to(tl.float64) < exact, key_value(order_key(rounded) + 1), rounded)


@jit
def sketch_kernel(
    logits,
    slot,
    temperature,
    top_k,
    top_p,
    log_min_p,
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
    if is_cut(t, tl.load(top_k + line), tl.load(top_p + line), tl.load(log_min_p + line)):
        # a block's logits lie BLOCKS apart, so that each thread has whole columns
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
def plan_kernel(
    logits,
    slot,
    temperature,
    top_k,
    top_p,
    log_min_p,
    log_min_p_rest,
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
    """One program a row: COUNT blocks of SIZE logits."""
    row = tl.program_id(0)
    line = tl.load(slot + row)
    t, k, p = tl.load(temperature + line), tl.load(top_k + line), tl.load(top_p + line)
    drop = tl.load(log_min_p + line)
    tl.store(found + row * 2 + tl.arange(0, 2), tl.zeros((2,), tl.int32))
    tl.store(rounds + row, 0)
    is_of = tl.full((), 0, tl.int32)
    if is_cut(t, k, p, drop):
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
            # by bisection: the largest y at which surely p of the mass, and the largest logit at which k tokens are
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
            # top_p takes its part of what the first two cuts leave, so all of that must be in the bracket
            border = tl.where(first, x_first, x_p)
            # different logits may be equal after the division: a few units in the last place more
            tile = tl.arange(0, TILES_UP)
            end = tl.min(tl.load(least + row * TILES + tile, tile < TILES, float("inf")), 0)
            border = tl.maximum(border - 4e-6 * (tl.abs(best) + tl.abs(best - border)), end)
            share = tl.minimum(own * tl.exp2(tl.minimum((m - border) * unit, 10.0)), SIZE)
            most = tl.sum(tl.where(m >= border, share, 0.0), 0)
            is_of += tl.where(most <= FEW, 1, 2)
            top = tl.div_rn(best, t)
            tl.store(low + row, border)
            tl.store(peak + row, top)
            tl.store(total + row, tl.sum((mass * 1099511627776.0).to(tl.int64), 0))
            if is_of == 2:
                pivot = tl.arange(0, 8)
                start = tl.div_rn(border, t)
                value = start + (top - start) * (pivot + 1).to(tl.float32) / 7.0
                if first:
                    exact = least_kept(top, wide_sum(drop, tl.load(log_min_p_rest + line)))
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
    """Six values around the one below which the mass is `tail`, by a sample of 64 pieces of 16 tokens."""
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
    """A lower bound of the mass at or above t, of blocks whose largest is at y and weighs w."""
    below = mass - (SIZE - 1) * tl.exp2(t)
    return tl.sum(tl.where(y >= t, tl.maximum(w, below), 0.0), 0)


@jit
def bracket(
    pivots, counts, masses, ends, base, at, parts, total, peak, k, p, log_min_p, PARTS_UP: tl.constexpr
):
    """The bracket after a round of `refine` (`at`: round · rows + row): its ends, count and mass at or above the upper
    one, and count at or above the lower one. At or above `inner` all tokens pass min_p and top_k, and all that pass are
    at or above `outer`."""
    pivot, part = tl.arange(0, 8), tl.arange(0, PARTS_UP)
    value = tl.load(pivots + at * 8 + pivot)
    there = (at * parts + part)[:, None] * 8 + pivot[None, :]
    count = tl.sum(tl.load(counts + there, (part < parts)[:, None], 0), 0).to(tl.int64)
    mass = tl.sum(tl.load(masses + there, (part < parts)[:, None], 0), 0)
    low, high = tl.load(ends + at * 2), tl.load(ends + at * 2 + 1)
    count_high, mass_high = tl.load(base + at * 2), tl.load(base + at * 2 + 1)
    border = least_kept(peak, log_min_p)
    first = (k > 0) | (border > float("-inf"))
    k = tl.where(k > 0, k, 0x7FFFFFFF)
    is_inner = (count <= k) & (value >= border)
    is_outer = (count >= k) | (value <= border)
    inner = tl.where(first, tl.min(tl.where(is_inner, value, high), 0), low)
    outer = tl.where(first, tl.max(tl.where(is_outer, value, low), 0), low)
    new_low, new_high = outer, inner
    if p < 1.0:
        # of the mass that the first cuts leave is known that it lies between these two
        least = tl.where(first, tl.max(tl.where(value >= inner, mass, mass_high), 0), total)
        most = tl.where(first, tl.max(tl.where(value >= outer, mass, mass_high), 0), total)
        most = tl.where(outer == low, total, most)
        upper = tl.min(tl.where(mass.to(tl.float64) < p * least.to(tl.float64), value, high), 0)
        lower = tl.max(tl.where(mass.to(tl.float64) >= p * most.to(tl.float64), value, low), 0)
        new_high = tl.where(first, tl.maximum(inner, upper), upper)
        new_low = tl.where(first, outer, lower)
    count_low = tl.max(tl.where(value == new_low, count, 0), 0)
    count_low = tl.where(new_low == low, 0x7FFFFFFF, count_low)  # not known
    above = value >= new_high
    count_high = tl.maximum(tl.max(tl.where(above, count, 0), 0), count_high)
    mass_high = tl.maximum(tl.max(tl.where(above, mass, 0), 0), mass_high)
    return new_low, new_high, count_high, mass_high, count_low


@jit
def refine_kernel(
    logits,
    slot,
    temperature,
    top_k,
    top_p,
    top_p_rest,
    log_min_p,
    log_min_p_rest,
    kind,
    peak,
    total,
    rounds,
    pivots,
    counts,
    masses,
    ends,
    base,
    logits_row,
    VOCAB: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_UP: tl.constexpr,
    PART: tl.constexpr,
    TILE: tl.constexpr,
    FEW: tl.constexpr,
    ROUND: tl.constexpr,
):
    """One program for each part of a row."""
    row, part = tl.program_id(0), tl.program_id(1)
    at = ROUND * tl.num_programs(0) + row
    is_wide = tl.load(kind + row) == 2
    line = tl.load(slot + row)
    t, most = tl.load(temperature + line), tl.load(peak + row)
    pivot = tl.arange(0, 8)
    value = most + tl.zeros((8,), tl.float32)
    if is_wide:
        if ROUND == 0:
            value = tl.load(pivots + row * 8 + pivot)
        else:
            p = wide_sum(tl.load(top_p + line), tl.load(top_p_rest + line))
            drop = wide_sum(tl.load(log_min_p + line), tl.load(log_min_p_rest + line))
            k, whole = tl.load(top_k + line), tl.load(total + row)
            start, end, count_end, mass_end, count_start = bracket(
                pivots, counts, masses, ends, base, row, PARTS, whole, most, k, p, drop, PARTS_UP
            )
            is_wide = count_start - count_end > 2 * FEW
            room = tl.maximum(tl.minimum(end, most) - start, 0.0)
            value = tl.where(pivot < 6, start + room * ((pivot + 1).to(tl.float32) / 7.0), float("inf"))
            if is_wide & (part == 0):
                tl.store(rounds + row, 1)
                tl.store(pivots + at * 8 + pivot, value)
                tl.store(ends + at * 2, start)
                tl.store(ends + at * 2 + 1, end)
                tl.store(base + at * 2, count_end)
                tl.store(base + at * 2 + 1, mass_end)
    if is_wide:
        count, mass = tl.zeros((8,), tl.int32), tl.zeros((8,), tl.int64)
        for tile in range(PART // TILE):
            token = part * PART + tile * TILE + tl.arange(0, TILE)
            x = tl.load(logits + row.to(tl.int64) * logits_row + token, token < VOCAB, float("-inf")).to(tl.float32)
            s = scaled(x, t)
            w = tl.exp2((s - most) * 1.4426950408889634)
            for number in tl.static_range(6):
                above = s >= tl.sum(tl.where(pivot == number, value, 0.0), 0)
                weight = tl.sum(tl.where(above, w, 0.0), 0) * 1099511627776.0
                count += tl.where(pivot == number, tl.sum(above.to(tl.int32), 0), 0)
                mass += tl.where(pivot == number, weight.to(tl.int64), 0)
        out = (at * PARTS + part) * 8 + pivot
        tl.store(counts + out, count)
        tl.store(masses + out, mass)


def brackets(logits: Tensor, slot: Tensor, columns: DeviceColumns) -> Brackets:
    """logits: [rows, vocab], rows may lie apart; slot: [rows] int32."""
    rows, vocab = logits.shape
    tiles, parts, row = -(-vocab // TILE), -(-vocab // PART), rows_of(logits, "logits")

    def fresh(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    sketch = fresh(rows, tiles * BLOCKS), fresh(rows, tiles * BLOCKS), fresh(rows, tiles)
    cuts = logits, slot, columns.temperature, columns.top_k, columns.top_p
    sizes = {"VOCAB": vocab, "TILES": tiles}
    launch(
        sketch_kernel, (rows, tiles), *cuts, columns.log_min_p, *sketch, row, TILE=TILE, BLOCKS=BLOCKS, **sizes
    )
    known = Brackets(
        kind=fresh(rows, dtype=torch.int32),
        low=fresh(rows),
        peak=fresh(rows),
        total=fresh(rows, dtype=torch.int64),
        found=fresh(rows, 2, dtype=torch.int32),
        rounds=fresh(rows, dtype=torch.int32),
        pivots=fresh(2, rows, 8),
        counts=fresh(2, rows, parts, 8, dtype=torch.int32),
        masses=fresh(2, rows, parts, 8, dtype=torch.int64),
        ends=fresh(2, rows, 2),
        base=fresh(2, rows, 2, dtype=torch.int64),
    )
    launch(
        plan_kernel,
        (rows,),
        *(*cuts, columns.log_min_p, columns.log_min_p_rest, *sketch, known.kind, known.low, known.peak, known.total),
        *(known.found, known.rounds, known.pivots, known.ends, known.base, row),
        TILES_UP=power_of_2(tiles),
        COUNT=tiles * BLOCKS,
        COUNT_UP=power_of_2(tiles * BLOCKS),
        SIZE=TILE // BLOCKS,
        FEW=FEW,
        warps=8,
        **sizes,
    )
    for number in range(2):
        launch(
            refine_kernel,
            (rows, parts),
            *(*cuts, columns.top_p_rest, columns.log_min_p, columns.log_min_p_rest, known.kind, known.peak),
            *(known.total, known.rounds, known.pivots, known.counts, known.masses, known.ends, known.base, row),
            VOCAB=vocab,
            PARTS=parts,
            PARTS_UP=power_of_2(parts),
            PART=PART,
            TILE=TILE,
            FEW=FEW,
            ROUND=number,
            warps=8,
        )
    return known
