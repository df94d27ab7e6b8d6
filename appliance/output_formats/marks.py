"""Search for markers in text that is still arriving."""

import re
from collections.abc import Callable, Iterable
from functools import lru_cache

SPACE = " \t\n\r"


@lru_cache(maxsize=1024)
def _begins(markers: tuple[str, ...]) -> Callable[[str], re.Match[str] | None]:
    """Return a function that finds where a marker may begin. Most pieces of a reply contain no first character of a
    marker, so this check is cheap."""
    beginnings = "".join(sorted({re.escape(marker[:1]) for marker in markers}))
    if "" in markers or not markers:
        return re.compile("" if markers else r"[^\s\S]").search  # an empty marker matches everywhere, no marker nowhere
    return re.compile(f"[{beginnings}]").search


def undecided(text: str, markers: Iterable[str]) -> int:
    """Return the length of the longest suffix of the text that may still become a marker."""
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
    """Return position and name of the first marker; of several at one position the longest."""
    markers = tuple(markers)
    if _begins(markers)(text) is None:
        return None
    found = [(place, -len(marker), marker) for marker in markers if (place := text.find(marker)) >= 0]
    if not found:
        return None
    place, _, marker = min(found)
    return place, marker


def decided(text: str, markers: tuple[str, ...]) -> tuple[int, str | None]:
    """Return the length of the text before the first possible marker, and that marker if it is complete."""
    if _begins(markers)(text) is None:
        return len(text), None
    return first(text, markers) or (len(text) - undecided(text, markers), None)


def at_front(text: str, markers: Iterable[str]) -> str | None:
    """Return the longest marker at the beginning of the text, "" if there is none, None if more text may complete a
    longer one."""
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
