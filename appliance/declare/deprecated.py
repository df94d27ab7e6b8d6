"""Keys that have another name now: the old one works, with one warning a start, until the version that drops it.

A row is the whole of a deprecation: files, variables and options with the old name are read as the new one,
`slipway check --fix` renames it in the file, and the row goes with the version that it names.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from appliance.declare.keys import find
from appliance.declare.locate import Fault, Path, Place, Tree
from appliance.declare.problems import Problem
from appliance.declare.remedy import Move, Remove


@dataclass(frozen=True)
class Deprecated:
    """`since` and `removed` are versions of Slipway: the first that warns, the first without the old name."""

    old: str
    new: str
    since: str
    removed: str

    @property
    def old_path(self) -> tuple[str, ...]:
        return tuple(self.old.split("."))

    @property
    def new_path(self) -> tuple[str, ...]:
        return tuple(self.new.split("."))

    def warning(self, place: Place) -> Problem:
        message = (
            f"deprecated since {self.since}: this key is {self.new} now; {self.removed} will no longer read {self.old}"
        )
        hint = f"write {self.new}"
        return Problem(place, self.old, message, hint=hint, remedy=Move(self.new_path), code="deprecated")


DEPRECATED: tuple[Deprecated, ...] = ()


def current(path: tuple[str, ...]) -> tuple[str, ...]:
    """The present path of a key, for options and variables; any other path as it is."""
    for row in DEPRECATED:
        if path[: len(row.old_path)] == row.old_path:
            return row.new_path + path[len(row.old_path) :]
    return path


def rename(tree: Tree) -> list[Problem]:
    """Moves what stands under old names to the new ones, with its places, and gives a warning for each. Where both
    stand the tree gets a fault: nobody can know which is meant."""
    return [warning for row in DEPRECATED for warning in _rename(tree, row)]


def _rename(tree: Tree, row: Deprecated) -> Iterable[Problem]:
    above = _mapping(tree.value, row.old_path[:-1])
    if above is None or row.old_path[-1] not in above:
        return
    place = tree.keys.get(row.old_path) or tree.values[row.old_path]
    value = above.pop(row.old_path[-1])
    for length in range(len(row.old_path) - 1, 0, -1):  # a section that is no more goes with its last key
        if find(row.old_path[:length]) is None and not _mapping(tree.value, row.old_path[:length]):
            del _at(tree.value, row.old_path[: length - 1])[row.old_path[length - 1]]
    target = _mapping(tree.value, row.new_path[:-1], make=True)
    if target is None or row.new_path[-1] in target:
        message = f"stands beside {row.new}, which is its name since {row.since}"
        hint = "leave the old one out"
        tree.faults.append(
            Fault(row.old_path, place, message, hint=hint, code="duplicate-key", remedy=Remove(), certain=False)
        )
        return
    target[row.new_path[-1]] = value
    for places in (tree.keys, tree.values):
        for known in [known for known in places if known[: len(row.old_path)] == row.old_path]:
            places[row.new_path + known[len(row.old_path) :]] = places.pop(known)
    for length in range(1, len(row.new_path)):
        tree.keys.setdefault(row.new_path[:length], place)
        tree.values.setdefault(row.new_path[:length], place)
    yield row.warning(place)


def _at(value: dict[str, Any], path: Path) -> dict[str, Any]:
    found = _mapping(value, path)
    assert found is not None, "a section was just read there"
    return found


def _mapping(value: dict[str, Any], path: Path, make: bool = False) -> dict[str, Any] | None:
    for part in path:
        if make and part not in value:
            value[str(part)] = {}
        inner = value.get(str(part))
        if not isinstance(inner, dict):
            return None
        value = inner
    return value
