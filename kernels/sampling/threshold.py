"""The exact threshold of a row among its candidates: key and id of the last token that min_p, top_k and top_p keep.

Candidates come in any order. Counts and masses are integers, so the order does not matter. A search tests eight keys at
once: each iteration reduces their range to a ninth, and a narrow bracket takes few iterations. If the tokens of a
bracket exceed the capacity, the candidates are the row's own logits.
"""

from kernels.jit import jit, tl
from kernels.sampling.float_order import key_value, order_key
from kernels.sampling.token_mass import least_kept, mass_of, scaled


@jit
def candidates(logits, values, tokens, at, keep, is_row, t):
    """Load s and id of some candidates, or of some logits of a whole row."""
    token = at
    if is_row:
        s = scaled(tl.load(logits + at, keep, float("-inf")).to(tl.float32), t)
    else:
        s = tl.load(values + at, keep, float("-inf"))
        token = tl.load(tokens + at, keep, 0)
    return s, token


@jit
def _search(
    logits,
    values,
    tokens,
    n,
    is_row,
    t,
    peak,
    tied,
    start,
    end,
    amount,
    target,
    MASS: tl.constexpr,
    TIES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Find the largest key at or above which the candidates' amount (mass or number) reaches the target. Return it with
    the amount above that key and the amount at or above it. At `start` the target is reached, with the given amount; at
    `end` it is not. TIES: search candidates whose key is `tied`, by descending ids."""
    pivot = tl.arange(0, 8)
    above = tl.full((), 0, tl.int64)
    while end - start > 1:
        value = start + (end - start) * (pivot + 1).to(tl.int64) // 9
        sums = tl.zeros((8,), tl.int64)
        for begin in range(0, n, CHUNK):
            at = begin + tl.arange(0, CHUNK)
            keep = at < n
            s, token = candidates(logits, values, tokens, at, keep, is_row, t)
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
def threshold_of(
    logits,
    values,
    tokens,
    n,
    is_row,
    t,
    peak,
    total,
    k,
    p,
    log_min_p,
    high,
    count_high,
    mass_high,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Return key and id of the last kept candidate. count_high tokens of mass_high, at or above `high`, are already
    kept; if no candidate is kept, the threshold is at `high`."""
    lowest = order_key(least_kept(peak, log_min_p)).to(tl.int64)
    tau, end = order_key(high).to(tl.int64), order_key(peak).to(tl.int64) + 1
    count, mass = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    nothing = tau
    for begin in range(0, n, CHUNK):
        at = begin + tl.arange(0, CHUNK)
        keep = at < n
        s, token = candidates(logits, values, tokens, at, keep, is_row, t)
        key = order_key(s).to(tl.int64)
        passes = keep & (key >= lowest)
        count += tl.sum(passes.to(tl.int64), 0)
        mass += tl.sum(tl.where(passes, mass_of(s, peak), 0), 0)
        tau = tl.minimum(tau, tl.min(tl.where(passes, key, nothing), 0))
    room = tl.full((), 1 << 62, tl.int64)  # number of kept candidates among those equal to the last one
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
                s, token = candidates(logits, values, tokens, place, keep, is_row, t)
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
