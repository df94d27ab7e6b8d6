"""The log line at the end of each generation."""

import asyncio
import json
import logging
from collections.abc import Callable, Iterator
from io import StringIO
from typing import Any

import pytest

from appliance.config.gateway import GatewayConfig
from appliance.observability.log import set_up_logging
from tests.appliance.server.http.conftest import Gateway

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 9}
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "hello", "max_tokens": 9},
    "/v1/messages": {**CHAT, "model": "qwen"},
    "/v1/responses": {"input": "hello", "max_output_tokens": 9},
}


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[GatewayConfig], Callable[[], list[dict[str, Any]]]]]:
    """Sets logging up and returns a function for the lines that ended a generation."""
    root = logging.getLogger()
    kept = (root.handlers, root.level)
    for client in ("httpx", "httpcore", "asyncio"):
        caplog.set_level(logging.WARNING, client)

    def set_up(config: GatewayConfig) -> Callable[[], list[dict[str, Any]]]:
        out = StringIO()
        set_up_logging(config, out)

        def lines() -> list[dict[str, Any]]:
            found = [json.loads(line) for line in out.getvalue().splitlines()]
            return [line for line in found if line["message"] == "completed"]

        return lines

    yield set_up
    root.handlers, level = kept
    root.setLevel(level)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", REQUESTS)
def test_the_end_of_a_generation_is_one_log_line(
    make_gateway: Callable[..., Gateway], logged: Any, path: str, stream: bool
) -> None:
    gateway = make_gateway(**{"observability.log_format": "json"}).says("The answer is 42")
    lines = logged(gateway.config)

    async def call() -> None:
        async with gateway.client() as client:
            reply = await client.post(path, json={**REQUESTS[path], "stream": stream}, headers={"x-request-id": "r-7"})
            assert reply.status_code == 200, reply.text

    asyncio.run(call())
    (line,) = lines()
    (submit,) = gateway.submits
    assert (line["request_id"], line["model"], line["finish_reason"]) == ("r-7", "qwen", "stop")
    assert line["prompt_tokens"] == len(submit.prompt)
    assert line["completion_tokens"] == len(gateway.ids("The answer is 42")) + 1
    assert 0 <= line["ttft_s"] <= line["seconds"]


def test_each_choice_has_its_finish_reason(make_gateway: Callable[..., Gateway], logged: Any) -> None:
    gateway = make_gateway(**{"observability.log_format": "json"}).says("hello", finish="length")
    lines = logged(gateway.config)
    gateway.post("/v1/chat/completions", {**CHAT, "n": 2, "temperature": 1})
    assert [line["finish_reason"] for line in lines()] == ["length,length"]


def test_a_failed_generation_reports_its_error(make_gateway: Callable[..., Gateway], logged: Any) -> None:
    gateway = make_gateway(**{"observability.log_format": "json"}).says("hello", finish="error")
    lines = logged(gateway.config)
    assert gateway.post("/v1/chat/completions", CHAT)[0] == 500
    (line,) = lines()
    assert line["finish_reason"] == "error"
