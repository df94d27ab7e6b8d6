"""Formats of manifest problems: text, JSON, GitHub workflow commands, and SARIF 2.1.0 (OASIS)."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from appliance.config.codes import CODES
from appliance.config.findings import Finding
from appliance.config.fix_edits import Edit
from appliance.config.variables import is_on, value
from appliance.config.version import __version__
from appliance.config.yaml_loader import Place
from engine.api.printable import printable

RED, GREEN, BOLD, PLAIN = "\033[31m", "\033[32m", "\033[1m", "\033[0m"
MAX_COLUMNS = 200  # of a line of a file in a message
SARIF_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"


def has_colours(terminal: bool, environ: Mapping[str, str]) -> bool:
    """Return whether to use colours: on a terminal, unless it disables them (no-color.org)."""
    return terminal and not is_on(environ, "NO_COLOR") and value(environ, "TERM") != "dumb"


# -- text -------------------------------------------------------------------------------------------------------------


def as_text(found: Sequence[Finding], colours: bool = False) -> str:
    """Return one line for each problem, followed by the affected line and the suggested fix."""
    return "\n".join(line for finding in found for line in _block(finding, colours))


def _block(finding: Finding, colours: bool) -> list[str]:
    problem, place = finding.problem, finding.problem.place
    head = printable(str(problem), keep="\n")
    if colours:
        head = f"{BOLD}{printable(str(place))}{PLAIN}{head.removeprefix(printable(str(place)))}"
    lines = [head]
    width = max([place.line, *(number for number, _ in (*finding.removed, *finding.added))], default=0)
    margin = max(4, len(str(width)) + 1)
    if finding.line.strip():
        shown, column, end = _window(finding.line, *finding.mark)
        count = max(1, min(end, len(shown) + 1) - column)
        blank = "".join("\t" if char == "\t" else " " for char in shown[: column - 1])
        blank = blank.ljust(column - 1)
        lines += [f"{place.line:>{margin}} | {_line(shown)}"]
        lines += [f"{'':>{margin}} | {blank}{_painted('^' * count, RED, colours)}"]
    elsewhere = finding.edits[0].file if finding.edits and problem.fix_at else ""
    if elsewhere and elsewhere != place.source:
        lines += [f"{'':>{margin}} | written in {printable(elsewhere)}:"]
    # The source line is already shown; other removed lines are added.
    lines += [
        _painted(f"{number:>{margin}} - {_line(_cut(line))}".rstrip(), RED, colours)
        for number, line in finding.removed
        if (elsewhere and elsewhere != place.source) or number != place.line or not finding.added
    ]
    lines += [
        _painted(f"{number:>{margin}} + {_line(_cut(line))}".rstrip(), GREEN, colours) for number, line in finding.added
    ]
    return lines


def _window(line: str, column: int, end: int) -> tuple[str, int, int]:
    """Return the part of a long line around its mark, with the columns of the mark in it."""
    if len(line) <= MAX_COLUMNS:
        return line, column, end
    first = max(0, column - 1 - MAX_COLUMNS // 2)
    shown = f"{'…' if first else ''}{line[first : first + MAX_COLUMNS]}"
    moved = first - (1 if first else 0)
    return f"{shown}{'…' if first + MAX_COLUMNS < len(line) else ''}", column - moved, end - moved


def _cut(line: str) -> str:
    return line if len(line) <= MAX_COLUMNS else f"{line[:MAX_COLUMNS]}…"


def _line(text: str) -> str:
    return printable(text, keep="\t")


def _painted(text: str, colour: str, colours: bool) -> str:
    return f"{colour}{text}{PLAIN}" if colours else text


# -- JSON -------------------------------------------------------------------------------------------------------------


def as_json(found: Sequence[Finding]) -> str:
    return json.dumps([_object(finding) for finding in found], indent=1, ensure_ascii=False)


def _object(finding: Finding) -> dict[str, Any]:
    problem, place = finding.problem, finding.problem.place
    return {
        "source": place.source,
        "line": place.line or None,
        "column": place.column or None,
        "end_column": finding.end or None,
        "key": problem.key,
        "code": problem.code,
        "level": problem.level,
        "message": problem.message,
        "given": problem.given,
        "allowed": problem.allowed,
        "suggestion": problem.hint or finding.outside,
        "layer": place.layer,
        "extended_by": [_place(one) for one in place.via],
        "related": [{"key": key, **_place(one)} for key, one in problem.related],
        "certain": finding.fixable,
        "edits": [_edit(edit) for edit in finding.edits],
    }


def _place(place: Place) -> dict[str, Any]:
    return {"source": place.source, "line": place.line or None, "column": place.column or None}


def _edit(edit: Edit) -> dict[str, Any]:
    return {
        "file": edit.file,
        "line": edit.line,
        "column": edit.column,
        "end_line": edit.stop[0],
        "end_column": edit.end,
        "replacement": edit.replacement,
    }


# -- GitHub -----------------------------------------------------------------------------------------------------------


def as_github(found: Sequence[Finding]) -> str:
    """Return one workflow command for each problem; GitHub shows it next to the line in a pull request."""
    return "\n".join(map(_command, found))


def _command(finding: Finding) -> str:
    problem, place = finding.problem, finding.problem.place
    title = f"slipway {problem.code}" + (f": {problem.key}" if problem.key else "")
    values: dict[str, Any] = {"title": title}
    message = problem.text
    if place.line:
        ends = {"endColumn": finding.end - 1} if finding.end > place.column else {}
        values = {"file": _relative(place.source), "line": place.line, "col": place.column, **ends, **values}
    else:
        message = str(problem)
    properties = ",".join(f"{name}={_property(str(value))}" for name, value in values.items())
    return f"::{problem.level} {properties}::{_data(message)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def _relative(source: str) -> str:
    """Return the path relative to the current folder, which is the repository's in a workflow."""
    return os.path.relpath(source) if os.path.isabs(source) and source.startswith(os.getcwd() + os.sep) else source


