"""Adversarial schemas and expressions in every API that accepts them: each is refused in the API's error format,
under the API's field name, before anything runs, and the next request is served."""

import json
from collections.abc import Callable
from typing import Any

import pytest

# In this API a schema is never strict: unsupported keywords are ignored, and the log reports them.
LOOSE = "messages, output_config"
LEFT_OUT = ("a keyword that nothing enforces", "references in a circle")
SIZE = 6000  # bytes of a grammar that this gateway takes
DEEP = json.loads('{"items":' * 150 + "{}" + "}" * 150)
CHAIN = {  # infinite references, which are no valid schema
    "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
    "type": "object",
    "properties": {"x": {"$ref": "#/$defs/a"}},
    "required": ["x"],
}


def of(schema: Any) -> dict[str, Any]:
    """An object: tools have no other arguments."""
    return {"type": "object", "properties": {"x": schema}, "required": ["x"], "additionalProperties": False}


SCHEMAS: dict[str, tuple[dict[str, Any], str]] = {
    "too large": (of({"enum": ["x" * SIZE]}), "limits.grammar_size"),
    "too deep": (of(DEEP), "nested too deep"),
    "a keyword that nothing enforces": (of({"type": "array", "uniqueItems": True}), "uniqueItems at $.properties.x"),
    "expressions that explode together": (
        of({"type": "string", "allOf": [{"pattern": f"^(a{{{n}}})+$"} for n in (101, 103, 107, 109, 113)]}),
        "Unable to determine",
    ),
    "an expression that is none": (of({"type": "string", "pattern": "^[.*$"}), "unclosed character class"),
    "nothing at all": (of(False), ""),
    "references in a circle": (CHAIN, ""),
}


def function(schema: Any) -> dict[str, Any]:
    return {"name": "f", "parameters": schema, "strict": True}


ROUTES: dict[str, tuple[str, Callable[[Any], dict[str, Any]], str]] = {
    "chat, response_format": (
        "/v1/chat/completions",
        lambda schema: {
            "messages": [{"role": "user", "content": "a"}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}},
        },
        "response_format",
    ),
    "chat, tools": (
        "/v1/chat/completions",
        lambda schema: {
            "messages": [{"role": "user", "content": "a"}],
            "tools": [{"type": "function", "function": function(schema)}],
            "tool_choice": "required",
        },
        "tools",
    ),
    "completions": (
        "/v1/completions",
        lambda schema: {"prompt": "a", "structured_outputs": {"json": schema}},
        "structured_outputs",
    ),
    "responses, text.format": (
        "/v1/responses",
        lambda schema: {
            "input": "a",
            "text": {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}},
        },
        "text.format",
    ),
    "responses, tools": (
        "/v1/responses",
        lambda schema: {"input": "a", "tools": [{"type": "function", **function(schema)}], "tool_choice": "required"},
        "tools",
    ),
    "messages, tools": (
        "/v1/messages",
        lambda schema: {
            "model": "qwen",
            "max_tokens": 9,
            "messages": [{"role": "user", "content": "a"}],
            "tools": [{"name": "f", "input_schema": schema, "strict": True}],
            "tool_choice": {"type": "any"},
        },
        "tools",
    ),
    "messages, output_config": (
        "/v1/messages",
        lambda schema: {
            "model": "qwen",
            "max_tokens": 9,
            "messages": [{"role": "user", "content": "a"}],
            "output_config": {"format": {"type": "json_schema", "schema": schema}},
        },
        "output_config.format",
    ),
}


def named(path: str, reply: Any) -> tuple[str, str]:
    """The field that an error names, and its message, in the shape of the route's API."""
    error = reply["error"]
    if path == "/v1/messages":
        assert set(reply) == {"type", "error", "request_id"} and error["type"] == "invalid_request_error"
        return error["message"].partition(":")[0], error["message"]
    assert set(error) >= {"message", "type", "param", "code"}
    return error["param"], error["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ROUTES)
def test_a_hostile_schema_is_refused_in_the_words_of_its_api(
    make_gateway: Callable[..., Any], route: str, stream: bool
) -> None:
    path, body, param = ROUTES[route]
    gateway = make_gateway(max_context=1 << 16, **{"limits.grammar_size": SIZE}).says("x")
    for name, (schema, words) in SCHEMAS.items():
        if route == LOOSE and name in LEFT_OUT:
            continue
        status, reply = gateway.post(path, {**body(schema), "stream": stream})
        assert status == 400, (name, reply)
        field, message = named(path, reply)
        assert field == param, (name, reply)
        assert words in message and len(message) < 1000, (name, message)
    assert not gateway.submits, "nothing ran"
    status, _ = gateway.post(path, body(of({"type": "integer"})))
    assert status == 200 and len(gateway.submits) == 1
