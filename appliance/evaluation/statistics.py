"""Intervals and paired tests.

Wilson score interval: the values p for which |k/n − p| ≤ z·√(p(1 − p)/n) (Wilson 1927). Exact McNemar test: of the
samples that two models decide differently, each is equally likely to favour either model, so their number is binomial
with p = 1/2.
"""

import math
import random
from collections.abc import Sequence
from fractions import Fraction
from statistics import NormalDist

_RESAMPLES = 1000


def wilson(successes: int, count: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return the confidence interval of a proportion; (0, 1) without samples."""
    if count == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    center = successes + z * z / 2
    spread = z * math.sqrt(successes * (count - successes) / count + z * z / 4)
    low = 0.0 if successes == 0 else (center - spread) / (count + z * z)
    high = 1.0 if successes == count else (center + spread) / (count + z * z)
    return low, high


def mcnemar(lost: int, gained: int) -> float:
    """Return the two-sided p-value of the exact McNemar test (the sign test) of `lost` against `gained` samples."""
    total = lost + gained
    tail = sum(math.comb(total, each) for each in range(min(lost, gained) + 1))
    return min(1.0, float(Fraction(2 * tail, 1 << total)))  # exact: 2**1100 is no float


def perplexity(parts: Sequence[tuple[float, int]]) -> float:
    """Return exp of the mean negative log probability. `parts`: sum of log probabilities (nats) and number of units
    of each text. NaN without units."""
    units = sum(count for _, count in parts)
    return math.exp(-sum(value for value, _ in parts) / units) if units else math.nan


def perplexity_interval(parts: Sequence[tuple[float, int]], seed: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return the percentile bootstrap interval over texts. It needs at least two texts with units; otherwise NaN."""
    usable = [part for part in parts if part[1]]
    if len(usable) < 2:
        return math.nan, math.nan
    generator = random.Random(f"{seed}:bootstrap")
    found = sorted(perplexity(generator.choices(usable, k=len(usable))) for _ in range(_RESAMPLES))
    skipped = round(_RESAMPLES * (1 - confidence) / 2)
    return found[skipped], found[-1 - skipped]
