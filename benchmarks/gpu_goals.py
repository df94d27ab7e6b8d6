"""What is aimed at on one H200, and where in the suite's results it is found. docs/kernels.md has the same list."""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

LARGE = 64 << 20  # bytes from which on a kernel is judged by the memory's rate

Results = dict[str, Any]
Find = Callable[[Results], float | None]


@dataclass(frozen=True)
class Goal:
    """`least`: the aim is a lower bound, else an upper one. `find` gives None where the suite has no such result."""

    name: str
    aim: float
    unit: str
    find: Find
    least: bool = True

    def line(self, results: Results) -> tuple[str, str, str, str]:
        """Name, aim, what was measured, and its share of the aim: 100 % and more is reached."""
        found = self.find(results)
        sign = "≥" if self.least else "≤"
        aim = f"{sign} {_number(self.aim, self.unit)}"
        if found is None:
            return self.name, aim, "–", ""
        share = found / self.aim if self.least else self.aim / max(found, 1e-9)
        return self.name, aim, _number(found, self.unit), f"{share:.0%}"


def _number(value: float, unit: str) -> str:
    return f"{value:.0%}" if unit == "%" else f"{value:,.3g} {unit}" if value < 1000 else f"{value:,.0f} {unit}"


def _job(shape: str, job: str, key: str, side: str = "engines") -> Find:
    return lambda results: results.get(side, {}).get(shape, {}).get("jobs", {}).get(job, {}).get(key)


def _mix(shape: str, mix: str) -> Find:
    """The run of most requests."""

    def find(results: Results) -> float | None:
        jobs = results.get("engines", {}).get(shape, {}).get("jobs", {})
        found = {int(name.split(":")[1]): one for name, one in jobs.items() if name.startswith(f"{mix}:")}
        return found[max(found)].get("new_tokens_per_s") if found else None

    return find


def _bench(results: Results, *words: str) -> Iterable[dict[str, Any]]:
    """Timed cases whose operation or case names have one of these words."""
    for row in results.get("bench", {}).get("rows", ()):
        if row["time"] is not None and any(word in f"{row['op']} {row['case']}" for word in words):
            yield row


def _least(values: Iterable[float]) -> float | None:
    return min(values, default=None)


def _small(results: Results) -> float | None:
    names = ("rms_norm", "layer_norm", "activation", "heads")
    found = [row["time"]["us"] for row in _bench(results, *names) if row["bytes"] < 8 << 20 and not row["flops"]]
    return statistics.median(found) if found else None


GOALS = (
    Goal("decode, 1 row, Llama-3.1-8B: share of the roof", 0.70, "%", _job("llama-3.1-8b", "decode:1:512", "of_roof")),
    Goal(
        "decode, 32 rows, Llama-3.1-8B: share of the roof", 0.70, "%", _job("llama-3.1-8b", "decode:32:512", "of_roof")
    ),
    Goal("prefill of 2,048, Llama-3.1-8B", 40_000, "tokens/s", _job("llama-3.1-8b", "prefill:2048", "tokens_per_s")),
    Goal("chat mix, Llama-3.1-8B, new", 12_500, "tokens/s", _mix("llama-3.1-8b", "chat")),
    Goal("uniform mix, Qwen3-0.6B, new", 25_000, "tokens/s", _mix("qwen3-0.6b", "uniform")),
    Goal(
        "device waits for the host, 256 rows, Qwen3-0.6B",
        300,
        "us a step",
        _job("qwen3-0.6b", "profile:256:512", "gap_us"),
        least=False,
    ),
    Goal(
        "process to first token, kernels cached, Llama-3.1-8B",
        10,
        "s",
        lambda results: results.get("again", {}).get("start_s", {}).get("all"),
        least=False,
    ),
    Goal(
        "decode attention from 64 MiB on: least share of the copy rate",
        0.85,
        "%",
        lambda results: _least(row["of_copy"] for row in _bench(results, "decode_attention") if row["bytes"] >= LARGE),
    ),
    Goal(
        "prefill attention: best share of the matmul rate",
        0.60,
        "%",
        lambda results: max((row["of_matmul"] for row in _bench(results, "prefill_attention")), default=None),
    ),
    Goal(
        "norms, heads, activation from 64 MiB on: least share of the copy rate",
        0.85,
        "%",
        lambda results: _least(
            row["of_copy"]
            for row in _bench(results, "rms_norm", "layer_norm", "heads", "activation")
            if row["bytes"] >= LARGE
        ),
    ),
    Goal("norms, heads, activation of a few rows, median", 3, "us", _small, least=False),
    Goal(
        "drawing tokens, 64 rows of 152,000, slowest",
        60,
        "us",
        lambda results: max((row["time"]["us"] for row in _bench(results, "sample 64")), default=None),
        least=False,
    ),
)
