"""Values of metrics as Python objects, for `LLM.get_metrics`."""

from dataclasses import dataclass

from engine.metrics.families import counters, gauges, histograms
from engine.metrics.store import MetricStore

ENGINE = "0"  # label of the only engine

VECTORS = {"draft_accepted_tokens_by_position": "position"}
"""Counters whose series are the elements of a vector, by the label with the index."""


@dataclass(frozen=True)
class Counter:
    name: str
    labels: dict[str, str]
    value: float


@dataclass(frozen=True)
class Gauge:
    name: str
    labels: dict[str, str]
    value: float


@dataclass(frozen=True)
class Vector:
    """Counters by index."""

    name: str
    labels: dict[str, str]
    values: list[float]


@dataclass(frozen=True)
class Histogram:
    name: str
    labels: dict[str, str]
    count: int
    sum: float
    buckets: dict[str, int]
    """Number of values up to each bound; "+Inf": all."""


MetricValue = Counter | Gauge | Vector | Histogram


def new_store(max_context: int, *, speculates: bool, costs: bool) -> MetricStore:
    """Return a store with the metrics that one engine without a gateway has."""
    families = (*gauges(), *counters(), *histograms(max_context))
    kept = [
        one for one in families if one.per_engine and (speculates or not one.speculative) and (costs or not one.costs)
    ]
    return MetricStore(kept, (ENGINE,))


def read(store: MetricStore, model_name: str) -> list[MetricValue]:
    """Return all values, with the names and labels of `/metrics`."""
    found: list[MetricValue] = []
    for family in store.families:
        name = f"slipway_{family.name}" + ("_total" if family.kind == "counter" else "")
        names = ("engine", *family.labels)
        if family.kind == "histogram":
            for key, each in store.histograms[family.name].items():
                buckets = each.cumulative()
                labels = {"model_name": model_name, **dict(zip(names, key, strict=True))}
                found.append(Histogram(name, labels, buckets["+Inf"], each.sum, buckets))
            continue
        numbers = store.numbers[family.name]
        if family.name in VECTORS:
            values = [numbers[key] for key in sorted(numbers, key=lambda key: int(key[1]))]
            found.append(Vector(name, {"model_name": model_name, "engine": ENGINE}, values))
            continue
        kind = Counter if family.kind == "counter" else Gauge
        found += (
            kind(name, {"model_name": model_name, **dict(zip(names, key, strict=True))}, value)
            for key, value in numbers.items()
        )
    return found
