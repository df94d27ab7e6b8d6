"""Edits, and redaction of secrets in them. Oracles: the text before a letter was removed, the text itself, PyYAML."""

import shutil
from pathlib import Path

import pytest
import yaml

from appliance.config.document import HIDDEN, document, masked
from appliance.config.findings import findings
from appliance.config.fix import Move, Remove, Write
from appliance.config.fix_edits import Edit, apply, edits_for, overlap
from appliance.config.problems import Refused
from appliance.config.settings import Given, load
from appliance.config.yaml_loader import Place

MANIFESTS = sorted((Path(__file__).resolve().parents[3] / "manifests").glob("*.yaml"))


def problems_of(path: Path, text: str) -> list[str]:
    path.write_text(text)
    try:
        load(Given(path))
    except Refused as refused:
        return [finding.problem.key for finding in findings(refused.problems)]
    return []


@pytest.mark.sampled(3)
@pytest.mark.parametrize("manifest", MANIFESTS, ids=[path.stem for path in MANIFESTS])
def test_a_letter_lost_from_any_key_is_put_back_to_the_same_text(tmp_path: Path, manifest: Path) -> None:
    """Return every key of every manifest of the project, each without its last letter but one."""
    text = manifest.read_text()
    read = document(text)
    tried = restored = 0
    shutil.copytree(manifest.parent / "parts", tmp_path / "parts")
    for (line, column), (mapping, index) in read.keys.items():
        key, _ = mapping.entries[index]
        name = read.lines[line - 1][column - 1 : key.end[1] - 1]
        if mapping.path[-1:] in (("secrets",), ("overlays",), ("variables",)) or len(name) < 4 or "-" in name:
            continue
        wrong = name[:-2] + name[-1]
        spoilt = apply(read, [Edit("", line, column, key.end[1], wrong)])
        path = tmp_path / "m.yaml"
        path.write_text(spoilt)
        with pytest.raises(Refused) as refused:
            load(Given(path))
        found = [
            f
            for f in findings(refused.value.problems)
            if (f.problem.place.line, f.problem.place.column) == (line, column)
        ]
        assert found, (wrong, str(refused.value))
        tried += 1
        restored += apply(document(spoilt), found[0].edits) == text
    assert tried and restored / tried >= 0.9, f"{restored} of {tried}"


TEXT = """\
a: 1  # one
b:
  c: {d: 2, e: [3, 4], f: x}
  g: "h, i"   # two

  j:
    - k
l: end
"""


@pytest.mark.parametrize(
    ("key", "gone"),
    [
        (("a",), "a: 1  # one\n"),
        (("b", "c", "d"), "d: 2, "),
        (("b", "c", "e"), "e: [3, 4], "),
        (("b", "c", "f"), ", f: x"),
        (("b", "g"), '  g: "h, i"   # two\n'),
        (("b", "j"), "  j:\n    - k\n"),
        (("l",), "l: end\n"),
    ],
)
def test_a_removed_key_takes_its_value_and_nothing_else(key: tuple[str, ...], gone: str) -> None:
    read = document(TEXT)
    at = next(place for place, (mapping, n) in read.keys.items() if (*mapping.path, mapping.entries[n][0].text) == key)
    after = apply(read, edits_for(Remove(), Place("m", *at), read))
    assert after == TEXT.replace(gone, "")
    expected = yaml.safe_load(TEXT)
    inner = expected
    for part in key[:-1]:
        inner = inner[part]
    del inner[key[-1]]
    assert yaml.safe_load(after) == expected


@pytest.mark.parametrize(
    ("start", "target", "after"),
    [
        ("x: 1\ny: {z: 2}\n", ("y", "x"), "y: {z: 2, x: 1}\n"),
        ("x: 1\ny:\n  z: 2\n", ("y", "x"), "y:\n  x: 1\n  z: 2\n"),
        ("x: 1\ny: {}\n", ("y", "x"), "y: {x: 1}\n"),
        ("x: 1\n", ("y", "v", "x"), "y: {v: {x: 1}}\n"),
        ("y:\n  v:\n    x: 1\n", ("y", "w", "x"), "y:\n  w: {x: 1}\n"),
        ("y:\n  v:\n    x: 1\n", ("x",), "x: 1\n"),
        ("{x: 1, y: {z: 2}}\n", ("y", "x"), "{y: {z: 2, x: 1}}\n"),
        ("x: 1\ny: 2\n", ("y", "x"), None),
        ("x: 1\ny: {x: 3}\n", ("y", "x"), None),
        ("x:\n  - 1\n  - 2\ny: {}\n", ("y", "x"), None),
    ],
)
def test_a_key_moves_to_where_it_belongs_or_stays(start: str, target: tuple[str, ...], after: str | None) -> None:
    read = document(start)
    at = next(place for place, (mapping, n) in read.keys.items() if mapping.entries[n][0].text == "x")
    edits = edits_for(Move(target), Place("m", *at), read)
    assert (apply(read, edits) if edits else None) == after


