"""Performance goals on one GPU, and their keys in the results of the suite. docs/kernels.md has the same list.

Rates are compared with the roofline of the same device, and with vLLM in the same run (`--peer vllm`)."""

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


def _jobs(results: Results, side: str, shape: str) -> dict[str, dict[str, Any]]:
    """side: engines, or vllm."""
    found: dict[str, dict[str, Any]] = results.get(side, {}).get(shape, {}).get("jobs", {})
    return found


def _to_peer(shape: str, job: str, key: str) -> Find:
    """Our value divided by vLLM's."""

    def find(results: Results) -> float | None:
        ours, theirs = (_jobs(results, side, shape).get(job, {}).get(key) for side in ("engines", "vllm"))
        return ours / theirs if ours and theirs else None

    return find


def _mix_to_peer(shape: str, mix: str) -> Find:
    """Our rate divided by vLLM's, of the run with the most requests."""

    def find(results: Results) -> float | None:
        names = [name for name in _jobs(results, "vllm", shape) if name.startswith(f"{mix}:")]
        most = max(names, key=lambda name: int(name.split(":")[1]), default="")
        return _to_peer(shape, most, "new_tokens_per_s")(results)

    return find


def _start_to_peer(results: Results) -> float | None:
    ours = results.get("again", {}).get("start_s", {}).get("engine")
    theirs = results.get("vllm", {}).get(LLAMA, {}).get("start_s", {}).get("engine")
    return ours / theirs if ours and theirs else None


def _of_copy(op: str, case: str) -> Find:
    """The share of the copy rate of one case."""
    return lambda results: next((row["of_copy"] for row in _rows(results, op) if row["case"] == case), None)


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
    Goal(
        "Llama-3.1-8B, prefill of 2,048 tokens: share of the matmul rate",
        0.75,
        "%",
        _job(LLAMA, "prefill:2048", "of_matmul"),
    ),
    *(
        Goal(
            f"Llama-3.1-8B, decode of {rows} row{'s' if rows > 1 else ''}: rate to vLLM's",
            1.05,
            "x",
            _to_peer(LLAMA, f"decode:{rows}:512", "tokens_per_s"),
        )
        for rows in (1, 32, 256)
    ),
    Goal("Llama-3.1-8B, chat mix: new tokens per second to vLLM's", 1.1, "x", _mix_to_peer(LLAMA, "chat")),
    Goal("Qwen3-0.6B, uniform mix: new tokens per second to vLLM's", 1.1, "x", _mix_to_peer(QWEN, "uniform")),
    Goal(
        "Llama-3.1-8B, prompt of 2,048 tokens: time to first token to vLLM's",
        0.9,
        "x",
        _to_peer(LLAMA, "prefill:2048", "ms"),
        False,
    ),
    Goal("Llama-3.1-8B, start of the engine, kernels cached: time to vLLM's", 0.3, "x", _start_to_peer, False),
    Goal(
        "BERT-large, prompts of 512 tokens: share of the matmul rate",
        0.33,
        "%",
        _job("bert-large", "embed:256:512", "of_matmul"),
    ),
    Goal("Qwen3-0.6B, 256 rows: device idle time", 300, "us a step", _job(QWEN, "profile:256:512", "gap_us"), False),
    Goal("Qwen3-30B-A3B, decode of 1 row: share of the roofline", 0.50, "%", _job(MOE, "decode:1:512", "of_roof")),
    Goal("Qwen3-30B-A3B, decode of 32 rows: share of the roofline", 0.70, "%", _job(MOE, "decode:32:512", "of_roof")),
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
        "sampling 256 rows of 151,936 logits, top_p 0.95: share of the copy rate",
        0.4,
        "%",
        _of_copy("sample", "top_p-256x151936"),
    ),
)
