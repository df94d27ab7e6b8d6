"""What is wrong with a manifest, each with its place, and all together in one message.

A line reads `file:line:column: path.of.key: what was given; what is allowed; a suggestion`. Values below `secrets` are
never repeated: what stands there by mistake may be the secret itself.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from appliance import exits
from appliance.declare.keys import children, find
from appliance.declare.locate import Fault, Path, Place, Tree, dotted
from appliance.declare.suggest import suggest_key, suggest_value

MAX_GIVEN = 60


@dataclass(frozen=True)
class Problem:
    place: Place
    key: str
    message: str

    def __str__(self) -> str:
        source = self.place.source.replace("-", "_")  # a flag writes the key's underscores as dashes
        said = not self.key or (self.place.line == 0 and source.endswith(self.key))
        return f"{self.place}: {self.message}" if said else f"{self.place}: {self.key}: {self.message}"


class Refused(Exception):
    """A manifest that cannot be served. `problems` are in file order, those of options and variables last; `cause` says
    with which code a command ends."""

    def __init__(self, problems: Iterable[Problem], cause: exits.Exit = exits.MANIFEST) -> None:
        self.cause = cause
        self.problems = sorted(problems, key=lambda p: (p.place.line == 0, p.place.line, p.place.column))
        super().__init__("\n".join(map(str, self.problems)))


def from_fault(fault: Fault) -> Problem | None:
    """A fault of spelling; None where the key takes just this word (`log_outputs: off`), so nothing is ambiguous."""
    key = find(fault.path) if fault.path else None
    if not fault.readings:
        return Problem(fault.place, dotted(fault.path), _join(fault.message, fault.hint))
    raw = fault.readings[-1][1].strip('"')
    if key and raw in key.choices:
        return None
    item = bool(fault.path) and isinstance(fault.path[-1], int)
    types = frozenset({"string"}) if item else key.types if key else frozenset()
    fitting = [text for kind, text in fault.readings if kind in types or (kind == "integer" and "number" in types)]
    if fault.path[:1] == ("secrets",):
        return Problem(fault.place, dotted(fault.path), "ambiguous (value not shown); put it in quotes")
    if key and not fitting:
        return Problem(fault.place, dotted(fault.path), _join(fault.message, f"must be {key.allowed}"))
    write = " or ".join(fitting or [text for _, text in fault.readings])
    return Problem(fault.place, dotted(fault.path), _join(fault.message, f"write {write}"))


def from_validation(error: ValidationError, tree: Tree) -> list[Problem]:
    """One problem for each wrong place; places that are faulty already are left out."""
    faulty = {fault.path for fault in tree.faults}
    found: dict[Path, Problem] = {}
    for detail in error.errors(include_url=False):
        path = _path(detail, tree.value)
        if any(path[: len(known)] == known for known in faulty if known) or path in found:
            continue
        found[path] = _problem(detail, path, tree)
    return list(found.values())


def _path(detail: ErrorDetails, value: Any) -> Path:
    """The place in the manifest behind a pydantic location, which also names union members and validators."""
    path: Path = ()
    for part in detail["loc"]:
        if path[:1] == ("secrets",) and len(path) == 2:
            break  # of the two kinds of secret neither fits: one problem, not four
        inside = isinstance(value, dict) and part in value or isinstance(value, list) and isinstance(part, int)
        if not inside:
            return (*path, part) if detail["type"] == "missing" else path
        path, value = (*path, part), value[part]
    return path


def _problem(detail: ErrorDetails, path: Path, tree: Tree) -> Problem:
    name = dotted(path)
    if path[:1] == ("secrets",):
        return _secret_problem(path, tree)
    match detail["type"]:
        case "missing":
            key = find(path)
            allowed = key.allowed if key else ""
            near = next((other for other in _siblings(path, tree) if _stands_for(other, path)), None)
            hint = f"is {dotted(near)} meant to be it?" if near else ""
            return Problem(_above(path, tree), name, _join("missing", f"must be {allowed}", hint))
        case "extra_forbidden":
            return Problem(tree.keys.get(path, _above(path, tree)), name, unknown_key(path))
        case "unknown_secret":
            path = tuple(detail["ctx"]["key"].split("."))
            known = ", ".join(tree.value.get("secrets", {})) or "no names at all"
            message = f"{given(path, _at(path, tree))} is no name in secrets; secrets has {known}"
            return Problem(tree.values.get(path, _above(path, tree)), dotted(path), message)
        case "one_kind":
            empty = next((name for name, inner in (_at(path, tree) or {}).items() if inner is None), None)
            hint = f"write {empty}: {{}}" if empty in ("sagemaker", "vertex") else ""
            return Problem(tree.values.get(path, _above(path, tree)), name, _join(str(detail["msg"]), hint))
    key, value = find(path), _at(path, tree)
    if key is None:
        return Problem(tree.values.get(path, _above(path, tree)), name, str(detail["msg"]))
    allowed = "text" if path and isinstance(path[-1], int) else key.allowed
    hint = suggest_value(key, value, item=bool(path) and isinstance(path[-1], int))
    return Problem(
        tree.values.get(path, _above(path, tree)), name, _join(given(path, value), f"must be {allowed}", hint)
    )


def unknown_key(path: Path) -> str:
    """What to say about a key that the schema does not have."""
    above = path[:-1]
    known = ", ".join(children(above))
    where = dotted(above) or "the manifest"
    hint, _ = suggest_key(path)
    return _join("unknown key", f"{where} has {known}" if known else f"{where} has no keys below it", hint)


def _secret_problem(path: Path, tree: Tree) -> Problem:
    allowed = "a secret is {file: path} or {env: NAME}, never the value itself"
    if len(path) == 1:
        return Problem(tree.values.get(path, _above(path, tree)), "secrets", f"must be a mapping of names; {allowed}")
    path = path[:2]
    value = _at(path, tree)
    if not isinstance(value, dict):
        kind = "empty" if value is None else "a literal value"
        return Problem(tree.values.get(path, _above(path, tree)), dotted(path), f"{kind} (not shown); {allowed}")
    for name, inner in value.items():
        place = tree.keys.get((*path, name), _above((*path, name), tree))
        if name not in ("file", "env"):
            hint = suggest_key((*path, name))[0]
            return Problem(place, dotted((*path, name)), _join("unknown key", allowed, hint))
        if not isinstance(inner, str):
            return Problem(place, dotted((*path, name)), "must be text (value not shown)")
    place = tree.keys.get(path, _above(path, tree))
    if len(value) == 1:
        wrong_name = "not a name of an environment variable (not shown; a secret itself must not stand here)"
        if "env" in value:
            return Problem(tree.values.get((*path, "env"), place), dotted((*path, "env")), wrong_name)
        wrong = f"not a name for a secret; must match {NAME_PATTERN}"
        return Problem(place, dotted(path), wrong)
    return Problem(place, dotted(path), f"{'both file and env' if value else 'nothing in it'}; {allowed}")


NAME_PATTERN = "^[a-z0-9][a-z0-9._-]{0,62}$"


def given(path: Path, value: Any) -> str:
    """A value as it was given, short, and not at all below `secrets`."""
    if path[:1] == ("secrets",):
        return "the value given (not shown)"
    match value:
        case None:
            return "empty"
        case bool():
            return "true" if value else "false"
        case str():
            text = f'"{value}"'
        case dict():
            text = "a mapping" + (f" with {', '.join(map(str, value))}" if value else "")
        case list():
            text = f"a list of {len(value)}"
        case _:
            text = str(value)
    return text if len(text) <= MAX_GIVEN else f"{text[: MAX_GIVEN - 1]}…"


def _at(path: Path, tree: Tree) -> Any:
    value = tree.value
    for part in path:
        value = value[part]
    return value


def _above(path: Path, tree: Tree) -> Place:
    """The place of the closest part of a path that was written."""
    for length in range(len(path) - 1, 0, -1):
        if place := tree.keys.get(path[:length]):
            return place
    return tree.values.get((), Place("manifest"))


def _siblings(path: Path, tree: Tree) -> list[Path]:
    try:
        value = _at(path[:-1], tree)
    except (KeyError, TypeError):
        return []
    return [(*path[:-1], name) for name in value if find((*path[:-1], name)) is None] if isinstance(value, dict) else []


def _stands_for(other: Path, path: Path) -> bool:
    """Whether an unknown key may be meant for a key, or for one below it."""
    return any(target[: len(path)] == path for target in suggest_key(other)[1])


def _join(*parts: str) -> str:
    return "; ".join(part for part in parts if part)
