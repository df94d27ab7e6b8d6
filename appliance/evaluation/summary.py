"""Numbers of a task, and the comparison of two results on the same samples."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from appliance.evaluation.run import Measured, Record
from appliance.evaluation.statistics import mcnemar, perplexity, perplexity_interval, wilson


class ComparisonError(Exception):
    """Raised for a file that is not a result, or that has none of the samples. The message names the file."""


def summarize(measured: Measured, seed: int) -> dict[str, Any]:
    """Return the numbers of a task. Samples with failed requests count as errors and not for the accuracy."""
    records, task = measured.records, measured.task
    good = [record for record in records if not record.error]
    numbers: dict[str, Any] = {
        "kind": task.kind,
        "samples": len(records),
        "errors": len(records) - len(good),
        **(_perplexity(good, seed) if task.kind == "perplexity" else _accuracy(good)),
        "prompt_tokens": sum(record.prompt_tokens for record in good),
        "output_tokens": sum(record.output_tokens for record in good),
        "seconds": round(measured.seconds, 3),
    }
    if task.minimum is not None:
        numbers["minimum"] = task.minimum
        numbers["passed"] = bool(good) and numbers["accuracy"] >= task.minimum
    if task.maximum is not None:
        numbers["maximum"] = task.maximum
        numbers["passed"] = bool(good) and numbers["perplexity"] is not None and numbers["perplexity"] <= task.maximum
    if task.kind != "perplexity":
        numbers["categories"] = _categories(good)
    numbers["error_messages"] = dict(Counter(each.error for each in records if each.error).most_common(10))
    numbers["scores"] = _scores(good, scored=task.kind == "perplexity")
    return numbers


def _accuracy(good: Sequence[Record]) -> dict[str, Any]:
    correct = sum(record.correct for record in good)
    return {
        "correct": correct,
        "unparsed": sum(record.answer is None for record in good),
        "truncated": sum(record.finish == "length" for record in good),
        "accuracy": round(correct / len(good), 6) if good else 0.0,
        "interval": [round(limit, 6) for limit in wilson(correct, len(good))],
    }


def _perplexity(good: Sequence[Record], seed: int) -> dict[str, Any]:
    parts = [(record.logprobs[0], record.scored_tokens) for record in good]
    bits = -sum(value for value, _ in parts) / math.log(2)
    size = sum(record.text_bytes for record in good)
    return {
        "scored_tokens": sum(count for _, count in parts),
        "perplexity": _finite(perplexity(parts)),
        "interval": [_finite(limit) for limit in perplexity_interval(parts, seed)],
        "bits_per_byte": _finite(bits / size) if size else None,
    }


def _finite(value: float) -> float | None:
    """Return the value, or None for infinity and NaN, which JSON lacks."""
    return round(value, 6) if math.isfinite(value) else None


def _categories(good: Sequence[Record]) -> dict[str, Any]:
    found: dict[str, list[Record]] = defaultdict(list)
    for record in good:
        if record.category:
            found[record.category].append(record)
    return {name: {"samples": len(found[name]), **_accuracy(found[name])} for name in sorted(found)}


def _scores(good: Sequence[Record], *, scored: bool) -> dict[str, float]:
    """Return 1 or 0 for each sample, or its mean log probability per byte. Equal samples are numbered."""
    seen, found = Counter[str](), dict[str, float]()
    for record in good:
        seen[record.id] += 1
        key = record.id if seen[record.id] == 1 else f"{record.id}.{seen[record.id]}"
        found[key] = round(record.logprobs[0] / record.text_bytes, 9) if scored else int(record.correct)
    return found


def compare(tasks: Mapping[str, Any], other: Any, significance: float) -> dict[str, Any]:
    """Compare each task with the one of the same name in another result. Only samples that both have count. Raises
    ComparisonError."""
    theirs = other.get("tasks") if isinstance(other, dict) else None
    if not isinstance(theirs, dict):
        raise ComparisonError("not a result of slipway eval")
    found = {name: _compared(tasks[name], theirs[name], significance) for name in tasks if name in theirs}
    if not found:
        raise ComparisonError(f"has no task named {' or '.join(tasks)}; it has {', '.join(theirs) or 'none'}")
    for name, values in found.items():
        if not values["samples"]:
            raise ComparisonError(f"has no sample of the task {name}; use the same file, limit and seed")
    return found


def _compared(task: Mapping[str, Any], other: Mapping[str, Any], significance: float) -> dict[str, Any]:
    if not isinstance(other, dict) or not isinstance(other.get("scores"), dict):
        raise ComparisonError("not a result of slipway eval")
    ours: Mapping[str, float] = task["scores"]
    theirs: Mapping[str, float] = other["scores"]
    if task["kind"] != other.get("kind"):
        raise ComparisonError(f"its task has the kind {other.get('kind')}, not {task['kind']}")
    both = [key for key in ours if key in theirs]
    lost = sum(ours[key] < theirs[key] for key in both)
    gained = sum(ours[key] > theirs[key] for key in both)
    p_value = mcnemar(lost, gained)
    verdict = "no significant difference"
    if p_value < significance:
        verdict = "worse" if lost > gained else "better"
    means = [sum(scores[key] for key in both) / max(1, len(both)) for scores in (theirs, ours)]
    return {
        "samples": len(both),
        "before": round(means[0], 6),
        "after": round(means[1], 6),
        "lost": lost,
        "gained": gained,
        "p_value": p_value,
        "verdict": verdict,
    }
