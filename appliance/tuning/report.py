"""The table of candidates, the JSON result, and the overlay with its evidence."""

import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import Any

import yaml

from appliance.config.manifest import API_VERSION
from appliance.planning.memory import spell_bytes
from appliance.tuning.objective import Figures, Objective
from appliance.tuning.space import Axis, Settings
from appliance.tuning.tune import BASE, Candidate, Found, spelled

_WRAP: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False, "subsequent_indent": "  "}
SHOWN = 12
WIDTH = 118
_HEAD = ("tokens/s", "TTFT p50", "TTFT p99", "TPOT p50", "request", "meets", "memory", "from")


def as_text(found: Found, objective: Objective, axes: Sequence[Axis], shown: int = SHOWN) -> str:
    """Return the searched keys, the table and the conclusion."""
    lines = ["searched:"]
    for axis in axes:
        note = "; changes replies" if axis.changes_outputs else ""
        lines.append(f"  {axis.key}: {', '.join(axis.values)} (manifest: {axis.base}{note})")
    lines += [f"{len(found.candidates)} candidates; {len(found.refused)} combinations refused"]
    lines[-1] += f"; {found.skipped} not tried" if found.skipped else ""
    lines += [f"  {count} × {reason}" for reason, count in Counter(found.refused.values()).most_common(3)]
    lines += ["", *_table(found.candidates[:shown], objective)]
    if len(found.candidates) > shown:
        lines.append(f"… and {len(found.candidates) - shown} more")
    if found.out_of_time:
        lines.append("The time budget ended before all candidates were tried; run the command again to continue.")
    return "\n".join([*lines, "", conclusion(found, objective)])


def _table(candidates: Sequence[Candidate], objective: Objective) -> list[str]:
    rows: list[tuple[str, ...]] = [("", *_HEAD)]
    for one in candidates:
        rows += [(spelled(one.settings), *_cells(figures, objective, origin)) for figures, origin in _figures(one)]
        if one.error:
            rows.append((spelled(one.settings), one.error, *[""] * (len(_HEAD) - 1)))
    names = dict.fromkeys(row[0] for row in rows if row[0])
    numbers = {name: f"{number}" for number, name in enumerate(names, 1)}
    widths = [max(len(row[column]) for row in rows if len(row[1]) < 20) for column in range(1, len(_HEAD) + 1)]
    lines, last = [], ""
    for name, *cells in rows:
        if name and name != last:
            lines.append(f"{numbers[name]}. {name}")
        last = name
        lines.append("   " + "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip())
    return lines


def _figures(one: Candidate) -> list[tuple[Figures, str]]:
    predicted = [] if one.predicted is None else [(one.predicted, "predicted")]
    return [*predicted, *((figures, "measured") for figures in one.measured)]


def _cells(figures: Figures, objective: Objective, origin: str) -> tuple[str, ...]:
    def ms(name: str, which: str) -> str:
        value = figures[name].get(which)
        return "–" if value is None else f"{value:,.1f} ms"

    share = figures.get("attainment")
    meets = ("yes" if objective.meets(figures) else "no") if share is None else f"{100 * share:.0f} %"
    return (
        f"{figures['output_tokens_per_second']:,.1f}",
        ms("time_to_first_token_ms", "p50"),
        ms("time_to_first_token_ms", "p99"),
        ms("time_per_output_token_ms", "p50"),
        ms("request_ms", "mean"),
        meets,
        spell_bytes(figures["memory"]),
        origin,
    )


def conclusion(found: Found, objective: Objective) -> str:
    """Return one sentence about the choice."""
    best, base = found.best, found.base
    if best is None:
        limits = ", ".join(f"{name} {1000 * limit:g} ms" for name, limit in objective.limits_s.items())
        return f"No candidate meets the limits ({limits or 'no failed request'})."
    assert best.figures is not None, "only candidates with figures are chosen"
    value = _value(best.figures, objective)
    if best.settings == BASE:
        return f"The manifest is the best candidate: {value}. The overlay changes nothing."
    compared = "" if base.figures is None else f" (manifest: {_value(base.figures, objective)})"
    return f"The best candidate is {spelled(best.settings)}, with {objective.kind.text} of {value}{compared}."


def _value(figures: Figures, objective: Objective) -> str:
    value = abs(objective.kind.value(figures))
    return spell_bytes(value) if objective.name == "memory" else f"{value:,.1f} {objective.kind.unit}"


def as_json(found: Found, axes: Sequence[Axis]) -> dict[str, Any]:
    """Return the result as JSON values."""
    return {
        "axes": [{"key": axis.key, "values": axis.values, "manifest": axis.base} for axis in axes],
        "best": None if found.best is None else dict(found.best.settings),
        "candidates": [
            {
                "settings": dict(one.settings),
                "memory": one.memory,
                "predicted": one.predicted,
                "measured": one.measured,
                **({"error": one.error} if one.error else {}),
            }
            for one in found.candidates
        ],
        "refused": [{"settings": dict(chosen), "reason": reason} for chosen, reason in found.refused.items()],
        "not_tried": found.skipped,
        "out_of_time": found.out_of_time,
    }


def overlay(found: Found, objective: Objective, axes: Sequence[Axis], header: Sequence[str]) -> str:
    """Return the overlay of the best candidate. Its comments are the evidence."""
    assert found.best is not None, "there is something to write"
    evidence = as_text(found, objective, axes, shown=len(found.candidates)).splitlines()
    wrapped = (part for line in (*header, "", *evidence) for part in textwrap.wrap(line, WIDTH, **_WRAP) or [""])
    comments = [f"# {line}".rstrip() for line in wrapped]
    return "\n".join(comments) + "\n" + yaml.safe_dump(_tree(found.best.settings), sort_keys=False, width=WIDTH)


def _tree(chosen: Settings) -> dict[str, Any]:
    tree: dict[str, Any] = {"apiVersion": API_VERSION}
    for key, text in chosen:
        section, (*above, name) = tree, key.split(".")
        for part in above:
            section = section.setdefault(part, {})
        section[name] = yaml.safe_load(text)
    return tree
