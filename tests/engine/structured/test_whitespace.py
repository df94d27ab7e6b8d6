"""Whitespace in generated JSON is bounded, so that a reply cannot go on with nothing but whitespace."""

import json
import random
from typing import Any

import jsonschema
import pytest

from engine.api.errors import RequestError
from engine.api.messages import Grammar
from engine.structured.definition import definition, json_expression
from engine.structured.grammar import Compiler

SCHEMA = {
    "type": "object",
    "properties": {
        "sure": {"type": "boolean"},
        "tags": {"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 2, "maxItems": 2},
        "inner": {
            "type": "object",
            "properties": {"on": {"type": "boolean"}},
            "required": ["on"],
            "additionalProperties": False,
        },
        "none": {"type": "object", "additionalProperties": False},
    },
    "required": ["sure", "tags", "inner", "none"],
    "additionalProperties": False,
}
VALUE = {"sure": True, "tags": [1, 2], "inner": {"on": False}, "none": {}}
WHITESPACE = b" \t\r\n"
END = "<|end|>"


@pytest.fixture(scope="module")
def compiler(tokenizer_directory: Any) -> Any:
    made = Compiler(tokenizer_directory("byte level"), 300)
    yield made
    made.close()


def accepts(compiler: Compiler, grammar: Grammar, text: str) -> bool:
    """Return whether the grammar accepts the whole text, byte by byte."""
    matcher = compiler.compile(grammar, [])
    vocabulary = compiler._text.token_bytes
    ids = {vocabulary(token): token for token in range(299, -1, -1) if len(vocabulary(token)) == 1}
    try:
        for byte in text.encode():
            matcher.advance(ids[bytes([byte])])
    except RequestError:
        return False
    return matcher.finished or matcher.matcher.is_accepting()


@pytest.mark.parametrize("kind", ["json_schema", "lark"])
@pytest.mark.parametrize("seed", range(10))
def test_reply_that_prefers_whitespace_ends(compiler: Compiler, kind: str, seed: int) -> None:
    """Sample a whitespace token at every position that allows one."""
    text = json.dumps(SCHEMA) if kind == "json_schema" else f"start: {json_expression(SCHEMA)}"
    matcher = compiler.compile(Grammar(kind, text), [])  # type: ignore[arg-type]
    vocabulary, chance, reply = compiler._text.token_bytes, random.Random(seed), b""
    for _ in range(600):
        if matcher.finished:
            break
        mask = matcher.mask()
        allowed = [token for token in range(300) if int(mask[token // 32]) >> token % 32 & 1]
        spaces = [token for token in allowed if vocabulary(token) and not vocabulary(token).strip(WHITESPACE)]
        token = chance.choice(spaces or allowed)
        matcher.advance(token)
        reply += vocabulary(token)
    assert matcher.finished, f"no end after {len(reply)} bytes: {reply[:200]!r}"
    jsonschema.validate(json.loads(reply), SCHEMA)


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(VALUE),
        json.dumps(VALUE, separators=(",", ":")),
        json.dumps(VALUE, indent=1),
        json.dumps(VALUE, indent=2),
        json.dumps(VALUE, indent=4),
        json.dumps(VALUE, indent=8),
        json.dumps(VALUE, indent="\t"),
        '{ "sure": true, "tags": [ 1, 2 ], "inner": { "on": false }, "none": { } }',
    ],
)
def test_usual_layouts_are_allowed(compiler: Compiler, text: str) -> None:
    assert accepts(compiler, Grammar("json_schema", json.dumps(SCHEMA)), text)


@pytest.mark.parametrize("gap", ["  ", "\n\n", "\t", "\r\n", "\n" + 21 * " ", " \n"])
def test_longer_whitespace_is_refused(compiler: Compiler, gap: str) -> None:
    text = json.dumps(VALUE).replace(" ", gap, 1)
    assert json.loads(text) == VALUE
    assert not accepts(compiler, Grammar("json_schema", json.dumps(SCHEMA)), text)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (True, '{"a":  1}'),
        ({}, "[1,  2]"),
        (
            {"$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/definitions/a", "definitions": {"a": {}}},
            "[1,  2]",
        ),
        ({"type": "object"}, '{"a":\n\n1}'),
    ],
)
def test_schemas_of_every_form_are_bounded(compiler: Compiler, schema: Any, text: str) -> None:
    grammar = Grammar("json_schema", json.dumps(schema))
    assert not accepts(compiler, grammar, text)
    assert accepts(compiler, grammar, json.dumps(json.loads(text)))


def test_schema_that_refuses_everything_stays_so() -> None:
    assert json_expression(False) == "%json false"


def test_own_whitespace_options_are_kept(compiler: Compiler) -> None:
    schema = {**SCHEMA, "x-guidance": {"whitespace_pattern": " {2}"}}
    assert accepts(compiler, Grammar("json_schema", json.dumps(schema)), json.dumps(VALUE).replace(" ", "  "))


def test_number_out_of_range_is_refused() -> None:
    with pytest.raises(RequestError, match="invalid JSON schema"):
        definition(Grammar("json_schema", '{"maximum": 1e400}'))
