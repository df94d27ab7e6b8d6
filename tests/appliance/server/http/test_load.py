"""GET /load: every open request counts once, until it ends for any reason."""

import json
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from appliance.config.gateway import PooledModel
from engine.api.messages import Failed
from tests.appliance.conftest import FakeEngine, Gateway
from tests.appliance.server.http.responses.test_store import start  # noqa: F401

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 9}
COMPLETION = {"prompt": "hello", "max_tokens": 9}
RESPONSE = {"input": "hello", "max_output_tokens": 9}
GENERATES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", CHAT),
    "several choices": ("/v1/chat/completions", {**CHAT, "n": 3}),
    "completion": ("/v1/completions", COMPLETION),
    "several prompts": ("/v1/completions", {**COMPLETION, "prompt": ["hello", "world"]}),
    "message": ("/v1/messages", CHAT),
    "stored response": ("/v1/responses", RESPONSE),
    "response": ("/v1/responses", {**RESPONSE, "store": False}),
    "invocation": ("/invocations", CHAT),
}
STREAMS = {f"{name}, streamed": (path, {**body, "stream": True}) for name, (path, body) in GENERATES.items()}
POOLS: dict[str, tuple[str, dict[str, Any]]] = {
    "embeddings": ("/v1/embeddings", {"input": ["hello", "world"]}),
    "pooling": ("/pooling", {"input": "hello"}),
    "score": ("/score", {"text_1": "hello", "text_2": ["world", "answer"]}),
    "rerank": ("/v1/rerank", {"query": "hello", "documents": ["world", "answer"]}),
    "embed of Cohere's": ("/v2/embed", {"texts": ["hello"], "input_type": "search_query"}),
}
TOLD = ("InternalServerError", "api_error", "response.failed")  # a stream that has begun sends its error at its end
ENDS = ("finish", "error", "disconnect")

Eventually = Callable[[str, Callable[[], bool]], None]


class Request:
    """One connection, so that a client can disconnect before the reply begins."""

    def __init__(self, gateway: Gateway, method: str, path: str, body: dict[str, Any] | None = None) -> None:
        host, _, port = gateway.url.removeprefix("http://").partition(":")
        content = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\ncontent-type: application/json\r\n"
        self._socket = socket.create_connection((host, int(port)), timeout=60)
        self._socket.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)

    def leave(self) -> None:
        self._socket.close()

    def reply(self) -> tuple[int, str]:
        """Return the status and all following bytes until the server closes."""
        parts = []
        while part := self._socket.recv(65536):
            parts.append(part)
        self._socket.close()
        text = b"".join(parts).decode()
        return int(text.split()[1]), text


def load(gateway: Gateway) -> int:
    return int(gateway.client.get("/load").json()["server_load"])


def fail(engine: FakeEngine) -> None:
    """Fail the open requests, as an engine does after a failed step."""
    ids = tuple(engine.open)
    engine.open.clear()
    engine.say(*(Failed(each, "step", "the model gave no usable logits") for each in ids))


def end(engine: FakeEngine, request: Request, how: str) -> None:
    match how:
        case "finish":
            engine.give(9)
            assert request.reply()[0] == 200
        case "error":
            fail(engine)
            status, text = request.reply()
            assert status == 500 or (status == 200 and any(sign in text for sign in TOLD)), text
        case "disconnect":
            request.leave()


@pytest.fixture
def generating(start: Callable[..., Gateway], engine: FakeEngine) -> Iterator[Gateway]:  # noqa: F811
    engine.holding = True
    yield start(engine)


@pytest.fixture
def pooling(start: Callable[..., Gateway], engine: FakeEngine) -> Iterator[Gateway]:  # noqa: F811
    engine.holding = True
    yield start(engine, store="", tasks=("embed", "score"), pooled=PooledModel(width=3))


def check(
    gateway: Gateway, engine: FakeEngine, eventually: Eventually, ask: Callable[[], Request], *, begun: bool
) -> None:
    """`begun`: the reply has its first token before it ends."""
    for how in ENDS:
        assert load(gateway) == 0, f"before {how}"
        request = ask()
        eventually(f"the engine has it before {how}", lambda: bool(engine.open))
        if begun:
            engine.give(1)
        assert load(gateway) == 1, f"open until {how}"
        end(engine, request, how)
        eventually(f"no load behind {how}", lambda: load(gateway) == 0)
        assert gateway.metric("slipway_open_requests") == 0
        eventually(f"nothing is left of it behind {how}", lambda: not engine.open)


@pytest.mark.parametrize("name", [*GENERATES, *STREAMS])
@pytest.mark.sampled(2)
def test_a_request_that_generates_counts_until_it_is_over(
    generating: Gateway, engine: FakeEngine, eventually: Eventually, name: str
) -> None:
    """API-05"""
    path, body = (GENERATES | STREAMS)[name]
    check(generating, engine, eventually, lambda: Request(generating, "POST", path, body), begun=True)


@pytest.mark.parametrize("name", POOLS)
def test_a_request_that_pools_counts_until_it_is_over(
    pooling: Gateway, engine: FakeEngine, eventually: Eventually, name: str
) -> None:
    """API-05"""
    path, body = POOLS[name]
    check(pooling, engine, eventually, lambda: Request(pooling, "POST", path, body), begun=False)


@pytest.mark.parametrize("how", ENDS)
def test_a_background_response_counts_as_load_while_a_client_reads_it(
    generating: Gateway, engine: FakeEngine, eventually: Eventually, how: str
) -> None:
    """API-05: its creation is over at once; each that follows its events counts by itself"""
    created = generating.client.post("/v1/responses", json={**RESPONSE, "background": True})
    eventually("the engine has it", lambda: bool(engine.open))
    assert created.json()["status"] == "queued" and load(generating) == 0
    path = f"/v1/responses/{created.json()['id']}"
    followers = [Request(generating, "GET", f"{path}?stream=true") for _ in range(2)]
    eventually("both follow", lambda: load(generating) == 2)
    engine.give(1)
    eventually("it has begun", lambda: generating.client.get(path).json()["status"] == "in_progress")
    assert load(generating) == 2
    if how == "disconnect":
        followers[0].leave()
        eventually("one follows on", lambda: load(generating) == 1)
        followers[1].leave()
        eventually("nobody follows", lambda: load(generating) == 0)
        assert engine.open, "nobody needs to read it"
        engine.give(9)
    else:
        engine.give(9) if how == "finish" else fail(engine)
        told = "response.incomplete" if how == "finish" else "response.failed"
        assert [told in follower.reply()[1] for follower in followers] == [True, True]
        eventually("nobody follows", lambda: load(generating) == 0)
    assert generating.metric("slipway_open_requests") == 0


def test_rejected_requests_leave_no_load(generating: Gateway) -> None:
    """API-05"""
    assert generating.client.post("/v1/chat/completions", json={"messages": []}).status_code == 400
    assert generating.client.post("/v1/chat/completions", content=b"{").status_code == 400
    assert generating.client.get("/v1/responses/resp_none?stream=true").status_code == 404
    assert generating.client.get("/v1/models").status_code == 200
    assert load(generating) == 0 and generating.metric("slipway_open_requests") == 0
