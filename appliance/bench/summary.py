"""The numbers of a run: throughput, latencies, goodput, and the ratios of two endpoints."""

import re
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from appliance.bench.client import Outcome
from appliance.bench.run import Measured

PERCENTILES = (50, 90, 95, 99)
_OBJECTIVE = re.compile(r"(\w+)=(\d+(?:\.\d+)?)(ms|s)")


def _time_per_output_token(outcome: Outcome) -> float | None:
    if outcome.output_tokens < 2:
        return None
    return (outcome.last_s - outcome.first_s) / (outcome.output_tokens - 1)


LATENCIES: dict[str, Callable[[Outcome], float | None]] = {
    "ttft": lambda outcome: outcome.first_s or None,
    "tpot": _time_per_output_token,
    "request": lambda outcome: outcome.last_s or None,
}
"""Latencies of a request in seconds, by the name of its objective, or None if the request lacks it."""

_NAMES = {"ttft": "time_to_first_token_ms", "tpot": "time_per_output_token_ms", "request": "request_ms"}

COMPARED = {
    "requests_per_second": (),
    "output_tokens_per_second": (),
    "time_to_first_token_ms": ("p50", "p99"),
    "time_per_output_token_ms": ("p50", "p99"),
}
"""Numbers whose ratio is reported for two endpoints, with the percentiles."""


def parse_objective(text: str) -> tuple[str, float]:
    """Return the latency and its limit in seconds of `ttft=500ms`. Raises ValueError."""
    found = _OBJECTIVE.fullmatch(text)
    if found is None or found[1] not in LATENCIES:
        raise ValueError(f"--slo {text}: use {', '.join(LATENCIES)} with a limit in ms or s, such as ttft=500ms")
    return found[1], float(found[2]) / (1000 if found[3] == "ms" else 1)


def summarize_times(values_s: Sequence[float]) -> dict[str, float]:
    """Return mean and percentiles (nearest rank) in milliseconds; empty without values."""
    if not values_s:
        return {}
    ordered = sorted(values_s)
    ranks = {f"p{share}": ordered[max(0, -(-share * len(ordered) // 100) - 1)] for share in PERCENTILES}
    return {name: round(1000 * value, 3) for name, value in ({"mean": statistics.fmean(ordered)} | ranks).items()}


def summarize(measured: Measured, objectives: Mapping[str, float]) -> dict[str, Any]:
    """Return the numbers of a run; latencies are of complete replies only. `objectives`: limits in seconds."""
    outcomes, seconds = measured.outcomes, max(measured.seconds, 1e-9)
    good = [outcome for outcome in outcomes if not outcome.error]
    output = sum(outcome.output_tokens for outcome in good)
    numbers: dict[str, Any] = {
        "seconds": round(seconds, 3),
        "requests": len(outcomes),
        "failures": len(outcomes) - len(good),
        "prompt_tokens": sum(outcome.prompt_tokens for outcome in good),
        "cached_tokens": sum(outcome.cached_tokens for outcome in good),
        "output_tokens": output,
        "requests_per_second": round(len(good) / seconds, 3),
        "output_tokens_per_second": round(output / seconds, 3),
    }
    if audio_s := sum(outcome.audio_s for outcome in good):
        numbers["audio_seconds"] = round(audio_s, 3)
        numbers["rtfx"] = round(audio_s / seconds, 3)
    if objectives:
        within = [outcome for outcome in good if meets(outcome, objectives)]
        numbers["goodput_requests_per_second"] = round(len(within) / seconds, 3)
        numbers["attainment"] = round(len(within) / max(1, len(outcomes)), 4)
    for name, latency in LATENCIES.items():
        numbers[_NAMES[name]] = summarize_times([value for each in good if (value := latency(each)) is not None])
    numbers["inter_token_latency_ms"] = summarize_times([gap for outcome in good for gap in outcome.gaps_s])
    numbers["errors"] = dict(Counter(outcome.error for outcome in outcomes if outcome.error).most_common(10))
    return numbers


def meets(outcome: Outcome, objectives: Mapping[str, float]) -> bool:
    """Return true if each latency that the request has is within its limit."""
    values = ((LATENCIES[name](outcome), limit) for name, limit in objectives.items())
    return all(value is None or value <= limit for value, limit in values)


def pooled(rounds: Sequence[Measured]) -> Measured:
    """Return all rounds as one run."""
    outcomes = [outcome for each in rounds for outcome in each.outcomes]
    return Measured(outcomes, sum(each.seconds for each in rounds))


def compare(first: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return for each compared number the ratio of `other` to `first`: median, minimum and maximum over the rounds."""
    ratios: dict[str, list[float]] = {}
    for one, two in zip(first, other, strict=True):
        for name, percentiles in COMPARED.items():
            pairs = {f"{name} {each}": (one[name].get(each), two[name].get(each)) for each in percentiles}
            for label, (value, against) in (pairs or {name: (one[name], two[name])}).items():
                if value and against is not None:
                    ratios.setdefault(label, []).append(against / value)
    return {
        label: {"median": statistics.median(found), "min": min(found), "max": max(found)}
        for label, found in ratios.items()
    }
