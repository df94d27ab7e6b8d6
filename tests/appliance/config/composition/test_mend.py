"""Position and message of the fix for a wrong interpolated value."""

import pytest

from appliance.config.composition.fix import fix_at_definition
from appliance.config.fix import Remove, Replace, Write
from appliance.config.keys import takes
from appliance.config.problems import Problem
from appliance.config.yaml_loader import Interpolated, Place, Tree

HERE, THERE = Place("m", 3, 9), Place("m", 1, 12)
KEY = ("model", "path")


def mended(text: str, interpolated: Interpolated, hint: str = "") -> Problem:
    tree = Tree(value={}, interpolated={KEY: interpolated})
    message = f"wrong; {hint}" if hint else "wrong"
    return fix_at_definition(Problem(HERE, "model.path", message, hint=hint, fix=Write(text)), tree)


@pytest.mark.parametrize("text", ['"a: b"', "a}b", "$a", "a\nb"])
def test_a_default_is_not_fixed_with_text_that_needs_escaping(text: str) -> None:
    assert mended(text, Interpolated("${A:-x}", HERE, "x")).fix is None
    assert mended("y", Interpolated("${A:-x}", HERE, "x")).fix == Replace(":-x}", ":-y}")


def test_where_several_gave_a_part_nothing_is_to_be_written() -> None:
    found = mended("y", Interpolated("${A}/${B}"), "write y")
    assert (found.fix, found.hint, found.message) == (None, "", "wrong; the value comes from ${A}/${B}")


def test_advice_for_the_file_makes_way_for_advice_of_the_variable() -> None:
    found = mended("y", Interpolated("${A}", Place("A")), "write y")
    assert (found.fix_at, found.hint) == (Place("A"), "set A=y")
    assert found.message == "wrong; the value comes from ${A}; set A=y"
    found = mended("y", Interpolated("${A}", Place("--set variables.a")), "did you mean y?")
    assert found.message == "wrong; did you mean y? the value comes from ${A}; pass --set variables.a=y"


def test_an_empty_variable_does_not_take_the_key_away() -> None:
    tree = Tree(value={}, interpolated={KEY: Interpolated("${A}", Place("A"))})
    hint = "leave the key out, or write a value"
    problem = Problem(HERE, "model.path", f"empty (from ${{A}}); {hint}", hint=hint, fix=Remove())
    found = fix_at_definition(problem, tree)
    assert (found.fix, found.hint, found.message) == (None, "", "empty (from ${A})")


def test_a_text_that_looks_like_a_secret_is_not_repeated() -> None:
    assert "ghp_" not in mended("y", Interpolated("${A:-ghp_16C7e42F292c6912E7710c838347Ae178B4a}")).message


@pytest.mark.parametrize(
    ("key", "value", "fits"),
    [
        (("match", "count"), 0, False), (("match", "count"), ">=2", True), (("match", "kernels"), "avx521", False),
        (("match", "device"), "cuda", True), (("name",), "A b", False), (("set",), {}, True), (("set",), 5, False),
    ],
)  # fmt: skip
def test_keys_of_profiles_have_known_types(key: tuple[str, ...], value: object, fits: bool) -> None:
    assert takes(("hardware", "profiles", "*", *key), value) == fits
