"""Where settings come from, and which one wins. The only module that reads the environment.

    --a.b value, --set a.b=value  >  SLIPWAY__A__B=value  >  the manifest  >  defaults of the schema

Mappings are merged key by key, everything else is replaced. Every value keeps the place it was written at.
"""

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path as File
from typing import Any

from pydantic import ValidationError

from appliance.declare import variables
from appliance.declare.deprecated import current, rename
from appliance.declare.keys import Key, children, find, leaves
from appliance.declare.locate import Fault, Path, Place, Tree, read_value, read_yaml
from appliance.declare.problems import Problem, Refused, from_fault, from_validation, unknown_key
from appliance.declare.suggest import flat, suggest_key
from appliance.declare.versions import Older, spoken, translate
from appliance.manifest import ONE_KIND, Manifest

PREFIX = "SLIPWAY__"


@dataclass(frozen=True)
class Option:
    """`--set key=value` or the flag of a key; `flag` is what to call it."""

    flag: str
    key: str
    text: str


@dataclass(frozen=True)
class Given:
    """All that is given from outside."""

    manifest: File
    options: tuple[Option, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Settings:
    """The effective manifest, and where each of its values was written. `auto` values still say auto."""

    manifest: Manifest
    tree: Tree
    path: File
    cache: File | None = None  # folder for what may be lost, after the XDG base directory specification
    older: Older | None = None  # the version that the file is written in, if it is not the present one
    notices: tuple[Problem, ...] = ()  # of deprecated names, for the operator; one each

    def origin(self, key: Key | Path) -> str:
        """`m.yaml:3:9`, `SLIPWAY__ENDPOINTS__PORT`, `--set endpoints.port`, or `default`."""
        path = key.path if isinstance(key, Key) else key
        place = self.tree.values.get(path)
        return str(place) if place else "default"

    def place(self, path: Path) -> Place:
        """Where a value is written, or the closest section around it."""
        for length in range(len(path), 0, -1):
            if place := self.tree.values.get(path[:length]):
                return place if length == len(path) else self.tree.keys.get(path[:length], place)
        return self.tree.values.get((), Place(str(self.path), 1, 1))


def environment() -> dict[str, str]:
    """A copy of the process's environment."""
    return dict(os.environ)


def cache_folder(environ: Mapping[str, str]) -> File | None:
    if cache := variables.value(environ, "XDG_CACHE_HOME"):
        return File(cache) / "slipway"
    home = variables.value(environ, "HOME")
    return File(home) / ".cache" / "slipway" if home else None


def load(given: Given) -> Settings:
    """Reads, merges and checks all sources. Raises Refused with every problem found."""
    merged = Tree(value={})
    notices: list[Problem] = []
    older: Older | None = None
    for name, read in reversed(SOURCES):
        tree = read(given)
        if name == "manifest" and (older := translate(tree)):
            notices.append(older.warning(tree))
        notices += rename(tree)
        _merge(merged, tree)
    with spoken(older):
        return _checked(given, merged, older, notices)


def _checked(given: Given, merged: Tree, older: Older | None, notices: list[Problem]) -> Settings:
    problems = [problem for fault in merged.faults if (problem := from_fault(fault))]
    problems += variables.wrong(given.environ)
    if any(not fault.path for fault in merged.faults):
        raise Refused(problems)  # the file could not be read as a whole: what is missing in it means nothing
    try:
        manifest = Manifest.model_validate(merged.value)
    except ValidationError as error:
        raise Refused([*problems, *from_validation(error, merged)]) from error
    if problems:
        raise Refused(problems)
    return Settings(manifest, merged, given.manifest, cache_folder(given.environ), older, tuple(notices))


# -- sources ----------------------------------------------------------------------------------------------------------


def read_manifest(given: Given) -> Tree:
    source = str(given.manifest)
    try:
        return read_yaml(given.manifest.read_bytes(), source)
    except OSError as error:
        what = "no such file" if isinstance(error, FileNotFoundError) else (error.strerror or str(error)).lower()
        raise Refused([Problem(Place(source), "", what)]) from error


def read_environment(given: Given) -> Tree:
    """Variables that start with SLIPWAY__ (two underscores: a Kubernetes service named slipway sets SLIPWAY_PORT). A
    longer name is more precise and wins over a shorter one."""
    tree = Tree(value={})
    names = [name for name in given.environ if name.upper().startswith(PREFIX)]
    for name in sorted(names, key=lambda name: (name.count("__"), name)):
        path = _path_of(name)
        place = Place(name)
        if path is None:
            tree.faults.append(
                Fault((name,), place, "unknown setting", hint=_suggest_variable(name), code="unknown-key")
            )
        else:
            _merge(tree, _single(path, given.environ[name], place))
    return tree


def read_options(given: Given) -> Tree:
    tree = Tree(value={})
    for option in given.options:
        path = tuple(option.key.split("."))
        place = Place(option.flag)
        unknown = next((n for n in range(1, len(path) + 1) if current(path) == path and find(path[:n]) is None), 0)
        if unknown:
            tree.faults.append(Fault(path, place, unknown_key(path[:unknown]), code="unknown-key"))
        else:
            _merge(tree, _single(path, option.text, place))
    return tree


Source = tuple[str, Callable[[Given], Tree]]
# Highest precedence first; what none of them gives has the schema's default.
SOURCES: tuple[Source, ...] = (
    ("--set", read_options),
    ("environment", read_environment),
    ("manifest", read_manifest),
)


# -- variables --------------------------------------------------------------------------------------------------------


def variable(path: tuple[str, ...]) -> str:
    """SLIPWAY__ENDPOINTS__PORT"""
    return PREFIX + "__".join(part.upper() for part in path)


def _path_of(name: str) -> tuple[str, ...] | None:
    path: tuple[str, ...] = ()
    for part in name[len(PREFIX) :].split("__"):
        known = next((child for child in children(path) if child.upper() == part.upper()), None)
        path = (*path, known or part.lower())
    return path if find(current(path)) else None


def _suggest_variable(name: str) -> str:
    word = flat(name[len(PREFIX) :])
    table = {flat(variable(key.path)[len(PREFIX) :]): variable(key.path) for key in leaves() if "*" not in key.path}
    if close := difflib.get_close_matches(word, table, 1, 0.7):
        return f"did you mean {table[close[0]]}?"
    last = name.rsplit("__", 1)[-1].lower()
    _, targets = suggest_key((last,))
    if targets:
        return f"did you mean {variable(tuple(map(str, targets[0])))}?"
    return "the names are those of the manifest's keys, such as SLIPWAY__ENDPOINTS__PORT"


# -- merging ----------------------------------------------------------------------------------------------------------


def _single(path: tuple[str, ...], text: str, place: Place) -> Tree:
    """One value with the sections around it."""
    tree = Tree()
    tree.value = read_value(text, place, path, tree)
    for length in range(len(path), 0, -1):
        tree.value = {path[length - 1]: tree.value}
        tree.keys[path[:length]] = place
        tree.values.setdefault(path[:length], place)
    return tree


def _forget(tree: Tree, path: Path) -> None:
    for places in (tree.keys, tree.values):
        for known in [known for known in places if known[: len(path)] == path]:
            del places[known]


def _merge(into: Tree, over: Tree) -> None:
    """Lays a source of higher precedence over what is there."""
    into.faults += over.faults
    if () in over.values:
        into.values[()] = over.values[()]
    _merge_below((), into.value, over.value, into, over)


def _merge_below(path: Path, low: dict[str, Any], high: dict[str, Any], into: Tree, over: Tree) -> None:
    if path in ONE_KIND:
        for rival in [name for name in low if high and name not in high]:
            _forget(into, (*path, rival))
            del low[rival]
    for name, value in high.items():
        inner = (*path, name)
        if isinstance(value, dict) and isinstance(low.get(name), dict):
            _merge_below(inner, low[name], value, into, over)
            continue
        _forget(into, inner)
        low[name] = value
        for mine, theirs in ((into.keys, over.keys), (into.values, over.values)):
            mine |= {known: place for known, place in theirs.items() if known[: len(inner)] == inner}
