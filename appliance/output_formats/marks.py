"""Markers in a text that is still arriving."""

import re
from collections.abc import Callable, Iterable
from functools import lru_cache

SPACE = " \t\n\r"


@lru_cache(maxsize=1024)
def _begins(markers: tuple[str, ...]) -> Callable[[str], re.Match[str] | None]:
    """Finds where one of the markers may begin: most pieces of a reply have not even the first character of one."""
    beginnings = "".join(sorted({re.escape(marker[:1]) for marker in markers}))
    if "" in markers or not markers:
        return re.compile("" if markers else r"[^\s\S]").search  # an empty marker is everywhere, none is nowhere
    return re.compile(f"[{beginnings}]").search


def undecided(text: str, markers: Iterable[str]) -> int:
    """Length of the longest end of the text that may still become one of the markers."""
    markers = tuple(markers)
    if _begins(markers)(text) is None:
        return 0
    longest = max(map(len, markers), default=0) - 1
    for length in range(min(longest, len(text)), 0, -1):
        end = text[-length:]
        if any(marker.startswith(end) for marker in markers):
            return length
    return 0


def first(text: str, markers: Iterable[str]) -> tuple[int, str] | None:
    """Place and name of the marker that occurs first; of several at one place the longest."""
    markers = tuple(markers)
    if _begins(markers)(text) is None:
        return None
    found = [(place, -len(marker), marker) for marker in markers if (place := text.find(marker)) >= 0]
    if not found:
        return None
    place, _, marker = min(found)
    return place, marker


def decided(text: str, markers: tuple[str, ...]) -> tuple[int, str | None]:
    """How much of the text is no marker whatever follows, and the marker that stands there, if one is whole."""
    if _begins(markers)(text) is None:
        return len(text), None
    return first(text, markers) or (len(text) - undecided(text, markers), None)


def at_front(text: str, markers: Iterable[str]) -> str | None:
    """The longest marker that the text begins with, "" for none; None if more text may still complete a longer one."""
    best = ""
    for marker in markers:
        if text.startswith(marker):
            best = max(best, marker, key=len)
        elif marker.startswith(text):
            return None
    return best


def skip_space(text: str, at: int = 0) -> int:
    while at < len(text) and text[at] in SPACE:
        at += 1
    return at
