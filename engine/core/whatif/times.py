"""A model of a step's time, fitted to recorded steps: what never shrinks when a step grows, and how it varies.

Mean seconds are a sum of terms with coefficients that are not negative: one a step (weights are read once), tokens up
to FEW and beyond (few of them cost what reading the weights costs, more of them computation), tokens drawn (the head),
and positions attended to. Least squares, weighed by the mean time of steps of a like size, so that short steps count as
much as long ones. A size with at least ENOUGH recorded steps keeps their mean time.

What a recorded step took relative to its mean is the speed of the machine at that time. A step of the model makes
progress at the speeds recorded from its start on, so a machine that is slow for some seconds is slow then in the model
too, and a long step averages over many short ones.
"""

import bisect
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from engine.core.whatif.traffic import Size, Step

FEW = 16
ROUNDS = 500
ENOUGH = 20


@dataclass(frozen=True)
class Speed:
    """Progress of the machine in mean seconds, as a piecewise linear function of time. It repeats after its end."""

    times: tuple[float, ...]
    """Seconds after the beginning of the simulation, from 0.0 on."""
    progress: tuple[float, ...]

    def duration(self, work: float, at: float) -> float:
        """Return how long `work` mean seconds take from `at` on."""
        span, whole = self.times[-1], self.progress[-1]
        if not span or not whole:
            return work
        offset = at % span
        repeats, rest = divmod(_interpolate(self.times, self.progress, offset) + work, whole)
        return repeats * span + _interpolate(self.progress, self.times, rest) - offset


def _interpolate(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Both increase."""
    right = min(max(1, bisect.bisect_right(xs, x)), len(xs) - 1)
    width = xs[right] - xs[right - 1]
    share = (x - xs[right - 1]) / width if width else 0.0
    return ys[right - 1] + share * (ys[right] - ys[right - 1])


@dataclass(frozen=True)
class StepTimes:
    coefficients: tuple[float, ...]
    scales: Mapping[tuple[int, int], float]
    """Recorded time of all steps of a size divided by the time that the coefficients give, by `kind`."""
    ratios: tuple[float, ...] = ()
    """Recorded time divided by mean time, by step."""
    speed: Speed = Speed((0.0,), (0.0,))

    def mean(self, size: Size) -> float:
        terms = sum(value * each for value, each in zip(self.coefficients, _terms(size), strict=True))
        return terms * self.scales.get(kind(size), 1.0)

    @property
    def error(self) -> float:
        """Half of the steps are within this share of their mean."""
        return statistics.median(abs(ratio - 1) for ratio in self.ratios)

    def seconds(self, size: Size, at: float) -> float:
        """Return the time of a step that starts at `at`."""
        return self.speed.duration(self.mean(size), at)


def _terms(size: Size) -> tuple[float, ...]:
    return 1.0, min(size.tokens, FEW), max(0, size.tokens - FEW), size.drawn, size.attended / 1000


def fit(steps: Sequence[Step], start: float = 0.0) -> StepTimes:
    """Of at least one step that took time. `start` is the time of the recording at which a simulation begins."""
    timed = [step for step in steps if is_timed(step)]
    alike: dict[tuple[int, int], list[float]] = {}
    for step in timed:
        alike.setdefault(kind(step.size), []).append(step.ended - step.started)
    means = {each: statistics.fmean(values) for each, values in alike.items()}
    rows = [[term / means[kind(step.size)] for term in _terms(step.size)] for step in timed]
    targets = [(step.ended - step.started) / means[kind(step.size)] for step in timed]
    terms = StepTimes(tuple(_not_negative(rows, targets)), {})
    expected: dict[tuple[int, int], float] = {}
    for step in timed:
        expected[kind(step.size)] = expected.get(kind(step.size), 0.0) + terms.mean(step.size)
    scales = {each: sum(values) / expected[each] for each, values in alike.items() if len(values) >= ENOUGH}
    model = replace(terms, scales=scales)
    ratios = tuple((step.ended - step.started) / model.mean(step.size) for step in timed)
    return replace(model, ratios=ratios, speed=_speed(timed, ratios, start))


def _speed(steps: Sequence[Step], ratios: Sequence[float], start: float) -> Speed:
    """Steps do not overlap. Without a step the machine has its mean speed."""
    times, progress = [0.0], [0.0]
    for step, ratio in zip(steps, ratios, strict=True):
        began, ended = max(step.started - start, times[-1]), step.ended - start
        if ended > began:
            progress += [progress[-1] + began - times[-1], progress[-1] + began - times[-1] + (ended - began) / ratio]
            times += [began, ended]
    return Speed(tuple(times), tuple(progress))


def is_timed(step: Step) -> bool:
    return step.ended > step.started


def kind(size: Size) -> tuple[int, int]:
    """Steps with the same are of a like size: within a factor of two in tokens and in positions."""
    return size.tokens.bit_length(), size.attended.bit_length()


def _not_negative(rows: list[list[float]], targets: list[float]) -> list[float]:
    """The x ≥ 0 with the least Σ (row · x − target)², by descent along one coordinate after the other."""
    count = len(rows[0])
    products = [[sum(row[i] * row[j] for row in rows) for j in range(count)] for i in range(count)]
    wanted = [sum(row[i] * target for row, target in zip(rows, targets, strict=True)) for i in range(count)]
    found = [0.0] * count
    for _ in range(ROUNDS):
        for i in range(count):
            if products[i][i] > 0:
                rest = wanted[i] - sum(products[i][j] * found[j] for j in range(count) if j != i)
                found[i] = max(0.0, rest / products[i][i])
    return found
