"""Older versions of the manifest format, and the current names of their keys.

A file of an older version is read as if it were written in the current version, and each value keeps its location.
`slipway upgrade` uses the same table to rewrite the file.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from appliance.config.deprecated import parts
from appliance.config.fix import Move, Write
from appliance.config.manifest import API_VERSION
from appliance.config.problems import Problem, Refused
from appliance.config.yaml_loader import Fault, Path, Place, Tree, dotted


@dataclass(frozen=True)
class Rename:
    """A key that moved one level deeper, into a section that the older version does not have."""

    old: tuple[str, ...]
    new: tuple[str, ...]

    def __post_init__(self) -> None:
        assert self.new[:-2] == self.old[:-1], "a key moves to a new section in its own place"

    @property
    def section(self) -> tuple[str, ...]:
        return self.new[:-1]


@dataclass(frozen=True)
class Older:
    """An older version of the format."""

    name: str
    renames: tuple[Rename, ...]
    dropped_in: str  # first version of Slipway that does not read it

    def warning(self, tree: Tree) -> Problem:
        place = tree.values[("apiVersion",)]
        said = f"{self.name} is read as {API_VERSION} until Slipway {self.dropped_in}"
        hint = f"rewrite it with: slipway upgrade --write {place.source}"
        return Problem(place, "apiVersion", f"{said}; {hint}", self.name, API_VERSION, hint, code="deprecated")


OLDER = (Older("slipway/v1", (Rename(("model", "path"), ("model", "source", "path")),), dropped_in="0.3"),)


def older(value: Any) -> Older | None:
    """Return the older version that a manifest names, or None."""
    name = value.get("apiVersion") if isinstance(value, dict) else None
    return next((version for version in OLDER if version.name == name), None)


def translate(tree: Tree, unnamed: Older | None = None) -> Older | None:
    """Convert the tree of one file to the current version in place, and return its original version, or None if
    current.

    `unnamed` is the version of a file that names none. Features of the current version are faults in an older file.
    """
    version = older(tree.value) or unnamed
    if version is None:
        return None
    for base, _ in list(parts(tree.value)):
        for rename in version.renames:
            _move(tree, version, (*base, *rename.old), (*base, *rename.new))
    if "apiVersion" in tree.value:
        tree.value["apiVersion"] = API_VERSION
    return version


def _move(tree: Tree, version: Older, old: Path, new: Path) -> None:
    above, section = _at(tree.value, old[:-1]), new[:-1]
    if not isinstance(above, dict):
        return
    if section[-1] in above:
        hint = f"write apiVersion: {API_VERSION}, and {dotted(new)} for {dotted(old)}"
        message = f"belongs to {API_VERSION}, but the file is of {version.name}"
        tree.faults.append(Fault(section, tree.keys.get(section, Place("")), message, hint=hint))
    elif old[-1] in above:
        place = tree.keys[old]
        above[section[-1]] = {new[-1]: above.pop(old[-1])}
        tables: tuple[dict[Path, Any], ...] = (tree.keys, tree.values, tree.dollars, tree.interpolated)
        for places in tables:
            for path in [path for path in places if path[: len(old)] == old]:
                places[(*new, *path[len(old) :])] = places.pop(path)
        tree.keys[section] = tree.values[section] = place
        tree.faults = [_moved(fault, old, new) for fault in tree.faults]


def _moved(fault: Fault, old: Path, new: Path) -> Fault:
    return replace(fault, path=(*new, *fault.path[len(old) :])) if fault.path[: len(old)] == old else fault


def _at(value: Any, path: Path) -> Any:
    for part in path:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            return None
    return value


@contextmanager
def in_older_words(files: Mapping[str, Older]) -> Iterator[None]:
    """Rename keys in raised problems to the names in their files of older versions."""
    try:
        yield
    except Refused as refused:
        if not files:
            raise
        problems = [
            _in_older_words(problem, version) if (version := files.get(problem.place.source)) else problem
            for problem in refused.problems
        ]
        raise type(refused)(problems, refused.cause) from refused


def _in_older_words(problem: Problem, version: Older) -> Problem:
    if not problem.place.line:
        return problem  # options and variables have the current names
    for rename in version.renames:
        new, old = dotted(rename.new), dotted(rename.old)
        if problem.key == dotted(rename.section):
            message = f"{problem.message}; in {version.name} it is written {old}: …"
            return replace(problem, message=message, hint="", fix=None)
        message, hint = (_older_words(text, rename) for text in (problem.message, problem.hint))
        fix = problem.fix
        if isinstance(fix, Write):
            fix = Write(_older_words(fix.text, rename))
        elif isinstance(fix, Move) and fix.path == rename.new:
            fix = replace(fix, path=rename.old)
        key = old if problem.key == new else problem.key
        problem = replace(problem, key=key, message=message, hint=hint, fix=fix)
        if isinstance(fix, Write | Move) and f"{rename.section[-1]}: {{" in getattr(fix, "text", ""):
            problem = replace(problem, fix=None)  # the older version cannot express it
    return problem


def _older_words(text: str, rename: Rename) -> str:
    """Convert the location and spelling of a key in a message to the older version."""
    section, name = rename.section[-1], rename.new[-1]
    text = text.replace(dotted(rename.new), dotted(rename.old))
    text = text.replace(f"{dotted(rename.section)}: {name}", f"{dotted(rename.old[:-1])}: {rename.old[-1]}")
    return re.sub(rf"{section}: \{{{name}: ([^{{}}]*)\}}", rf"{rename.old[-1]}: \1", text)
