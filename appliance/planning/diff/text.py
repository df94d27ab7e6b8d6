"""Text and JSON output of a comparison."""

import json
import textwrap
from collections.abc import Iterable
from typing import Any

from appliance.planning.diff.config_snapshot import ConfigSnapshot
from appliance.planning.diff.diff import Change, Diff
from appliance.planning.diff.numbers import Number
from appliance.planning.memory import spell_bytes

WIDTH = 110
_LABEL = 10
_VALUE = 44
_NAMED = 5  # most keys listed per effect; --format json lists all


def as_text(diff: Diff) -> str:
    if not diff.changes:
        return f"{_names(diff)}: no difference"
    count = len(diff.changes)
    lines = [f"{_names(diff)}: {count} {'key differs' if count == 1 else 'keys differ'}", ""]
    lines += table(diff.changes)
    lines += ["", *_consequences(diff)]
    for snapshot in (diff.before, diff.after):
        if snapshot.refused is not None:
            problems = "\n".join(str(problem) for problem in snapshot.refused.problems)
            text = f"{snapshot.given.manifest} cannot be planned here, so resolved values are not compared:"
            lines += ["", text, textwrap.indent(problems, "  ")]
    return "\n".join(lines)


def _names(diff: Diff) -> str:
    one, other = diff.before.given, diff.after.given
    if one.manifest == other.manifest:
        said = [f"overlay {name}" for name in other.overlays]
        options = ", ".join([*said, *(f"{option.key}={option.text}" for option in other.options)])
        return f"{one.manifest} → with {options}" if options else str(one.manifest)
    return f"{one.manifest} → {other.manifest}"


def table(changes: Iterable[Change]) -> list[str]:
    """Return a table of keys, values and source locations."""
    return _table([_row(change) for change in changes])


def _row(change: Change) -> tuple[str, str, str]:
    old, new = (value.text if value else "not set" for value in (change.before, change.after))
    if change.key.startswith("secrets.") and change.before and change.after:
        new = "(another reference)"
    origins = [value.origin for value in (change.before, change.after) if value]
    places = " → ".join(origins)
    if set(origins) == {"default"}:
        reason = change.after.reason.removeprefix(f"{new.removesuffix(' (auto)')}, ") if change.after else ""
        places = f"follows: {reason}" if reason else "follows from other changes"
    return change.key, f"{old} → {new}", places if change.acts else f"{places}, with the same resolved value"


def _table(rows: list[tuple[str, str, str]]) -> list[str]:
    """Return a table of keys and values. If a value exceeds its column, its source location moves to the next line."""
    key, value = (
        max(len(row[0]) for row in rows),
        max((len(row[1]) for row in rows if len(row[1]) <= _VALUE), default=0),
    )
    lines = []
    for name, text, places in rows:
        if len(text) > value:
            lines += [f"{name:<{key}}  {text}", f"{'':<{key + value + 2}}  {places}"]
        else:
            lines.append(f"{name:<{key}}  {text:<{value}}  {places}")
    return lines


def _consequences(diff: Diff) -> list[str]:
    lines = _paragraph("restart", _restart(diff))
    lines += _paragraph("outputs", _outputs(diff))
    lines += _list("caches", diff.caches)
    lines += _memory(diff)
    return lines + _list("clients", diff.clients or ("are not affected",))


def _list(label: str, texts: Iterable[str]) -> list[str]:
    return [line for number, text in enumerate(texts) for line in _paragraph("" if number else label, text)]


def _keys(keys: tuple[str, ...]) -> str:
    rest = f" and {len(keys) - _NAMED} more keys" if len(keys) > _NAMED + 1 else ""
    return ", ".join(keys[: _NAMED if rest else None]) + rest


def _paragraph(label: str, text: str) -> list[str]:
    return textwrap.wrap(
        f"{label:<{_LABEL}}{text}",
        WIDTH,
        subsequent_indent=" " * _LABEL,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _restart(diff: Diff) -> str:
    if not diff.restart:
        return "nothing: `slipway reload` applies it without a restart" if diff.live else "nothing"
    drain = diff.before.values["lifecycle.drain"].text
    how = f"stop `slipway serve` (open requests have {drain}) and start it again"
    if diff.restart == ("engines",):
        how = "`slipway reload --restart` restarts them, and open requests resume"
    return f"{' and '.join(diff.restart)}, for {_keys(diff.causes)}; {how}"


def _outputs(diff: Diff) -> str:
    if diff.outputs:
        return f"may change, by {_keys(diff.outputs)}"
    if diff.rounding:
        keys = _keys(diff.rounding)
        return (
            f"same except for rounding: {keys} may change the order of sums, which can change a token when two are "
            "almost equally likely"
        )
    return "stay"


def _memory(diff: Diff) -> list[str]:
    """Return a memory table of one process, which is an engine or a rank. Unchanged parts are omitted."""
    numbers = diff.numbers
    rows = [
        (f"{'  ' * one.part}{one.name}", _amount(one, one.before), _amount(one, one.after), spell_share(one))
        for one in numbers
        if not one.part or one.before != one.after
    ]
    if all(one.before == one.after for one in numbers):
        return _paragraph("memory", "the same plan") if rows else []
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [
        f"{name:<{widths[0]}}  {old:>{widths[1]}} → {new:>{widths[2]}}  {share}".rstrip()
        for name, old, new, share in rows
    ]
    return [f"{'memory' if not number else '':<{_LABEL}}{line}" for number, line in enumerate(lines)]


def _amount(number: Number, value: float) -> str:
    if number.form == "rate":
        return f"{value:,.0f}/s"
    return spell_bytes(value) if number.form == "bytes" else f"{value:,}"


def spell_share(number: Number) -> str:
    """Format the relative change, for example `−12 %`; "" if nothing changes."""
    if number.before == number.after:
        return ""
    if number.share is None:
        return "new"
    percent = 100 * number.share
    digits = 0 if abs(percent) >= 1 else 1 if abs(percent) >= 0.1 else 3
    return f"{'−' if percent < 0 else '+'}{abs(percent):.{digits}f} %"


def as_json(diff: Diff) -> str:
    value = {
        "before": _snapshot(diff.before),
        "after": _snapshot(diff.after),
        "changes": [_entry(change) for change in diff.changes],
        "restart": list(diff.restart),
        "restart_causes": list(diff.causes),
        "live": list(diff.live),
        "outputs": list(diff.outputs),
        "rounding": list(diff.rounding),
        "caches": list(diff.caches),
        "memory": [
            {"name": one.name, "before": one.before, "after": one.after, "unit": one.form, "share": one.share}
            for one in diff.numbers
        ],
        "clients": list(diff.clients),
    }
    return json.dumps(value, indent=1, ensure_ascii=False)


def _snapshot(snapshot: ConfigSnapshot) -> dict[str, Any]:
    refused = snapshot.refused
    return {
        "manifest": str(snapshot.given.manifest),
        "options": {option.key: option.text for option in snapshot.given.options},
        "planned": snapshot.plan is not None,
        "outputs_sha256": snapshot.outputs_sha256,
        "graphs_sha256": snapshot.graphs_sha256,
        "refused": [str(problem) for problem in refused.problems] if refused else [],
    }


def _entry(change: Change) -> dict[str, Any]:
    entry: dict[str, Any] = {"key": change.key, "acts": change.acts}
    for name, value in (("before", change.before), ("after", change.after)):
        hidden = change.key.startswith("secrets.")
        entry[name] = (
            None
            if value is None
            else {"written": "(a reference)" if hidden else value.written, "text": value.text, "from": value.origin}
            | ({} if hidden else {"effective": value.effective})
        )
    return entry
