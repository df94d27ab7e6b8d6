"""Markers in streamed text, compared with their definition."""

import random

import pytest

from appliance.output_formats.marks import decided, first, undecided

SETS = [
    (),
    ("<think>",),
    ("<a>", "<a>b", "ab", "a"),
    ("]", "^", "-", "\\", "[x-z]"),
    ("aa", "aab", "ba"),
    ("", "b"),
    ("<tool_call>", "</think>", "<|im_end|>", "\n</tool_call>"),
    ("中", "🎉🎉", "\u2028x"),
]


def by_hand(text: str, markers: tuple[str, ...]) -> tuple[int, str | None]:
    """Return the earliest position of a marker, and the longest marker there; else all text except the longest suffix
    that begins one."""
    for at in range(len(text) + 1):
        whole = [marker for marker in markers if text.startswith(marker, at)]
        if whole:
            return at, max(whole, key=len)
    for at in range(len(text)):
        if any(marker != text[at:] and marker.startswith(text[at:]) for marker in markers):
            return at, None
    return len(text), None


@pytest.mark.parametrize("markers", SETS)
def test_decided_text_cannot_become_part_of_a_marker(markers: tuple[str, ...]) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    chance = random.Random(seed)
    letters = sorted({character for marker in markers for character in marker} | set("ab<>[]\n")) or ["a"]
    for _ in range(3000):
        text = "".join(chance.choice(letters) for _ in range(chance.randrange(9)))
        place, marker = by_hand(text, markers)
        assert decided(text, markers) == (place, marker), text
        assert first(text, markers) == (None if marker is None else (place, marker)), text
        if marker is None:
            assert undecided(text, markers) == len(text) - place, text
