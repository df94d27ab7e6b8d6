"""Fixes of mistakes as data about keys and values; `appliance.config.fix_edits` converts them to text edits.

A check can return the fix without knowing where the key is written. Paths are paths of the manifest; in an overlay or a
profile they are relative to it.
"""

from dataclasses import dataclass

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Write:
    """Replace the value; `text` is YAML."""

    text: str


@dataclass(frozen=True)
class Move:
    """Move the key to another path, or rename it. A non-empty `text` replaces its value."""

    path: Path
    text: str = ""


@dataclass(frozen=True)
class Remove:
    """Remove the key and its value."""


@dataclass(frozen=True)
class Add:
    """Add a missing key at the top level; `text` is its value as YAML."""

    name: str
    text: str


@dataclass(frozen=True)
class Strip:
    """Remove `count` characters at the place of the problem."""

    count: int


@dataclass(frozen=True)
class Replace:
    """Replace the first `old` in the line, from the place of the problem, by `new`."""

    old: str
    new: str


@dataclass(frozen=True)
class RepairYaml:
    """Repair text that is not YAML, by trying common repairs."""


Fix = Write | Move | Remove | Add | Strip | Replace | RepairYaml


@dataclass(frozen=True)
class Hint:
    """A message for the operator, and its fix."""

    text: str = ""
    fix: Fix | None = None
    certain: bool = True  # True if no other fix is plausible, so that it can be applied without confirmation
