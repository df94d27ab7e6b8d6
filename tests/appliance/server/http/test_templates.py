"""Errors of chat templates: 400 if the client can correct them, 500 if the operator can."""

import asyncio
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.appliance.server.http.conftest import Gateway

USER = {"role": "user", "content": "hello"}
BROKEN = "{{ bos_token }}\n{{ messages[0].content.nothing.more }}"
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/messages": {"messages": [USER], "model": "qwen", "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": [USER], "model": "qwen"},
    "/v1/responses": {"input": "hello"},
    "/tokenize": {"messages": [USER]},
}


def with_template(tmp_path: Path, make: Callable[..., Gateway], source: str, **config: Any) -> Gateway:
    (tmp_path / "own.jinja").write_text(source)
    return make(chat_template=str(tmp_path / "own.jinja"), **config)


@pytest.mark.parametrize("path", ROUTES)
def test_a_template_of_the_checkpoint_that_fails_is_an_error_of_the_server(
    tmp_path: Path, make_gateway: Callable[..., Gateway], caplog: pytest.LogCaptureFixture, path: str
) -> None:
    gateway = with_template(tmp_path, make_gateway, BROKEN)
    status, reply = gateway.post(path, ROUTES[path])
    assert status == 500
    assert "UndefinedError in line 2" in reply["error"]["message"]
    assert "fault of the served model, not of the request" in reply["error"]["message"]
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    failure = "its chat template fails (UndefinedError in line 2); correct it or set model.chat_template"
    assert told == [f"fault in a file of the model: {failure}"]


def test_clients_do_not_retry_operator_errors(tmp_path: Path, make_gateway: Callable[..., Gateway]) -> None:
    gateway = with_template(tmp_path, make_gateway, BROKEN)

    async def call() -> httpx.Response:
        async with gateway.client() as client:
            return await client.post("/v1/chat/completions", json={"messages": [USER]})

    assert asyncio.run(call()).headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"chat_template": BROKEN}, "chat_template"),
        ({"chat_template": "{% for %}"}, "chat_template"),
        ({"chat_template": "{{ 'a' * 10 ** 12 }}"}, "chat_template"),
        ({"messages": [{**USER, "role": "forbidden"}]}, "messages"),
    ],
)
def test_errors_of_request_templates_are_request_errors(
    make_gateway: Callable[..., Gateway], fields: dict[str, Any], param: str
) -> None:
    gateway = make_gateway(**{"endpoints.trust_request_chat_template": True})
    status, reply = gateway.post("/v1/chat/completions", {"messages": [USER], **fields})
    assert (status, reply["error"]["param"]) == (400, param), reply


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"chat_template_kwargs": {"more": 3}}, "chat_template_kwargs"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"documents": [{"title": "x"}]}, "documents"),
    ],
)
def test_template_errors_mention_unusual_request_parts(
    tmp_path: Path, make_gateway: Callable[..., Gateway], fields: dict[str, Any], param: str
) -> None:
    source = "{{ 'a' + (more or '') + (documents[0].text if documents else '') + messages[0].content }}"
    gateway = with_template(tmp_path, make_gateway, source).says("ok")
    assert gateway.post("/v1/chat/completions", {"messages": [USER]})[0] == 200
    status, reply = gateway.post("/v1/chat/completions", {"messages": [USER], **fields})
    assert (status, reply["error"]["param"]) == (400, param), reply


def test_a_number_that_json_cannot_hold_is_refused(gateway: Gateway) -> None:
    body = json.dumps({"messages": [USER], "chat_template_kwargs": {"n": 1}}).replace("1", "9" * 5000)

    async def call() -> httpx.Response:
        async with gateway.client() as client:
            return await client.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})

    assert asyncio.run(call()).status_code == 400


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/v1/messages"])
def test_a_tokenizer_that_fails_is_an_error_object(
    tmp_path: Path, checkpoint: Path, make_gateway: Callable[..., Gateway], path: str
) -> None:
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    described = json.loads((tmp_path / "tokenizer.json").read_text())
    described["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": "(a|aa)+$"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    gateway = make_gateway(model=str(tmp_path))
    text = "a" * 60 + "b"
    body = (
        {"prompt": text}
        if path in ("/v1/completions", "/tokenize")
        else ROUTES[path] | {"messages": [USER | {"content": text}]}
    )
    status, reply = gateway.post(path, body)
    assert status == 500
    assert "the model's tokenizer fails on a text" in reply["error"]["message"]


def test_a_panic_of_a_library_is_an_error_object(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """pyo3's panics are not subclasses of Exception, like this one."""

    class Panic(BaseException):
        pass

    def panic(name: str | None) -> str:
        raise Panic("canary")

    monkeypatch.setattr(gateway.service, "model_name", panic)
    status, reply = gateway.post("/v1/chat/completions", {"messages": [USER]})
    assert (status, reply["error"]["message"]) == (500, "Internal server error")
