"""Markers in a text that is still arriving."""

from collections.abc import Iterable

SPACE = " \t\n\r"


def undecided(text: str, markers: Iterable[str]) -> int:
    """Length of the longest end of the text that may still become one of the markers."""
    markers = tuple(markers)
    longest = max(map(len, markers), default=0) - 1
    for length in range(min(longest, len(text)), 0, -1):
        end = text[-length:]
        if any(marker.startswith(end) for marker in markers):
            return length
    return 0


def first(text: str, markers: Iterable[str]) -> tuple[int, str] | None:
    """Place and name of the marker that occurs first; of several at one place the longest."""
    found = [(place, -len(marker), marker) for marker in markers if (place := text.find(marker)) >= 0]
    if not found:
        return None
    place, _, marker = min(found)
    return place, marker


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
