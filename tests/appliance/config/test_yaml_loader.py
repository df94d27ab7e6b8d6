"""Positions and plain values of strict YAML. Oracles: the text itself (the position of a unique word), JSON, PyYAML."""

import json
import random

import pytest
import yaml

from appliance.config.scalar import read_plain
from appliance.config.yaml_loader import Place, Tree, dotted, read_value, read_yaml

TEXT = """\
# a comment
apiVersion: slipway/v2

model:
    path:   "/models/a b"   # quoted
    names: [one, 'two',
            three]
limits: {max_stop: 16, "max_body": 1MiB}
list:
- x
-   u: 1
    z:
      - deep
empty:
"""


def test_values_are_those_that_pyyaml_reads() -> None:
    assert read_yaml(TEXT.encode(), "m").value == yaml.safe_load(TEXT)


@pytest.mark.parametrize(
    ("path", "word"),
    [
        (("apiVersion",), "slipway/v2"),
        (("model", "path"), '"/models/a b"'),
        (("model", "names"), "[one"),
        (("model", "names", 1), "'two'"),
        (("model", "names", 2), "three"),
        (("limits",), "{max_stop"),
        (("limits", "max_stop"), "16"),
        (("limits", "max_body"), "1MiB"),
        (("list", 1), "u: 1"),
        (("list", 1, "z", 0), "deep"),
    ],
)
def test_a_value_has_its_position_in_the_text(path: tuple[str | int, ...], word: str) -> None:
    before = TEXT[: TEXT.index(word)]
    place = read_yaml(TEXT.encode(), "m").values[path]
    assert place == Place("m", before.count("\n") + 1, len(before) - before.rfind("\n"))


@pytest.mark.parametrize(
    ("path", "word"), [(("model", "names"), "names:"), (("limits", "max_body"), '"max_body"'), (("empty",), "empty")]
)
def test_a_key_has_its_position_in_the_text(path: tuple[str, ...], word: str) -> None:
    before = TEXT[: TEXT.index(word)]
    place = read_yaml(TEXT.encode(), "m").keys[path]
    assert place == Place("m", before.count("\n") + 1, len(before) - before.rfind("\n"))


def test_columns_count_characters_not_bytes() -> None:
    assert read_yaml("{ä: é, b: c}\n".encode(), "m").values[("b",)] == Place("m", 1, 11)


def _random_value(source: random.Random, depth: int) -> object:
    kind = source.randrange(7 if depth else 5)
    if kind == 5:
        return [_random_value(source, depth - 1) for _ in range(source.randrange(4))]
    if kind == 6:
        return {f"key{i}": _random_value(source, depth - 1) for i in range(source.randrange(4))}
    return [None, True, source.randrange(-99, 99), source.randrange(999) / 8, f"text {source.random()}"][kind]


@pytest.mark.parametrize("seed", range(50))
def test_json_is_read_as_json(seed: int) -> None:
    value = {"root": _random_value(random.Random(seed), 4)}
    for indent in (None, 2):
        tree = read_yaml(json.dumps(value, indent=indent).encode(), "m")
        assert tree.value == value and not tree.faults


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None), ("~", None), ("null", None), ("true", True), ("False", False), ("0", 0), ("-7", -7), ("+7", 7),
        ("8000", 8000), ("0.5", 0.5), (".5", 0.5), ("-1.25", -1.25), ("1.", 1.0), ("1.5e+3", 1500.0),
        ("slipway/v2", "slipway/v2"), ("0.0.0.0", "0.0.0.0"), ("8GiB", "8GiB"), ("30s", "30s"), ("1.2.3", "1.2.3"),
        ("a:b", "a:b"), ("-", "-"), (".", "."), ("e5", "e5"), ("nope", "nope"), ("None", "None"), ("+", "+"),
    ],
)  # fmt: skip
def test_an_unquoted_scalar_has_one_value(text: str, value: object) -> None:
    read, reason, _ = read_plain(text)
    assert (read, type(read), reason) == (value, type(value), "")


TRAPS = (
    *("yes", "Yes", "YES", "no", "on", "ON", "off", "y", "N", "010", "-010", "00", "01.5", "0x1F", "0b11", "0o17"),
    *("1_000", "1_0.5", "12:30", "1:30:00.5", "2026-01-31", "1e3", "1E3", "1e-3", "1.5e3", ".inf", "-.INF", ".nan"),
    *("=", "<<"),
)


@pytest.mark.parametrize("text", TRAPS)
def test_values_that_yaml_versions_read_differently_must_be_quoted(text: str) -> None:
    _, reason, readings = read_plain(text)
    assert reason and readings[-1] == ("string", f'"{text}"')


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("010", "10"),
        ("0x1F", "31"),
        ("1_000", "1000"),
        ("1e3", "1000"),
        ("1e-3", "0.001"),
        ("-010", "-10"),
        ("00", "0"),
    ],
)
def test_an_unusual_number_is_reported_with_its_plain_form(text: str, number: str) -> None:
    assert number in [reading for kind, reading in read_plain(text)[2] if kind in ("integer", "number")]


def test_all_faults_of_a_file_are_found_not_only_the_first() -> None:
    tree = read_yaml(b"a: no\nb: 010\na: 1\n? [x]\n: 2\nc: &x 1\n", "m")
    assert [fault.place.line for fault in tree.faults] == [1, 2, 3, 4, 6]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8000", 8000), ("true", True), ("", None), ("/a #b", "/a #b"), ("a: b", "a: b"),
        ("{a: [1, x]}", {"a": [1, "x"]}),
        ('{"a": {"b": true}}', {"a": {"b": True}}), ('"no"', "no"), ("'8000'", "8000"), ("[]", []), ("  5 ", 5),
    ],
)  # fmt: skip
def test_the_value_of_an_option_is_a_scalar_or_flow_yaml(text: str, value: object) -> None:
    tree, place = Tree(value={}), Place("--set a")
    assert read_value(text, place, ("a",), tree) == value
    assert not tree.faults and set(tree.values.values()) == {place}


@pytest.mark.parametrize("text", ["{a: 1", "[1] [2]", "'x' y", "{a: 1, a: 2}", "{a: no}", "{a: *b}", "no", "{a: b: c}"])
def test_a_faulty_value_of_an_option_is_reported_at_the_option(text: str) -> None:
    tree, place = Tree(value={}), Place("--set a")
    read_value(text, place, ("a",), tree)
    assert tree.faults and {fault.place for fault in tree.faults} == {place}


def test_a_path_is_spelled_with_dots_and_brackets() -> None:
    assert dotted(("model", "names", 0)) == "model.names[0]" and dotted(()) == ""
