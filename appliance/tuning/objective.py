"""The objective of a search, the limits that a candidate must keep, and the comparison of candidates."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from appliance.planning.plan import Plan

Figures = Mapping[str, Any]
"""The summary of `slipway bench`, and `memory`: the planned bytes of the service."""
Score = tuple[float, ...]


@dataclass(frozen=True)
class Kind:
    """A figure to improve."""

    text: str
    value: Callable[[Figures], float]
    """The figure; more is better."""
    unit: str


def _mean_ms(name: str) -> Callable[[Figures], float]:
    return lambda figures: -float(figures[name].get("mean", float("inf")))


OBJECTIVES: dict[str, Kind] = {
    "throughput": Kind("a throughput", lambda one: one["output_tokens_per_second"], "tokens/s"),
    "latency": Kind("a mean request time", _mean_ms("request_ms"), "ms"),
    "memory": Kind("a planned memory", lambda one: -one["memory"], "B"),
}


@dataclass(frozen=True)
class Objective:
    """The objective and the limits."""

    name: str
    limits_s: Mapping[str, float]
    """Limits of latencies in seconds, by name."""
    attainment: float
    """Share of the requests that must keep all limits."""

    @property
    def kind(self) -> Kind:
        return OBJECTIVES[self.name]

    def meets(self, figures: Figures) -> bool:
        """Return whether no request failed and enough of them kept the limits."""
        return not figures["failures"] and figures.get("attainment", 1.0) >= self.attainment

    def score(self, figures: Figures) -> Score:
        """Return the score; the greater one is better. Candidates that miss the limits are compared by how nearly they
        keep them. Equal memory is compared by throughput."""
        if not self.meets(figures):
            answered = 1 - figures["failures"] / max(1, figures["requests"])
            return (0.0, answered, figures.get("attainment", 1.0), self.kind.value(figures))
        return (1.0, self.kind.value(figures), figures["output_tokens_per_second"], 0.0)


def service_memory(plan: Plan) -> int:
    """Return the planned bytes of all engines."""
    return len(plan.engines) * plan.engines[0].parallelism.tensor * plan.memory.total
