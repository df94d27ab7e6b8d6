"""Tests of JSON Schema: the official suite through the masks, rewritten schemas, and rejected keywords."""

import json
import random
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from engine.api.errors import RequestError
from engine.api.messages import Grammar
from engine.structured.definition import definition
from engine.structured.disjoint import Disjointness
from engine.structured.schema import REFUSED, enforce
from tools.structured_page import DRAFTS, NOTES, PAGE, Result, accepts, byte_tokenizer, page, results

CLASSES = {"draft2020-12": jsonschema.Draft202012Validator, "draft7": jsonschema.Draft7Validator}


@pytest.fixture(scope="module", params=list(DRAFTS))
def suite(request: pytest.FixtureRequest) -> tuple[str, list[Result]]:
    return request.param, results(request.param)


def test_the_masks_never_accept_what_is_invalid(suite: tuple[str, list[Result]]) -> None:
    wider = [
        (each.keyword, each.description, name) for each in suite[1] for name, how in each.outcomes if how == "wider"
    ]
    assert not wider


def test_stricter_masks_are_documented(suite: tuple[str, list[Result]]) -> None:
    narrower = {each.keyword for each in suite[1] for _, how in each.outcomes if how == "narrower"}
    assert narrower <= NOTES.keys()
    assert len([1 for each in suite[1] for _, how in each.outcomes if how == "exact"]) > 800


def test_a_refusal_names_a_keyword_or_that_nothing_is_valid(suite: tuple[str, list[Result]]) -> None:
    others = (
        "Unsatisfiable",
        "is not present in a registry",
        "multipleOf",
        "patternProperty",
        "Unimplemented keys",
        "Unknown format",
    )
    for each in suite[1]:
        if each.refusal:
            named = any(f"{name} at $" in each.refusal for name in REFUSED)
            assert named or any(words in each.refusal for words in others), each.refusal


def _walk(matcher: Any, rng: random.Random) -> str | None:
    """Return a random text of the language, or None if it gets too long."""
    walk, text = matcher.deep_copy(), bytearray()
    while len(text) < 400:
        mask = walk.compute_bitmask()
        ends = bool(walk.is_accepting()) and rng.random() < 0.3
        allowed = [byte for byte in range(256) if mask[byte // 8] >> byte % 8 & 1]
        if ends or not allowed:
            return text.decode() if walk.is_accepting() else None
        closing = [byte for byte in allowed if byte in b'"]}0']
        byte = rng.choice(closing if closing and rng.random() < 0.6 else allowed)
        walk.consume_token(byte)
        text.append(byte)
    return None


def test_accepted_replies_are_valid(suite: tuple[str, list[Result]]) -> None:
    """SO-01, by an independent validator"""
    draft, groups = suite
    rng, tried = random.Random(7), 0
    for group in groups:
        if group.matcher is None or not isinstance(group.schema, dict):
            continue
        validator = CLASSES[draft](group.schema)
        for _ in range(2):
            text = _walk(group.matcher, rng)
            if text is not None:
                value = json.loads(text)
                assert validator.is_valid(value), (group.keyword, group.schema, text)
                tried += 1
    assert tried > 100


def test_the_page_shows_the_suite() -> None:
    assert PAGE.read_text() == page(), "run tools/structured_page.py"


def takes(schema: Any, value: Any, *, strict: bool = True) -> bool:
    enforced = enforce(schema, strict=strict, param="p").schema
    matcher = LLMatcher(byte_tokenizer(), definition(Grammar("json_schema", json.dumps(enforced))), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return accepts(matcher, json.dumps(value))


CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}}, "required": ["kind"]}
DOG = {"type": "object", "properties": {"kind": {"const": "dog"}, "tail": {"type": "boolean"}}, "required": ["kind"]}


def test_one_of_with_distinct_constants_is_enforced() -> None:
    schema = {"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}], "$defs": {"cat": CAT, "dog": DOG}}
    assert takes(schema, {"kind": "cat", "lives": 9})
    assert takes(schema, {"kind": "dog", "tail": True})
    assert not takes(schema, {"kind": "dog", "tail": 9})


def test_one_of_is_enforced_together_with_any_of() -> None:
    schema = {"oneOf": [{"type": "integer"}, {"type": "string"}], "anyOf": [{"type": "integer"}, {"type": "null"}]}
    assert takes(schema, 3)
    assert not takes(schema, "a")
    assert not takes(schema, None)


@pytest.mark.parametrize(
    ("one", "other", "apart"),
    [
        ({"type": "integer"}, {"type": "string"}, True),
        ({"type": "integer"}, {"type": "number"}, False),
        ({"const": 1}, {"const": 1.0}, False),
        ({"const": 1}, {"const": True}, True),
        ({"const": {"a": [1, 2]}}, {"const": {"a": [1.0, 2]}}, False),
        ({"enum": ["a", "b"]}, {"enum": ["b", "c"]}, False),
        ({"enum": ["a", "b"]}, {"enum": ["c", 1]}, True),
        ({"enum": ["a", 1]}, {"type": "boolean"}, True),
        ({"enum": ["a", 1]}, {"type": "number"}, False),
        (CAT, DOG, True),
        ({**CAT, "required": []}, DOG, True),
        ({**CAT, "required": []}, {**DOG, "required": []}, False),
        ({key: CAT[key] for key in ("properties", "required")}, {"properties": DOG["properties"]}, False),
        ({"type": "object", "required": ["a"]}, {"additionalProperties": False, "properties": {"b": {}}}, True),
        ({"type": "object", "required": ["a"]}, {"additionalProperties": False, "properties": {"a": {}}}, False),
        ({"type": "object", "required": ["a"]}, {"additionalProperties": False, "patternProperties": {"a": {}}}, False),
        ({"allOf": [{"type": "string"}, {"minLength": 3}]}, {"type": "null"}, True),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"type": "integer"}, True),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"type": ["integer", "null"]}, False),
        (False, True, True),
        (True, {"type": "null"}, False),
        ({"$ref": "#/$defs/loop"}, {"type": "null"}, False),
    ],
)
def test_branches_are_disjoint_only_where_that_is_known(one: Any, other: Any, apart: bool) -> None:
    root = {"$defs": {"loop": {"$ref": "#/$defs/loop"}}}
    assert Disjointness(root).holds(one, other) is Disjointness(root).holds(other, one) is apart