def test_windows_line_ends_and_unusual_ones_stay(tmp_path: Path) -> None:
    for end in ("\r\n", "\n", "\r"):
        text = f"a: 1{end}b: 2{end}c: 3{end}"
        read = document(text)
        assert read.text == text
        assert apply(read, edits_for(Write("9"), Place("m", 2, 4), read)) == text.replace("2", "9")


def test_edits_of_one_place_overlap_and_neighbours_do_not() -> None:
    a, b, c = Edit("m", 1, 1, 4, "x"), Edit("m", 1, 3, 5, "y"), Edit("m", 1, 4, 6, "z")
    assert overlap([a], [b]) and overlap([a], [a]) and not overlap([a], [c])
    assert not overlap([a], [Edit("n", 1, 1, 4, "x")]) and overlap(
        [Edit("m", 1, 1, 1, "", 3)], [Edit("m", 2, 1, 2, "")]
    )


SECRET = "hunter2"


@pytest.mark.parametrize(
    "text",
    [
        "secrets:\n  key: hunter2\n",
        "secrets: {key: hunter2, other: {file: x}}\n",
        "secrets: {key: [hunter2]}\n",
        "model: {x: 1}\nsecrets:\n  key: |\n    hunter2\n",
        "model: {hf_token: hunter2}\n",
        "endpoints: {api_keys: hunter2}\nsecrets: {key: {file: a}}\n",
        "overlays: {a: {endpoints: {api_keys: hunter2}}}\nsecrets: {key: {file: a}}\n",
        "overlays: {a: {secrets: {key: hunter2}}}\n",
        "hardware:\n  profiles:\n    - {name: p, set: {endpoints: {api_keys: hunter2}}}\n",
        "variables: {token: hunter2}\n",
        "secrets:\n  key:hunter2\n",
        "secrets:\n  key: 'hunter2\n",
        "a: 1\nmy_password: hunter2: x\n",
    ],
)
def test_lines_with_possible_secrets_are_not_shown(text: str) -> None:
    read = document(text)
    shown = [read.shown(number) for number in range(1, len(read.lines) + 1)]
    assert SECRET not in "".join(shown)
    if read.root is not None:
        assert HIDDEN in "".join(shown)


@pytest.mark.parametrize(
    ("line", "column", "shown"),
    [
        ("secrets: {a: {file: x}, b: 5}", 3, 3),
        ("secrets: {a: {file: x}, b: 5}", 21, 21),
        ("secrets: {a: {file: /run/long/name}, bb: 5}", 26, 21),  # within
        ("secrets: {a: {file: /run/long/name}, bb: 5}", 38, 27),
        ("secrets: {a: {file: /run/long/name}, bb: 5}", 43, 34),
        ("names: [sk-abcdefgh12345678, b]", 30, 14),
    ],
)
def test_a_column_is_found_next_to_a_redacted_value(line: str, column: int, shown: int) -> None:
    text = document(line)
    assert text.shown_column(1, column) == shown
    if shown != 21 or column == 21:  # the same letter is there, except for the hidden one
        assert text.shown(1)[shown - 1] in (line[column - 1], HIDDEN[0])


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("names: [sk-abcdefgh12345678]", True),
        ("token: hf_abcdefghijklmnopqrst", True),
        ("x: ghp_16C7e42F292c6912E7710c838347Ae178B4a", True),
        ("x: AKIAIOSFODNN7EXAMPLE", True),
        ("x: 3f2b8c9d1e4a5f6b7c8d9e0f1a2b3c4d", True),
        ("path: /models/Meta-Llama-3.1-8B-Instruct-AWQ-INT4", False),
        ("names: [Qwen3-0.6B, DeepSeek-R1-Distill-Qwen-32B]", False),
        ("max_num_batched_tokens: 4096", False),
        ("trust_request_chat_template: false", False),
    ],
)
def test_keys_of_known_services_are_hidden_and_names_of_models_are_not(text: str, hidden: bool) -> None:
    assert (HIDDEN in masked(text)) == hidden


def test_a_name_of_a_secret_that_was_nearly_right_is_shown() -> None:
    text = "endpoints: {api_keys: client}\nsecrets: {clients: {file: a}}\n"
    assert document(text).shown(1) == "endpoints: {api_keys: client}"
    text = "overlays: {a: {endpoints: {api_keys: client}, secrets: {clients: {file: b}}}}"
    assert document(text).shown(1) == text.replace("{file: b}", "{file: •••}")
