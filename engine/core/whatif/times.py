"""A model of a step's time, fitted to recorded steps: what never shrinks when a step grows, and how it varies.

Mean seconds are a sum of terms with coefficients that are not negative: one a step (weights are read once), tokens up
to FEW and beyond (few of them cost what reading the weights costs, more of them computation), tokens drawn (the head),
and positions attended to. Least squares, weighed by the mean time of steps of a like size, so that short steps count as
much as long ones. The ratio of a step's time to its mean is drawn from the recorded steps of a like size, so that each
size keeps its mean time and its variation. A size with fewer than ENOUGH recorded steps draws from all of them.
"""

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from engine.core.whatif.traffic import Size, Step

FEW = 16
ROUNDS = 500
ENOUGH = 20


@dataclass(frozen=True)
class StepTimes:
    """`ratios`: of each recorded step, what it took to its mean."""

    coefficients: tuple[float, ...]
    ratios: tuple[float, ...]
    alike: Mapping[tuple[int, int], Sequence[float]] = field(default_factory=dict)
    """The ratios of sizes with at least ENOUGH recorded steps, by `kind`."""

    def mean(self, size: Size) -> float:
        return sum(value * each for value, each in zip(self.coefficients, _terms(size), strict=True))

    @property
    def error(self) -> float:
        """Half of the steps are within this share of their mean."""
        return statistics.median(abs(ratio - 1) for ratio in self.ratios)

    def drawn(self, seed: int = 0) -> Callable[[Size], float]:
        """Times of steps as they come, varied as the recorded ones; the same for the same seed."""
        choice = random.Random(seed).choice
        return lambda size: self.mean(size) * choice(self.alike.get(kind(size), self.ratios))


def _terms(size: Size) -> tuple[float, ...]:
    return 1.0, min(size.tokens, FEW), max(0, size.tokens - FEW), size.drawn, size.attended / 1000


def fit(steps: Sequence[Step]) -> StepTimes:
    """Of at least one step that took time."""
    timed = [(step.size, step.ended - step.started) for step in steps if is_timed(step)]
    alike: dict[tuple[int, int], list[float]] = {}
    for size, seconds in timed:
        alike.setdefault(kind(size), []).append(seconds)
    means = {each: statistics.fmean(values) for each, values in alike.items()}
    rows = [[term / means[kind(size)] for term in _terms(size)] for size, _ in timed]
    targets = [seconds / means[kind(size)] for size, seconds in timed]
    model = StepTimes(tuple(_not_negative(rows, targets)), ())
    ratios = [seconds / model.mean(size) for size, seconds in timed]
    middle = statistics.fmean(ratios)  # times that are drawn keep the mean
    return StepTimes(model.coefficients, tuple(ratio / middle for ratio in ratios), _ratios_alike(timed, model))


def _ratios_alike(timed: Sequence[tuple[Size, float]], model: StepTimes) -> dict[tuple[int, int], list[float]]:
    """Scaled so that all steps of a size together keep their recorded time."""
    groups: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for size, seconds in timed:
        groups.setdefault(kind(size), []).append((seconds, model.mean(size)))
    found = {}
    for each, pairs in groups.items():
        if len(pairs) >= ENOUGH:
            ratios = [seconds / mean for seconds, mean in pairs]
            total = sum(seconds for seconds, _ in pairs) / sum(mean for _, mean in pairs)
            scale = total / statistics.fmean(ratios)
            found[each] = [ratio * scale for ratio in ratios]
    return found


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
