"""Deprecated keys: the old name works, with a warning at each start, until the version that removes it.

One row defines a deprecation: the old name is accepted in files, variables and options, and `slipway check --fix`
renames it in the file. The row is deleted in the version that it names.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from appliance.config.fix import Move, Remove
from appliance.config.keys import find
from appliance.config.problems import Problem
from appliance.config.yaml_loader import Fault, Path, Place, Tree


@dataclass(frozen=True)
class Deprecated:
    """A deprecated key. Versions are versions of Slipway."""

    old: str
    new: str
    since: str  # first version that warns
    removed: str  # first version without the old name

    @property
    def old_path(self) -> tuple[str, ...]:
        return tuple(self.old.split("."))

    @property
    def new_path(self) -> tuple[str, ...]:
        return tuple(self.new.split("."))

    def warning(self, place: Place) -> Problem:
        message = f"deprecated since {self.since}: renamed to {self.new}; {self.removed} no longer accepts {self.old}"
        hint = f"write {self.new}"
        return Problem(place, self.old, message, hint=hint, fix=Move(self.new_path), code="deprecated")


DEPRECATED = (Deprecated("observability.stories", "observability.timelines", since="0.2", removed="0.4"),)


def current(path: tuple[str, ...]) -> tuple[str, ...]:
    """Return the current path of a key in an option or variable. Other paths are returned unchanged."""
    for row in DEPRECATED:
        if path[: len(row.old_path)] == row.old_path:
            return row.new_path + path[len(row.old_path) :]
    return path


def rename(tree: Tree) -> list[Problem]:
    """Move values from old names to new ones in a tree, with their places, and return a warning for each.

    Overlays and profiles in the file are included. If old and new name are both present, the tree gets a fault, because
    the intended value is unknown.
    """
    if not DEPRECATED:
        return []
    return [
        warning
        for base, layer in parts(tree.value)
        for row in DEPRECATED
        for warning in _rename(tree, row, base, layer)
    ]


def parts(value: Any, base: Path = (), layer: str = "") -> Iterator[tuple[Path, str]]:
    """Yield the path of each part of a file that contains manifest keys, and the name of the part."""
    yield base, layer
    overlays = value.get("overlays") if not base else None
    for name, inner in overlays.items() if isinstance(overlays, dict) else ():
        if isinstance(inner, dict):
            yield from parts(inner, ("overlays", name), f"overlay {name}")
    hardware = value.get("hardware")
    profiles = hardware.get("profiles") if isinstance(hardware, dict) else None
    for index, one in enumerate(profiles if isinstance(profiles, list) else ()):
        if isinstance(one, dict) and isinstance(one.get("set"), dict):
            name = f"profile {one.get('name', index)}" + (f" of {layer}" if layer else "")
            yield (*base, "hardware", "profiles", index, "set"), name


def _rename(tree: Tree, row: Deprecated, base: Path, layer: str) -> Iterator[Problem]:
    root = _mapping(tree.value, base)
    above = _mapping(root, row.old_path[:-1])
    if root is None or above is None or row.old_path[-1] not in above:
        return
    old, new = (*base, *row.old_path), (*base, *row.new_path)
    place = tree.keys.get(old) or tree.values[old]
    value = above.pop(row.old_path[-1])
    # remove a section that no longer exists together with its last key
    for length in range(len(row.old_path) - 1, 0, -1):
        if find(row.old_path[:length]) is None and not _mapping(root, row.old_path[:length]):
            del _at(root, row.old_path[: length - 1])[row.old_path[length - 1]]
    target = _mapping(root, row.new_path[:-1], make=True)
    if target is None or row.new_path[-1] in target:
        message = f"is set together with {row.new}, its name since {row.since}"
        hint = "remove the old one"
        tree.faults.append(Fault(old, place, message, (), hint, "duplicate-key", Remove(), certain=False))
        return
    target[row.new_path[-1]] = value
    for table in (tree.keys, tree.values, tree.dollars):
        _renamed(table, old, new)
    tree.faults = [
        replace(one, path=(*new, *one.path[len(old) :])) if one.path[: len(old)] == old else one for one in tree.faults
    ]
    for length in range(1, len(row.new_path)):
        tree.keys.setdefault(new[: len(base) + length], place)
        tree.values.setdefault(new[: len(base) + length], place)
    yield row.warning(place.within(layer, base) if base else place)


def _renamed(table: dict[Path, Any], old: Path, new: Path) -> None:
    for known in [known for known in table if known[: len(old)] == old]:
        table[(*new, *known[len(old) :])] = table.pop(known)


def _at(value: dict[str, Any], path: Path) -> dict[str, Any]:
    found = _mapping(value, path)
    assert found is not None, "a section was just read there"
    return found


def _mapping(value: Any, path: Path, make: bool = False) -> dict[str, Any] | None:
    for part in path:
        if make and isinstance(value, dict) and part not in value:
            value[str(part)] = {}
        if isinstance(value, dict):
            value = value.get(str(part))
        else:
            value = value[part] if isinstance(value, list) and isinstance(part, int) else None
    return value if isinstance(value, dict) else None
