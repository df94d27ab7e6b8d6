"""Truncation by min_p, top_k and top_p without sorting: brackets that certainly contain the last kept token.

Tokens are ordered by descending s = logit / temperature, equal ones by id. Each cut keeps a prefix (min_p first, then
top_k, then top_p of the mass that these two keep), so together they are one threshold (s, id). Passes that each read
less than the one before find it:

statistics   largest logit and sum of exp of every 64 logits, in one pass over the vocabulary. If a block of mass m has
a
         largest weight w = exp(s) with s at or above t, then at least max(w, m - 63 exp(t)) of its mass is at or above
         t. If these bounds reach the target of a cut at some t, all tokens below that t are cut.
plan     for each row: the lowest t that a cut could keep. Usually few tokens are above it: the row is narrow. Otherwise
         the row is wide, and a sample gives six values around the threshold. This works because the mass below the
         threshold is spread over many tokens.
refine   for wide rows: number and mass of the tokens at or above the six values; a second time if the guess was bad.
         Programs of other rows end at once.
finish   in sample.py: the exact threshold among the tokens of the bracket. If these are more than `CAPACITY` (thousands
of
         equal logits), it reads the row itself, which is slow and equally exact.

Counts and masses are integers. A weight is exp2 of an fp32 difference, exact to 3e-7. The result equals the float64
reference unless a prefix's mass is within 1e-6 of the limit of top_p. Blocks and parts divide the vocabulary
independently of the batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.jit import jit, launch, power_of_2, row_stride, tl
from kernels.sampling.columns import DeviceColumns
from kernels.sampling.tile_statistics import plan_brackets_kernel, tile_statistics_kernel
from kernels.sampling.token_mass import float64_at, least_kept, scaled

TILE = 4096  # logits of one program
BLOCKS = 64  # blocks of a tile; each has TILE / BLOCKS logits
PART = 4 * TILE  # logits of one program of `refine`
FEW = 4096  # maximum number of tokens of a narrow bracket
CAPACITY = 16384  # maximum number of tokens of any bracket


@dataclass(frozen=True)
class Brackets:
    """Results of the passes before the draw. The draw computes the bracket of a wide row from its last round."""

    kind: Tensor  # [rows] int32: 0 no cuts, 1 narrow, 2 wide, 3 failed
    low: Tensor  # [rows] fp32: the lowest logit (not divided by the temperature) of a narrow row's bracket
    peak: Tensor  # [rows] fp32: the largest s; NaN or -inf: the row failed
    total: Tensor  # [rows] int64: mass of the vocabulary
    found: Tensor  # [rows, 2] int32: zero; counters of the tokens that the draw writes down
    rounds: Tensor  # [rows] int32: the last round, 0 or 1
    pivots: Tensor  # [2, rows, 8] fp32; lanes 6 and 7 are infinite
    counts: Tensor  # [2, rows, parts, 8] int32: tokens at or above each pivot
    masses: Tensor  # [2, rows, parts, 8] int64
    ends: Tensor  # [2, rows, 2] fp32: the bracket of the pivots
    base: Tensor  # [2, rows, 2] int64: count and mass at or above its upper end


@jit
def bracket(pivots, counts, masses, ends, base, at, parts, total, peak, k, p, log_min_p, PARTS_UP: tl.constexpr):
    """Compute the bracket after a round of `refine` (`at`: round · rows + row): its ends, count and mass at or above
    the upper one, and count at or above the lower one. All tokens at or above `inner` pass min_p and top_k, and all
    tokens that pass are at or above `outer`."""
    pivot, part = tl.arange(0, 8), tl.arange(0, PARTS_UP)
    value = tl.load(pivots + at * 8 + pivot)
    there = (at * parts + part)[:, None] * 8 + pivot[None, :]
    count = tl.sum(tl.load(counts + there, (part < parts)[:, None], 0), 0).to(tl.int64)
    mass = tl.sum(tl.load(masses + there, (part < parts)[:, None], 0), 0)
    low, high = tl.load(ends + at * 2), tl.load(ends + at * 2 + 1)
    count_high, mass_high = tl.load(base + at * 2), tl.load(base + at * 2 + 1)
    threshold = least_kept(peak, log_min_p)
    first = (k > 0) | (threshold > float("-inf"))
    k = tl.where(k > 0, k, 0x7FFFFFFF)
    is_inner = (count <= k) & (value >= threshold)
    is_outer = (count >= k) | (value <= threshold)
    inner = tl.where(first, tl.min(tl.where(is_inner, value, high), 0), low)
    outer = tl.where(first, tl.max(tl.where(is_outer, value, low), 0), low)
    new_low, new_high = outer, inner
    if p < 1.0:
        # The mass that the first cuts keep is between these two.
        least = tl.where(first, tl.max(tl.where(value >= inner, mass, mass_high), 0), total)
        most = tl.where(first, tl.max(tl.where(value >= outer, mass, mass_high), 0), total)
        most = tl.where(outer == low, total, most)
        upper = tl.min(tl.where(mass.to(tl.float64) < p * least.to(tl.float64), value, high), 0)
        lower = tl.max(tl.where(mass.to(tl.float64) >= p * most.to(tl.float64), value, low), 0)
        new_high = tl.where(first, tl.maximum(inner, upper), upper)
        new_low = tl.where(first, outer, lower)
    count_low = tl.max(tl.where(value == new_low, count, 0), 0)
    count_low = tl.where(new_low == low, 0x7FFFFFFF, count_low)  # unknown
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
    top_p_low,
    top_p_high,
    log_min_p_low,
    log_min_p_high,
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
            p = float64_at(top_p_low, top_p_high, line)
            drop = float64_at(log_min_p_low, log_min_p_high, line)
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
    """Compute the brackets. logits: [rows, vocab], rows need not be contiguous; slot: [rows] int32."""
    rows, vocab = logits.shape
    tiles, parts, row = -(-vocab // TILE), -(-vocab // PART), row_stride(logits, "logits")

    def fresh(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    statistics = fresh(rows, tiles * BLOCKS), fresh(rows, tiles * BLOCKS), fresh(rows, tiles)
    cuts = (
        *(logits, slot, columns.temperature, columns.top_k, columns.top_p_low, columns.top_p_high),
        *(columns.log_min_p_low, columns.log_min_p_high),
    )
    sizes = {"VOCAB": vocab, "TILES": tiles}
    launch(tile_statistics_kernel, (rows, tiles), *cuts, *statistics, row, TILE=TILE, BLOCKS=BLOCKS, **sizes)
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
        plan_brackets_kernel,
        (rows,),
        *(*cuts, *statistics, known.kind, known.low, known.peak, known.total),
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
            *(*cuts, known.kind, known.peak),
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
