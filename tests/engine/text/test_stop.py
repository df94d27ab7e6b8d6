"""Stop strings against a brute-force rule on the whole text, for every way to cut it."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text import StopStrings


def feed(stops: list[str], parts: list[str], *, include: bool = False, min_tokens: int = 0) -> tuple[str, str | None]:
    watch = StopStrings(stops, include=include, min_tokens=min_tokens)
    text = ""
    for part in parts:
        result = watch.push(part)
        text += result.text
        if result.stop is not None:
            return text, result.stop
    return text + watch.flush(), None


def brute_force(stops: list[str], text: str, include: bool) -> tuple[str, str | None]:
    """Characters one by one: the first stop in the list that the text so far ends with."""
    for end in range(1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


def cuts(text: str) -> list[list[str]]:
    places = range(1, len(text))
    return [
        [text[a:b] for a, b in zip((0, *chosen), (*chosen, len(text)), strict=True)]
        for count in range(len(text))
        for chosen in combinations(places, count)
    ]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stops", [["END"], ["aab", "ab"], ["b", "aab"], ["xb", "b"], ["中a"], ["zz"]])
def test_every_cut_of_the_text_stops_at_the_same_place(stops: list[str], include: bool) -> None:
    """ST-01: test stop strings over several tokens, overlapping candidates and adjacent multi-byte characters."""
    for text in ("aaENDb", "aaaab", "é中ab", "xxb"):
        for parts in cuts(text):
            assert feed(stops, parts, include=include) == brute_force(stops, text, include), parts


@settings(deadline=None)
@given(
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.lists(st.text("ab", max_size=3), max_size=8),
    st.booleans(),
)
def test_random_texts_stop_as_by_brute_force(stops: list[str], parts: list[str], include: bool) -> None:
    assert feed(stops, parts, include=include) == brute_force(stops, "".join(parts), include)


@settings(deadline=None)
@given(
    st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=3),
    st.lists(st.text("abc", max_size=3), max_size=9),
)
def test_held_back_text_is_shorter_than_the_longest_stop_string(stops: list[str], parts: list[str]) -> None:
    """CO-22: at most max(len(stop)) - 1 characters are delayed, and what was sent is never part of a stop string."""
    watch, sent, given_text = StopStrings(stops), "", ""
    for part in parts:
        result = watch.push(part)
        given_text += part
        sent += result.text
        if result.stop is not None:
            break
        assert given_text.startswith(sent)
        assert len(given_text) - len(sent) <= max(map(len, stops)) - 1


def test_nothing_is_held_back_when_the_stop_string_is_included() -> None:
    watch = StopStrings(["END"], include=True)
    assert [watch.push(part).text for part in ("aE", "N", "x")] == ["aE", "N", "x"]
    assert watch.flush() == ""


@pytest.mark.parametrize("min_tokens", range(6))
def test_a_match_counts_only_after_min_tokens(min_tokens: int) -> None:
    """SA-09: the second END is completed by token 5, the first by token 2."""
    expected = {0: "a", 1: "a"}.get(min_tokens, "aENDb" if min_tokens < 5 else "aENDbEND")
    assert feed(["END"], ["aE", "ND", "b", "EN", "D"], min_tokens=min_tokens)[0] == expected


def test_a_token_without_text_counts_and_matches_nothing() -> None:
    assert feed(["ab"], ["", "a", "", "b"], min_tokens=3) == ("", "ab")
    assert feed(["ab"], ["a", "b", ""], min_tokens=2) == ("ab", None)


def test_without_stop_strings_text_passes_at_once() -> None:
    assert feed([], ["a", "", "b"]) == ("ab", None)
