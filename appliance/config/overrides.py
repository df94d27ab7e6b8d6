"""Overrides from outside a manifest's files: command-line options and environment variables."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path as File

from appliance.config.aliases import flat
from appliance.config.deprecated import current
from appliance.config.keys import children, find, leaves
from appliance.config.merge import merged
from appliance.config.platform_variables import read_platform_variables
from appliance.config.problems import unknown_key
from appliance.config.suggest import suggest_key
from appliance.config.yaml_loader import Fault, Place, Tree, single_value

PREFIX = "SLIPWAY__"


@dataclass(frozen=True)
class Option:
    """An option: `--set key=value`, or the flag of a key."""

    flag: str  # name of the option in messages
    key: str
    text: str


@dataclass(frozen=True)
class Given:
    """All inputs from outside the manifest's files."""

    manifest: File
    options: tuple[Option, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    overlays: tuple[str, ...] = ()  # names of overlays in the manifest, or files
    text: str = ""
    """The manifest's content if it is not read from a file; `manifest` is then its name in messages."""


def read_environment(given: Given) -> Tree:
    """Read variables that start with SLIPWAY__ into a tree, over the variables of hosting platforms.

    The prefix has two underscores, because a Kubernetes service named slipway sets SLIPWAY_PORT. A longer name is more
    specific and overrides a shorter one.
    """
    trees = read_platform_variables(given.environ)
    names = [name for name in given.environ if name.upper().startswith(PREFIX)]
    for name in sorted(names, key=lambda name: (name.count("__"), name)):
        path = _path_of(name)
        place = Place(name)
        if path is None:
            fault = Fault((name,), place, "unknown setting", hint=_suggest_variable(name), code="unknown-key")
            trees.append(Tree(value={}, faults=[fault]))
        else:
            trees.append(_only_in_files(path, place) or single_value(path, given.environ[name], place))
    return merged(*trees)


def read_options(given: Given) -> Tree:
    trees = []
    for option in given.options:
        path = tuple(option.key.split("."))
        place = Place(option.flag)
        unknown = next((n for n in range(1, len(path) + 1) if current(path) == path and find(path[:n]) is None), 0)
        if unknown:
            trees.append(Tree(value={}, faults=[Fault(path, place, unknown_key(path[:unknown]), code="unknown-key")]))
        else:
            trees.append(_only_in_files(path, place) or single_value(path, option.text, place))
    return merged(*trees)


def assignment(place: Place, text: str) -> str:
    """Return the instruction to give an option or variable another value."""
    if not place.source.startswith("--"):
        return f"set {place.source}={text}"
    return f"pass {place.source}{'=' if place.source.startswith('--set ') else ' '}{text}"


def _only_in_files(path: tuple[str, ...], place: Place) -> Tree | None:
    if path[0] not in ("extends", "overlays"):
        return None
    hint = "apply another file with --overlay FILE"
    return Tree(value={}, faults=[Fault(path, place, "can only be written in a file", (), hint, "wrong-layer")])


# -- names of variables -----------------------------------------------------------------------------------------------


def variable(path: tuple[str, ...]) -> str:
    """Return the variable of a key, for example SLIPWAY__ENDPOINTS__PORT."""
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
