"""The settings that are searched, and the order in which their combinations are tried."""

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from appliance.bench.run import Loop
from appliance.config.effects import effect
from appliance.config.keys import find
from appliance.config.spelling import spell
from appliance.planning.plan import Plan

Settings = tuple[tuple[str, str], ...]
"""Keys that differ from the manifest, with the YAML text of their values."""
Point = tuple[int, ...]
"""A combination: the index of the value on each axis."""

MAX_RUNNING = tuple(2**power for power in range(2, 10))
LEAST_STEP_TOKENS = 16
SIMULATED = frozenset(
    (
        *("engine.scheduling.max_running", "engine.scheduling.max_step_tokens", "parallelism.data"),
        *("parallelism.tensor", "hardware.kv_cache_memory"),
    )
)
"""Keys whose whole effect is in the simulation, as far as a search is concerned: those of `default_axes`."""
STARTS = 3
"""Number of points whose neighbours are tried."""


@dataclass(frozen=True)
class Axis:
    """A key and the values to try. `base`, the resolved value of the manifest, is one of them."""

    key: str
    values: tuple[str, ...]
    base: str

    @property
    def changes_outputs(self) -> bool:
        """True if other values change the replies, beyond the order of floating-point sums."""
        return effect(self.key).outputs == "yes"


def resolved(plan: Plan) -> dict[str, Any]:
    """Return the resolved values of all keys of a plan."""
    return {one.key: one.resolved for one in plan.effective}


def default_axes(plan: Plan, objective: str, loop: Loop) -> tuple[Axis, ...]:
    """Return the keys that do not change replies: limits of steps, and how the hardware is divided."""
    values, cuda = resolved(plan), plan.engines[0].hardware.device == "cuda"
    running, step = (values[f"engine.scheduling.{name}"] for name in ("max_running", "max_step_tokens"))
    most = 2 * (running if loop.arrivals is not None else loop.concurrency)
    useful = [count for count in MAX_RUNNING if most // 8 <= count <= most]
    steps = [step * 2**power // 8 for power in range(7)]
    units = len(plan.machine.gpus) if cuda else plan.machine.cores
    shares = [2**power for power in range(units.bit_length()) if 2**power <= units]
    axes = [
        _axis("engine.scheduling.max_running", useful, running),
        _axis("engine.scheduling.max_step_tokens", [count for count in steps if count >= LEAST_STEP_TOKENS], step),
        _axis("parallelism.data", shares, values["parallelism.data"]),
    ]
    if cuda:
        axes.append(_axis("parallelism.tensor", shares, values["parallelism.tensor"]))
    if objective == "memory" and plan.memory.cache:
        pool = plan.memory.cache
        axes.append(_axis("hardware.kv_cache_memory", [_mebibytes(pool // 2**power) for power in range(1, 6)], pool))
    return tuple(axis for axis in axes if len(axis.values) > 1)


METHOD, DRAFT_TOKENS = "speculation.method", "speculation.tokens"


def draft_axes(plan: Plan) -> tuple[Axis, ...]:
    """Return the settings of speculative decoding that the best candidate is run with. They do not change replies."""
    values = resolved(plan)
    method, tokens = values[METHOD], values[DRAFT_TOKENS]
    return (
        Axis(METHOD, tuple(dict.fromkeys((method, "auto", "ngram", "off"))), method),
        Axis(DRAFT_TOKENS, tuple(dict.fromkeys((str(tokens), "2", "8"))), str(tokens)),
    )


def with_value(chosen: Settings, axis: Axis, value: str) -> Settings:
    """Return the settings with another value of one key."""
    others = tuple(pair for pair in chosen if pair[0] != axis.key)
    return others if value == axis.base else (*others, (axis.key, value))


def _mebibytes(size: int) -> int:
    return max(1, size >> 20) << 20


def _axis(key: str, values: Sequence[int], base: int) -> Axis:
    form = "size" if key == "hardware.kv_cache_memory" else ""
    return Axis(key, tuple(spell(value, form) for value in sorted({*values, base})), spell(base, form))


def with_given(axes: Sequence[Axis], given: Mapping[str, tuple[str, ...]], plan: Plan) -> tuple[Axis, ...]:
    """Return the axes, with axes of the command line added or replaced. Raises ValueError."""
    found = {axis.key: axis for axis in axes}
    values = resolved(plan)
    for key, texts in given.items():
        known = find(tuple(key.split(".")))
        if known is None or key not in values:
            raise ValueError(f"--key {key}: not a key of the manifest that has a value; docs/manifest.md lists them")
        base = spell(values[key], known.form)
        found[key] = Axis(key, tuple(dict.fromkeys((base, *texts))), base)
    return tuple(axis for axis in found.values() if len(axis.values) > 1)


def settings(axes: Sequence[Axis], point: Point) -> Settings:
    """Return the keys at which a point differs from the manifest."""
    chosen = ((axis, axis.values[index]) for axis, index in zip(axes, point, strict=True))
    return tuple((axis.key, value) for axis, value in chosen if value != axis.base)


def base_point(axes: Sequence[Axis]) -> Point:
    return tuple(axis.values.index(axis.base) for axis in axes)


def size(axes: Sequence[Axis]) -> int:
    """Return the number of combinations."""
    return math.prod(len(axis.values) for axis in axes)


@dataclass
class Search:
    """Order in which points are tried.

    The manifest is first. If there are few others, all follow in an order drawn with the seed; else half of `limit` of
    them, and then neighbours of the best.
    """

    axes: tuple[Axis, ...]
    limit: int
    seed: int

    def run(self, evaluate: Callable[[Point], tuple[float, ...] | None]) -> dict[Point, tuple[float, ...]]:
        """Return the scores by point. `evaluate` returns None for a combination that is refused, and raises
        StopIteration to end the search."""
        scores: dict[Point, tuple[float, ...]] = {}
        tried: set[Point] = set()
        try:
            for point in self._points(scores, tried):
                tried.add(point)
                if (score := evaluate(point)) is not None:
                    scores[point] = score
        except StopIteration:
            pass
        return scores

    def _points(self, scores: Mapping[Point, tuple[float, ...]], tried: set[Point]) -> Iterator[Point]:
        total, generator = size(self.axes), random.Random(f"{self.seed}:candidates")
        yield base_point(self.axes)
        count = total if total <= self.limit else max(1, self.limit // 2)
        for number in generator.sample(range(total), count):
            point = self._point(number)
            if point not in tried and len(tried) < self.limit:
                yield point
        while len(tried) < min(self.limit, total):
            best = sorted(scores, key=lambda point: (scores[point], point), reverse=True)[:STARTS]
            untried = [near for point in best for near in self._neighbours(point) if near not in tried]
            if not untried:
                return
            yield untried[0]

    def _point(self, number: int) -> Point:
        point = []
        for axis in self.axes:
            number, index = divmod(number, len(axis.values))
            point.append(index)
        return tuple(point)

    def _neighbours(self, point: Point) -> Iterator[Point]:
        for place, (index, axis) in enumerate(zip(point, self.axes, strict=True)):
            for near in (index - 1, index + 1):
                if 0 <= near < len(axis.values):
                    yield (*point[:place], near, *point[place + 1 :])
