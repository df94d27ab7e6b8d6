"""Merging and splitting of trees. Every value keeps its source location.

Mappings are merged key by key; other values are replaced, and so are sections with exactly one key, such as a source.
"""

import copy
from dataclasses import replace
from typing import Any

from appliance.config.manifest import ONE_KIND
from appliance.config.yaml_loader import Fault, Path, Place, Tree

NOTE = "x-"


def merged(*trees: Tree) -> Tree:
    """Merge trees; a later tree overrides an earlier one. The arguments are not changed."""
    into = Tree(value={})
    for tree in trees:
        into.faults += tree.faults
        into.unknown |= tree.unknown
        if () in tree.values:
            into.values[()] = tree.values[()]
        _lay((), into.value, tree.value, into, _Over(tree))
    return into


class _Over:
    """Index of a tree that is merged over others: the entries of its tables by each prefix of their paths."""

    def __init__(self, tree: Tree) -> None:
        self.keys, self.values = tree.keys, tree.values
        self._below: tuple[dict[Path, dict[Path, Any]], ...] = tuple({} for _ in _tables(tree))
        for table, below in zip(_tables(tree), self._below, strict=True):
            for path, place in table.items():
                for length in range(1, len(path) + 1):
                    below.setdefault(path[:length], {})[path] = place

    def copy(self, path: Path, into: Tree) -> None:
        """Copy the entries at a path and below it."""
        for table, below in zip(_tables(into), self._below, strict=True):
            table |= below.get(path, {})


def _lay(path: Path, low: dict[str, Any], high: dict[str, Any], into: Tree, over: _Over) -> None:
    if path[-2:] in ONE_KIND and high:
        for rival in [name for name in low if name not in high]:
            _forget(into, (*path, rival))
            del low[rival]
    for name, value in high.items():
        inner = (*path, name)
        if isinstance(value, dict) and isinstance(low.get(name), dict):
            # A section has the location of the highest file that contains it. Options, variables and layers do not move
            # it.
            if inner in over.keys and over.keys[inner].line and not over.keys[inner].layer:
                into.keys[inner], into.values[inner] = over.keys[inner], over.values[inner]
            _lay(inner, low[name], value, into, over)
            continue
        _forget(into, inner)
        low[name] = copy.deepcopy(value)
        over.copy(inner, into)


def _tables(tree: Tree) -> tuple[dict[Path, Any], ...]:
    return tree.keys, tree.values, tree.dollars, tree.interpolated


def _forget(tree: Tree, path: Path) -> None:
    if path not in tree.keys and path not in tree.values:
        return
    for table in _tables(tree):
        for known in [known for known in table if known[: len(path)] == path]:
            del table[known]


def below(tree: Tree, path: Path, layer: str) -> Tree:
    """Return the mapping below one key as a tree whose places name the layer."""
    size = len(path)
    cut = Tree(value=copy.deepcopy(at(tree, path)))
    cut.keys = {known[size:]: place.within(layer, path) for known, place in tree.keys.items() if _in(known, path)}
    cut.values = {known[size:]: place.within(layer, path) for known, place in tree.values.items() if _in(known, path)}
    cut.dollars = {
        known[size:]: tuple(place.within(layer, path) for place in places)
        for known, places in tree.dollars.items()
        if _in(known, path)
    }
    cut.interpolated = {known[size:]: spelled for known, spelled in tree.interpolated.items() if _in(known, path)}
    cut.faults = [
        replace(fault, path=fault.path[size:], place=fault.place.within(layer, path))
        for fault in tree.faults
        if _in(fault.path, path)
    ]
    return cut


def _in(path: Path, above: Path) -> bool:
    return len(path) > len(above) and path[: len(above)] == above


def without(tree: Tree, path: Path) -> Tree:
    """Return the tree without one key, and without everything below it, including faults."""
    rest = merged(tree)
    rest.faults = [fault for fault in tree.faults if fault.path[: len(path)] != path]
    holder = at(rest, path[:-1])
    if isinstance(holder, dict):
        holder.pop(path[-1], None)
    _forget(rest, path)
    return rest


def at(tree: Tree, path: Path) -> Any:
    """Return the value at a path, or None if the path does not exist."""
    value = tree.value
    for part in path:
        if isinstance(value, dict):
            value = value.get(part)
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        else:
            return None
    return value


def without_notes(tree: Tree) -> Tree:
    """Return the tree without keys that start with x-, which are notes of the operator.

    Names chosen by the operator, such as names of secrets, may start with x-.
    """
    notes = [path for path in tree.keys if _is_note(path)]
    for path in sorted(notes, key=len):
        tree = without(tree, path)
    return tree


def _is_note(path: Path) -> bool:
    return str(path[-1]).startswith(NOTE) and path[-2:-1] not in (("secrets",), ("overlays",))


def place_of(tree: Tree, path: Path) -> Place:
    """Return the location of a path: of its value, else of its key, else of the nearest parent."""
    for length in range(len(path), -1, -1):
        if place := tree.values.get(path[:length]) or tree.keys.get(path[:length]):
            return place
    return Place("manifest")


def fault(tree: Tree, path: Path, message: str, hint: str = "", code: str = "wrong-layer") -> Fault:
    return Fault(path, place_of(tree, path), message, hint=hint, code=code)