@pytest.mark.parametrize("keyword", sorted(REFUSED))
def test_strict_rejects_and_lenient_drops_unsupported_keywords(keyword: str) -> None:
    values: dict[str, Any] = {
        "uniqueItems": True,
        "if": {"type": "null"},
        "contains": {"type": "null"},
        "minContains": 2,
        "maxContains": 2,
        "dependentRequired": {"a": ["b"]},
        "$dynamicRef": "#x",
        "$recursiveRef": "#",
        "$ref": "#/properties/p/items",
        "format": "regex",
        "oneOf": [{"minimum": 1}, {"minimum": 2}],
    }
    schema = {keyword: values.get(keyword, {"a": {"type": "null"}})}
    if keyword in ("minContains", "maxContains"):
        schema["contains"] = {"type": "null"}
    if keyword == "if":
        schema["then"] = {"type": "null"}
    if keyword.startswith("unevaluated"):
        schema["anyOf"] = [{"minItems": 1}]
    whole = {"type": "object", "properties": {"p": {"type": "array", "items": schema}}}
    with pytest.raises(RequestError, match=r"at \$.properties.p.items cannot be enforced") as caught:
        enforce(whole, strict=True, param="response_format")
    assert caught.value.param == "response_format"
    loose = enforce(whole, strict=False, param="p")
    assert f"$.properties.p.items.{keyword}" in loose.dropped
    assert takes(whole, {"p": [1, 2]}, strict=False)


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"format": "date"}, ["2024-02-29", "2000-02-29", "2021-12-31"], ["2023-02-29", "1900-02-29", "2021-04-31"]),
        ({"format": "time"}, ["23:59:60Z", "00:00:00.5+05:30"], ["22:59:60Z", "24:00:00Z", "00:00:00"]),
        ({"format": "date-time", "pattern": "Z$"}, ["2024-02-29T00:00:00Z"], ["2024-02-29T00:00:00+00:00"]),
        ({"format": "our-own"}, ["anything"], []),
        ({"type": "array", "maxItems": 1.0}, [[1]], [[1, 2]]),
        ({"unevaluatedProperties": False, "properties": {"a": {}}}, [{"a": 1}], [{"b": 1}]),
        ({"prefixItems": [{}], "unevaluatedItems": False}, [[1]], [[1, 2]]),
        ({"const": 1, "x-guidance": {"lenient": True}, "unknown": {"not": {}}}, [1], [2]),
        ({"if": {"type": "null"}}, [1, None], []),
        ({"uniqueItems": False}, [[1, 1]], []),
    ],
)
def test_rewritable_keywords_are_enforced(schema: Any, right: list[Any], wrong: list[Any]) -> None:
    for value in right:
        assert takes(schema, value), value
    for value in wrong:
        assert not takes(schema, value), value


def test_keywords_next_to_ref_are_ignored_up_to_draft_7() -> None:
    schema = {"definitions": {"list": {"type": "array"}}, "$ref": "#/definitions/list", "maxItems": 1}
    assert not takes(schema, [1, 2])
    assert takes({"$schema": DRAFTS["draft7"], **schema}, [1, 2])


def test_disjointness_check_terminates() -> None:
    """A schema made to be compared for ever."""
    many = {"oneOf": [{"type": "object", "properties": {"p": {"minimum": number}}} for number in range(3000)]}
    with pytest.raises(RequestError, match=r"oneOf at \$"):
        enforce(many, strict=True, param="p")
    deep: Any = {"type": "null"}
    for _ in range(12):
        deep = {"anyOf": [deep] * 6}
        if len(json.dumps(deep)) > 100_000:
            break
    with pytest.raises(RequestError, match=r"oneOf at \$"):
        enforce({"oneOf": [deep, deep]}, strict=True, param="p")
