"""The text of a custom tool's call, read out of the JSON that the model writes it in."""

import json
import random

import pytest

from appliance.output_formats.json_string import JsonString

TEXTS = [
    "",
    "a",
    'say "hi"',
    "\\",
    "\\\\n",
    "line\nend\r\t\b\f",
    "é中🎉",
    "/",
    "\u2028",
    "a\\u0041",
    '{"input": "x"}',
    "}",
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("spaced", [True, False])
@pytest.mark.parametrize("escaped", [True, False])
def test_the_string_is_decoded_however_it_is_cut(text, spaced, escaped):
    written = json.dumps({"input": text}, ensure_ascii=escaped, separators=None if spaced else (",", ":"))
    written = written.replace("/", "\\/") if escaped else written
    for at in range(len(written) + 1):
        reader = JsonString()
        assert reader.feed(written[:at]) + reader.feed(written[at:]) == text
    reader = JsonString()
    assert "".join(map(reader.feed, written)) == text


def test_escapes_are_decoded_like_json():
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    pieces = ["\\ud83c\\udf89", "\\u00e9", "\\n", '\\"', "\\\\", "x", "\\/", "\\u005C", "\\uD83D\\uDE00", " "]
    for _ in range(300):
        written = '{"input": "' + "".join(rng.choices(pieces, k=rng.randrange(8))) + '"}'
        reader = JsonString()
        assert "".join(map(reader.feed, written)) == json.loads(written)["input"], (seed, written)


@pytest.mark.parametrize(
    ("inside", "text"),
    [
        ("\\ud83d", "?"),
        ("\\ud83dx", "?x"),
        ("\\ud83d\\n", "?\n"),
        ("\\ud83d\\u0041", "?A"),
        ("\\ude00", "?"),
        ("\\ud83d\\ud83d\\ude00", "?😀"),
    ],
)
def test_half_of_a_surrogate_pair_is_dropped_alone(inside, text):
    reader = JsonString()
    assert "".join(map(reader.feed, f'{{"input": "{inside}"}}rest')) == text


@pytest.mark.parametrize("written", ["", "{}", "[]", "17", '{"input": 3}', "{"])
def test_input_without_a_string_yields_nothing(written):
    assert "".join(map(JsonString().feed, written)) == ""
