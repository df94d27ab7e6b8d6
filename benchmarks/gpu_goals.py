"""Performance goals on one H200, and their keys in the results of the suite. docs/kernels.md has the same list."""

import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

LARGE, FEW = 64 << 20, 8 << 20  # bytes: from which on a kernel is judged by the memory's rate, up to which by its time

Results = dict[str, Any]
Find = Callable[[Results], float | None]


@dataclass(frozen=True)
class Goal:
    """`least`: the target is a lower bound, else an upper one. `find` gives None where the suite has no such result."""

    name: str
    target: float
    unit: str
    find: Find
    least: bool = True

    @property
    def wanted(self) -> str:
        return f"{'≥' if self.least else '≤'} {_number(self.target, self.unit)}"

    def line(self, results: Results) -> tuple[str, str, str, str]:
        """Return name, goal, measured value and its share of the goal. The goal is reached at 100 % or more."""
        found = self.find(results)
        if found is None:
            return self.name, self.wanted, "–", ""
        share = found / self.target if self.least else self.target / max(found, 1e-9)
        return self.name, self.wanted, _number(found, self.unit), f"{share:.0%}"


def _number(value: float, unit: str) -> str:
    if unit == "%":
        return f"{value:.0%}"
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def _job(shape: str, job: str, key: str) -> Find:
    return lambda results: results.get("engines", {}).get(shape, {}).get("jobs", {}).get(job, {}).get(key)


def _mix(shape: str, mix: str) -> Find:
    """The run of most requests."""

    def find(results: Results) -> float | None:
        jobs = results.get("engines", {}).get(shape, {}).get("jobs", {})
        found = {int(name.split(":")[1]): one for name, one in jobs.items() if name.startswith(f"{mix}:")}
        return found[max(found)].get("new_tokens_per_s") if found else None

    return find


def _rows(results: Results, *ops: str) -> Iterator[dict[str, Any]]:
    """Timed cases of operations whose names contain one of these words."""
    for row in results.get("bench", {}).get("rows", ()):
        if row["time"] is not None and any(word in row["op"] for word in ops):
            yield row


def _large(*ops: str) -> Find:
    """The least share of the copy rate among cases that move much."""
    return lambda results: _least(row["of_copy"] for row in _rows(results, *ops) if row["bytes"] >= LARGE)


def _least(values: Iterable[float]) -> float | None:
    return min(values, default=None)


def _most(values: Iterable[float]) -> float | None:
    return max(values, default=None)


def _time(results: Results, op: str, case: str) -> float | None:
    """Microseconds of one case."""
    return next((row["time"]["us"] for row in _rows(results, op) if row["case"] == case), None)


def _times_as_fast(results: Results, op: str, case: str, other: str) -> float | None:
    ours, theirs = _time(results, op, case), _time(results, op, other)
    return theirs / ours if ours and theirs else None


def _beside(results: Results, op: str, case: str) -> float | None:
    """How many times as fast as torch's own operation in the same run."""
    row = next((row for row in _rows(results, op) if row["case"] == case), None)
    return row["peer"]["us"] / row["time"]["us"] if row is not None and row["peer"] is not None else None


def _few(results: Results) -> float | None:
    found = [row["time"]["us"] for row in _rows(results, *ROWS) if row["bytes"] <= FEW]
    return statistics.median(found) if found else None


ROWS = ("rms_norm", "layer_norm", "qk_norm_rope_kv", "activation")
LLAMA, FP8, QWEN, MOE = "llama-3.1-8b", "llama-3.1-8b-fp8", "qwen3-0.6b", "qwen3-30b-a3b"
GOALS = (
    Goal("Llama-3.1-8B, decode of 1 row: share of the roofline", 0.80, "%", _job(LLAMA, "decode:1:512", "of_roof")),
    Goal("Llama-3.1-8B, decode of 32 rows: share of the roofline", 0.70, "%", _job(LLAMA, "decode:32:512", "of_roof")),
    Goal(
        "Llama-3.1-8B in fp8, decode of 1 row: share of the roofline", 0.70, "%", _job(FP8, "decode:1:512", "of_roof")
    ),
    Goal("Llama-3.1-8B, prefill of 2,048 tokens", 40_000, "tokens/s", _job(LLAMA, "prefill:2048", "tokens_per_s")),
    Goal("Llama-3.1-8B, chat mix, new tokens", 14_000, "tokens/s", _mix(LLAMA, "chat")),
    Goal("Qwen3-0.6B, uniform mix, new tokens", 25_000, "tokens/s", _mix(QWEN, "uniform")),
    Goal(
        "BERT-large, prompts of 512 tokens",
        400_000,
        "tokens/s",
        _job("bert-large", "embed:256:512", "tokens_per_s"),
    ),
    Goal("Qwen3-0.6B, 256 rows: device idle time", 300, "us a step", _job(QWEN, "profile:256:512", "gap_us"), False),
    Goal("Qwen3-30B-A3B, decode of 1 row: share of the roofline", 0.50, "%", _job(MOE, "decode:1:512", "of_roof")),
    Goal("Qwen3-30B-A3B, decode of 32 rows: share of the roofline", 0.70, "%", _job(MOE, "decode:32:512", "of_roof")),
    Goal(
        "Llama-3.1-8B, process start to first token, kernels cached",
        10,
        "s",
        lambda results: results.get("again", {}).get("start_s", {}).get("all"),
        False,
    ),
    Goal("decode attention, large cases: least share of the copy rate", 0.85, "%", _large("decode_attention")),
    Goal(
        "attention of spans: best share of the matmul rate",
        0.60,
        "%",
        lambda results: _most(row["of_matmul"] for row in _rows(results, "attention") if row["flops"]),
    ),
    Goal(
        "decode attention, 8-bit pages: times as fast as bf16",
        1.7,
        "x",
        lambda results: _times_as_fast(results, "decode_attention", "64x8192-fp8", "64x8192"),
    ),
    Goal(
        "attention of spans, 8,192 tokens: times as fast as torch's",
        1.0,
        "x",
        lambda results: _beside(results, "prefill_attention", "8192"),
    ),
    Goal("norms, heads, activation, large cases: least share of the copy rate", 0.85, "%", _large(*ROWS)),
    Goal("norms, heads, activation, small cases: median", 3, "us", _few, False),
    Goal(
        "sampling 256 rows of 151,936 logits, top_p 0.95",
        150,
        "us",
        lambda results: _time(results, "sample", "top_p-256x151936"),
        False,
    ),
)
