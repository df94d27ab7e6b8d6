"""What would put a mistake right, as data about keys and values; `appliance.config.fix_edits` finds the columns.

Whoever refuses a key can name its remedy without knowing where in which file the key stands. Paths are those of the
manifest: in an overlay or a profile they begin where that does.
"""

from dataclasses import dataclass

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Write:
    """Another value, as YAML text."""

    text: str


@dataclass(frozen=True)
class Move:
    """The key belongs elsewhere, or has another name where it stands; `text` replaces its value where it is not ""."""

    path: Path
    text: str = ""


@dataclass(frozen=True)
class Remove:
    """The key goes, with its value."""


@dataclass(frozen=True)
class Add:
    """A key that is missing at the top level, with its value as YAML text."""

    name: str
    text: str


@dataclass(frozen=True)
class Strip:
    """`count` characters go, from the place of the problem on."""

    count: int


@dataclass(frozen=True)
class Replace:
    """A part of a text: the first `old` from the place of the problem on, in its line, becomes `new`."""

    old: str
    new: str


@dataclass(frozen=True)
class Mend:
    """The text is no YAML: what stands at the place is tried out."""


Remedy = Write | Move | Remove | Add | Strip | Replace | Mend


@dataclass(frozen=True)
class Hint:
    """What to say, and what would do it. `certain`: nothing else was meant, so it may be done without asking."""

    text: str = ""
    remedy: Remedy | None = None
    certain: bool = True
