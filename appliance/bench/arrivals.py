"""Start times of sessions: a gamma renewal process whose rate is constant or grows linearly.

The gaps of a process with rate 1 are drawn from a gamma distribution with mean 1 and shape `burstiness`: 1 is a Poisson
process, less is burstier, infinity is regular. Time is then rescaled: the n-th start is the time at which the integral
of the rate has reached the n-th sum of gaps (time-rescaling theorem).
"""

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Arrivals:
    rate: float
    """Sessions per second, at the beginning."""
    last_rate: float
    """Sessions per second at the end; equal to `rate` unless the load is a ramp."""
    burstiness: float = 1.0
    """Shape of the gamma distribution of the gaps."""


def start_times(count: int, arrivals: Arrivals, seed: int) -> list[float]:
    """Return the times in seconds at which sessions start, in order. The first one is 0."""
    generator, reached, times = random.Random(f"{seed}:arrivals"), 0.0, list[float]()
    for index in range(count):
        reached += _gap(generator, arrivals.burstiness) if index else 0.0
        times.append(_rescaled(reached, arrivals, count))
    return times


def _gap(generator: random.Random, burstiness: float) -> float:
    return 1.0 if math.isinf(burstiness) else generator.gammavariate(burstiness, 1.0 / burstiness)


def _rescaled(reached: float, arrivals: Arrivals, count: int) -> float:
    """Return the time t with rate·t + slope·t²/2 = `reached`. The rate grows during the mean duration of the run and
    is constant afterwards."""
    first, last = arrivals.rate, arrivals.last_rate
    duration = 2.0 * count / (first + last)
    if first == last or reached >= count:
        return duration + (reached - count) / last if reached >= count else reached / first
    slope = (last - first) / duration
    # The usual formula (−b + √…)/2a loses digits where the slope is small.
    return 2.0 * reached / (first + math.sqrt(first * first + 2.0 * slope * reached))
