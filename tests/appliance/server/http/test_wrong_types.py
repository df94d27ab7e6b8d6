"""No value of any field of any route causes a server error."""

import asyncio
import json
import random
from typing import Any

import pytest

from appliance.server.schema.chat import ChatRequest
from appliance.server.schema.completions import CompletionRequest
from appliance.server.schema.fields.tables import table_of
from appliance.server.schema.label_scores import LabelScoresRequest
from appliance.server.schema.messages import CountRequest, MessagesRequest
from appliance.server.schema.responses import InputTokensRequest, ResponsesRequest
from appliance.server.schema.tokens import DetokenizeRequest, TokenizeChat

MESSAGE = {"role": "user", "content": "hello"}
TEXT_PART = {"type": "text", "text": "x"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ASSISTANT = {"role": "assistant", "content": [{"type": "text", "text": "x"}], "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "y"}
BLOCKS: list[Any] = [
    {"role": "user", "content": [{"type": "text", "text": "x"}]},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [TEXT_PART]}]},
]  # fmt: skip
ITEMS: list[Any] = [
    {"role": "user", "content": [{"type": "input_text", "text": "x"}], "id": "m"},
    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x"}], "summary": []},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "x"},
]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 1}}, "required": ["a"]}
FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
TAG = {"type": "structural_tag", "format": {"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "b"}}
BODIES: list[tuple[str, type[Any], dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        ChatRequest,
        {
            **{"messages": [MESSAGE, ASSISTANT, RESULT, MESSAGE], "tools": [TOOL], "response_format": FORM},
            "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOL]}},
            **{"stream": True, "stream_options": {"include_usage": True}},
        },
    ),
    ("/v1/chat/completions", ChatRequest, {"messages": [MESSAGE], "response_format": TAG}),
    (
        "/v1/chat/completions",
        ChatRequest,
        {"messages": [{**MESSAGE, "function_call": {"name": "f"}}], "functions": [TOOL["function"]]},
    ),
    ("/v1/completions", CompletionRequest, {"prompt": "a", "structured_outputs": {"json": SCHEMA}}),
    (
        "/v1/messages",
        MessagesRequest,
        {
            **{"model": "qwen", "max_tokens": 9, "messages": BLOCKS, "system": [{"type": "text", "text": "s"}]},
            "tools": [{"name": "f", "input_schema": SCHEMA}, {"type": "bash_20250124", "name": "bash"}],
        },
    ),
    ("/v1/messages/count_tokens", CountRequest, {"model": "qwen", "messages": BLOCKS}),
    (
        "/v1/responses",
        ResponsesRequest,
        {
            "input": ITEMS,
            "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}, {"type": "custom", "name": "c"}],
            "tool_choice": {"type": "function", "name": "f"},
            "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
        },
    ),
    ("/v1/responses/input_tokens", InputTokensRequest, {"input": ITEMS}),
    ("/tokenize", TokenizeChat, {"messages": [MESSAGE], "tools": [TOOL]}),
    ("/detokenize", DetokenizeRequest, {"tokens": [5, 6]}),
    ("/generative_scoring", LabelScoresRequest, {"query": "a", "items": ["b"], "label_token_ids": [5, 6]}),
]
SAMPLED = 60  # Return the requests with each body.
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, -(2**63), 2**64, 10**400, 0.5, -0.0, 1e-300, 1e300, 1e400, -1e300),
    *("", "x", "\0", "\ud800", "a" * 500, "none", "auto", "required", "text", "{}", [], [[]], [None], ["x"], [True]),
    *([1e300], [{"type": ["text"]}], {}, {"type": []}, {"type": "text"}, {"a": {"b": []}}, {"": None}),
    *({"type": "function", "function": {"name": ["f"]}}, {"type": "x" * 300}, {"1": 2}, {"x": 1e300}),
)


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place within a value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, each in inner for found in ((*at, key), *places(each, (*at, key)))]


def replaced(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    if not place:
        return new
    if isinstance(value, dict):
        return {key: replaced(each, place[1:], new) if key == place[0] else each for key, each in value.items()}
    return [replaced(each, place[1:], new) if key == place[0] else each for key, each in enumerate(value)]


def cases(schema: type[Any], body: dict[str, Any]) -> list[dict[str, Any]]:
    """Each value in each place of the body and in each field that it lacks."""
    fields = [field.alias or name for name, field in schema.model_fields.items()]
    added = [name for name in (*fields, *table_of(schema)) if name not in body]
    found = [replaced(body, place, value) for place in places(body) for value in VALUES]
    return found + [{**body, name: value} for name in added for value in VALUES]


@pytest.mark.parametrize(("path", "schema", "body"), BODIES)
def test_wrong_values_are_no_server_error(make_gateway: Any, path: str, schema: Any, body: dict[str, Any]) -> None:
    gateway = make_gateway(max_context=2000)
    tried = cases(schema, body)

    async def call() -> None:
        async with gateway.says("hello").client() as client:
            reply = await client.post(path, json=body)
            assert reply.status_code == 200, reply.text
            for case in random.Random(path).sample(tried, min(len(tried), SAMPLED)):
                text = json.dumps(case)
                reply = await client.post(path, content=text, headers={"content-type": "application/json"})
                assert reply.status_code < 500, (text, reply.text)

    asyncio.run(call())
