"""The result of `slipway eval` as text for the terminal."""

from collections.abc import Mapping
from typing import Any

_SHOWN = (
    *("samples", "errors", "unparsed", "truncated", "scored_tokens", "bits_per_byte", "prompt_tokens"),
    *("output_tokens", "seconds"),
)


def as_text(result: Mapping[str, Any]) -> str:
    """Return a section for each task, its categories, and the comparison if there is one."""
    endpoint = result["endpoint"]
    lines = [f"{endpoint['url']}, model {endpoint['model']}, seed {result['settings']['seed']}"]
    for name, task in result["tasks"].items():
        lines += ["", f"{name} ({task['kind']})", *_task(task)]
    for name, values in result.get("comparison", {}).get("tasks", {}).items():
        lines += ["", f"{name} compared with {result['comparison']['file']}", *_comparison(values)]
    return "\n".join(lines)


def _task(task: Mapping[str, Any]) -> list[str]:
    name = "perplexity" if "perplexity" in task else "accuracy"
    low, high = map(_number, task["interval"])
    lines = [f"  {name:<16}{_number(task[name]):>10}  95% interval {low} to {high}"]
    for bound in ("minimum", "maximum"):
        if bound in task:
            lines.append(f"  {bound:<16}{_number(task[bound]):>10}  {'passed' if task['passed'] else 'FAILED'}")
    lines += [f"  {each:<16}{task[each]!s:>10}" for each in _SHOWN if each in task]
    if categories := task.get("categories"):
        width = max(16, *(len(each) for each in categories)) + 2
        lines.append(f"  {'category':<{width}}{'samples':>8}{'correct':>9}{'accuracy':>10}")
        for category, values in categories.items():
            row = f"{values['samples']:>8}{values['correct']:>9}{_number(values['accuracy']):>10}"
            lines.append(f"  {category:<{width}}{row}")
    return lines + [f"  failed {count} times: {error}" for error, count in task["error_messages"].items()]


def _comparison(values: Mapping[str, Any]) -> list[str]:
    return [
        f"  {values['before']:.4f} before, {values['after']:.4f} now, on {values['samples']} samples of both",
        f"  {values['lost']} samples worse, {values['gained']} better, McNemar p = {values['p_value']:.4g}: "
        f"{values['verdict']}",
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
