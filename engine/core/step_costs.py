"""Operations and memory traffic of steps, counted from their plans (OBS-04).

A step multiplies each token by the matrices, and compares it with the keys in its reach. It reads the matrices once,
and the keys and values of each row. These are the terms of the roofline of `slipway plan`.
"""

from collections.abc import Sequence

from engine.api.config import StepCosts
from engine.core.plan import Row, StepPlan


class StepCounter:
    """Sums over the steps since the engine's start."""

    def __init__(self, costs: StepCosts | None) -> None:
        self._costs = costs
        self._free_at = 0.0  # end of the last step
        self.flops = 0.0
        self.read_bytes = 0.0
        self.seconds = 0.0

    def count(self, plan: StepPlan) -> None:
        """Count a step. Do nothing without costs."""
        if self._costs is not None and plan.rows:
            self.flops += step_flops(self._costs, plan.rows)
            self.read_bytes += step_bytes(self._costs, plan.rows)

    def took(self, started: float, ended: float) -> None:
        """Count the time of a step, without the time in which an earlier step was running."""
        self.seconds += max(0.0, ended - max(started, self._free_at))
        self._free_at = ended


def step_flops(costs: StepCosts, rows: Sequence[Row]) -> float:
    """Return the floating-point operations of a step."""
    tokens = sum(row.count for row in rows)
    samples = sum(row.samples for row in rows)
    flops = float(tokens * costs.token + samples * costs.sample)
    for reach, each in costs.attention:
        flops += each * sum(_keys(row, reach, causal=costs.causal) for row in rows)
    return flops


def step_bytes(costs: StepCosts, rows: Sequence[Row]) -> float:
    """Return the bytes of matrices, keys and values that a step reads."""
    tokens = sum(row.count for row in rows)
    read = float(costs.dense)
    if costs.experts:
        layers = sum(count for _, count in costs.routes)
        touched = sum(count * (1 - (1 - share) ** tokens) for share, count in costs.routes)
        read += costs.experts * touched / layers
    for reach, each in costs.state:
        read += each * sum(min(row.first + row.count, reach or row.first + row.count) for row in rows)
    return read


def _keys(row: Row, reach: int, *, causal: bool) -> int:
    """Return the sum of the numbers of keys that the tokens of a row read. reach: maximum number; 0: no limit."""
    end = row.first + row.count
    if not causal:
        return row.count * min(end, reach or end)
    return _triangle(end, reach) - _triangle(row.first, reach)


def _triangle(tokens: int, reach: int) -> int:
    """Return the sum of min(n, reach) for n from 1 to `tokens`."""
    below = min(tokens, reach or tokens)
    return below * (below + 1) // 2 + (tokens - below) * reach
