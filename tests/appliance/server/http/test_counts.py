"""Limits on the number of values in a request, and threads for large bodies."""

import asyncio
import json
import threading
from typing import Any

import pytest
from pydantic import BaseModel, field_validator

from appliance.server.http.body import parse_body
from appliance.server.http.counts import MAX_ENTRIES, MAX_VALUES
from tests.appliance.server.http.conftest import Gateway

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
WIDE = {"type": "object", "properties": {f"k{at}": {"type": "string"} for at in range(MAX_VALUES // 2)}}
TOO_MANY: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"messages": [USER] * 50_000}, "messages"),
    ("/v1/messages", {"model": "qwen", "max_tokens": 4, "messages": [USER] * 50_000}, "messages"),
    ("/v1/messages/count_tokens", {"model": "qwen", "messages": [USER] * 50_000}, "messages"),
    ("/v1/responses", {"input": [USER] * 50_000}, "input"),
    ("/tokenize", {"messages": [USER] * 50_000}, "messages"),
    ("/invocations", {"messages": [USER] * 50_000}, "messages"),
    ("/detokenize", {"tokens": [65] * 600_000}, "tokens"),
    ("/v1/chat/completions", {"messages": [USER], "tools": [TOOL] * 1025}, "tools"),
    ("/v1/chat/completions", {"messages": [{**USER, "content": [{"type": "text", "text": "x"}] * 50_000}]}, "messages"),
    ("/v1/chat/completions", {"messages": [USER], "structured_outputs": {"json": WIDE}}, "structured_outputs"),
    ("/v1/completions", {"prompt": "x", "stop": [1] * MAX_VALUES}, "stop"),
    ("/v1/completions", {"prompt": [65] * MAX_VALUES + ["x"]}, "prompt"),
    ("/v1/completions", {"prompt": "x", "logit_bias": {str(at): 1 for at in range(MAX_VALUES)}}, "logit_bias"),
]


@pytest.mark.parametrize(("path", "body", "param"), TOO_MANY)
def test_a_body_with_too_many_values_is_refused_by_its_field(
    gateway: Gateway, path: str, body: dict[str, Any], param: str
) -> None:
    status, reply = gateway.post(path, body)
    assert status == 400, reply
    assert param in reply["error"]["message"]
    assert reply["error"].get("param", param) == param


def test_a_body_with_too_many_fields_is_refused(gateway: Gateway) -> None:
    status, reply = gateway.post("/v1/completions", {"prompt": "x", **{f"k{at}": 1 for at in range(MAX_VALUES)}})
    assert status == 400 and "fields" in reply["error"]["message"]


def test_long_prompts_of_ids_and_many_messages_are_within_the_limits(gateway: Gateway) -> None:
    ids = {"prompt": [65] * (MAX_VALUES + 1), "truncate_prompt_tokens": 10, "max_tokens": 1}
    assert gateway.says("ok").post("/v1/completions", ids)[0] == 200
    assert gateway.post("/v1/completions", {**ids, "prompt": [[65] * MAX_VALUES] * 2})[0] == 200
    status, reply = gateway.post("/v1/chat/completions", {"messages": [USER] * MAX_ENTRIES["messages"]})
    assert status == 400 and "context length" in reply["error"]["message"]


def test_a_large_body_is_read_in_a_thread(gateway: Gateway) -> None:
    threads: set[int] = set()

    class Body(BaseModel):
        text: str

        @field_validator("text")
        @classmethod
        def seen(cls, text: str) -> str:
            threads.add(threading.get_ident())
            return text

    async def read(size: int) -> int:
        await parse_body(json.dumps({"text": "x" * size}).encode(), Body, gateway.service)
        return threading.get_ident()

    assert asyncio.run(read(10)) in threads
    threads.clear()
    assert asyncio.run(read(100_000)) not in threads
