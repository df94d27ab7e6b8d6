"""Model of step times, fitted to recorded steps: a mean that grows with the size of the step, and its variation.

The mean in seconds is a sum of terms with non-negative coefficients: a constant (weights are read once), tokens up to
FEW and beyond (few tokens cost as much as reading the weights, more tokens cost computation), sampled tokens (the LM
head), and attended positions. The fit is least squares, weighted by the inverse mean time of steps of similar size, so
that short steps count as much as long ones. A size with at least ENOUGH recorded steps uses their mean time.

The time of a recorded step relative to its mean is the speed of the machine at that time. A simulated step progresses
at
the speeds recorded from its start on. A machine that was slow for some seconds is therefore slow at the same time in
the
simulation, and a long step averages over many short ones.
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
    """Seconds since the beginning of the simulation, starting with 0.0."""
    progress: tuple[float, ...]

    def duration(self, work: float, at: float) -> float:
        """Return the time in seconds that `work`, given in mean seconds, takes when started at `at`."""
        span, whole = self.times[-1], self.progress[-1]
        if not span or not whole:
            return work
        offset = at % span
        repeats, rest = divmod(_interpolate(self.times, self.progress, offset) + work, whole)
        return repeats * span + _interpolate(self.progress, self.times, rest) - offset


def _interpolate(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Interpolate linearly. Both sequences are increasing."""
    right = min(max(1, bisect.bisect_right(xs, x)), len(xs) - 1)
    width = xs[right] - xs[right - 1]
    share = (x - xs[right - 1]) / width if width else 0.0
    return ys[right - 1] + share * (ys[right] - ys[right - 1])


@dataclass(frozen=True)
class StepTimes:
    coefficients: tuple[float, ...]
    scales: Mapping[tuple[int, int], float]
    """By `kind` of size: recorded time of all steps divided by the time predicted with the coefficients."""
    ratios: tuple[float, ...] = ()
    """By step: recorded time divided by mean time."""
    speed: Speed = Speed((0.0,), (0.0,))

    def mean(self, size: Size) -> float:
        terms = sum(value * each for value, each in zip(self.coefficients, _terms(size), strict=True))
        return terms * self.scales.get(kind(size), 1.0)

    @property
    def error(self) -> float:
        """Median relative deviation of steps from their mean."""
        return statistics.median(abs(ratio - 1) for ratio in self.ratios)

    def seconds(self, size: Size, at: float) -> float:
        """Return the time of a step that starts at `at`."""
        return self.speed.duration(self.mean(size), at)


def _terms(size: Size) -> tuple[float, ...]:
    return 1.0, min(size.tokens, FEW), max(0, size.tokens - FEW), size.drawn, size.attended / 1000


def fit(steps: Sequence[Step], start: float = 0.0) -> StepTimes:
    """Fit the model. At least one step must have taken time. `start`: time in the recording at which the simulation
    begins."""
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
    """Return the speed over time. Steps do not overlap. Between steps the machine has its mean speed."""
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
    """Return the class of similar sizes: equal within a factor of two in tokens and in positions."""
    return size.tokens.bit_length(), size.attended.bit_length()


def _not_negative(rows: list[list[float]], targets: list[float]) -> list[float]:
    """Return the x ≥ 0 that minimises Σ (row · x − target)², by coordinate descent."""
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