# -- SARIF ------------------------------------------------------------------------------------------------------------


def as_sarif(found: Sequence[Finding]) -> str:
    """Return a SARIF log. Columns count characters, as in YAML positions."""
    rules = list(dict.fromkeys(finding.problem.code for finding in found))
    driver = {
        "name": "slipway",
        "version": __version__,
        "rules": [_rule(code) for code in rules],
    }
    run = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "results": [_result(finding, rules) for finding in found],
    }
    return json.dumps({"$schema": SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1, ensure_ascii=False)


def _rule(code: str) -> dict[str, Any]:
    meaning, cure = CODES[code]
    return {"id": code, "shortDescription": {"text": meaning}, "help": {"text": cure}}


def _result(finding: Finding, rules: list[str]) -> dict[str, Any]:
    problem, place = finding.problem, finding.problem.place
    text = f"{problem.key}: {problem.text}" if problem.key else problem.text
    result: dict[str, Any] = {
        "ruleId": problem.code,
        "ruleIndex": rules.index(problem.code),
        "level": problem.level,
        "message": {"text": text},
    }
    logical = {"name": problem.key, "kind": "member"} if problem.key else {"name": place.source}
    if place.line:
        result["locations"] = [{**_physical(place, finding.end), "logicalLocations": [logical]}]
    else:
        result["message"] = {"text": str(problem)}
        result["locations"] = [{"logicalLocations": [logical]}]
    others = [
        *((place, f"{key} is here") for key, place in problem.related),
        *((one, "extends it") for one in place.via),
    ]
    if related := [{**_physical(one), "message": {"text": text}} for one, text in others if one.line]:
        result["relatedLocations"] = related
    if finding.edits:
        result["fixes"] = [_fix(finding)]
    return result


def _physical(place: Place, end: int = 0) -> dict[str, Any]:
    """Return the location of a problem. `end` is the column after its text, if known."""
    region = {"startLine": place.line, "startColumn": place.column}
    if end > place.column:
        region["endColumn"] = end
    return {"physicalLocation": {"artifactLocation": {"uri": _uri(place.source)}, "region": region}}


def _fix(finding: Finding) -> dict[str, Any]:
    changes: dict[str, list[dict[str, Any]]] = {}
    for edit in finding.edits:
        region = {
            "startLine": edit.line,
            "startColumn": edit.column,
            "endLine": edit.stop[0],
            "endColumn": edit.end,
        }
        changes.setdefault(edit.file, []).append(
            {"deletedRegion": region, "insertedContent": {"text": edit.replacement}}
        )
    return {
        "description": {"text": finding.problem.hint or "the smallest change that makes it valid"},
        "artifactChanges": [
            {"artifactLocation": {"uri": _uri(file)}, "replacements": replacements}
            for file, replacements in changes.items()
        ],
    }


def _uri(source: str) -> str:
    from urllib.parse import quote

    path = _relative(source)
    return f"file://{quote(path)}" if os.path.isabs(path) else quote(path)


FORMATS: dict[str, Callable[[Sequence[Finding]], str]] = {
    "text": as_text,
    "json": as_json,
    "github": as_github,
    "sarif": as_sarif,
}
