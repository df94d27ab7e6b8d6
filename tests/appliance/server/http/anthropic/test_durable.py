"""Streams of /v1/messages resume after an event, like the streams of the other routes (test_durable.py)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from appliance.server.process import load_text
from tests.appliance.conftest import FakeEngine, Gateway, until
from tests.appliance.server.http.anthropic.order import assembled, records
from tests.appliance.server.http.test_durable import Reader

LOAD_TEXT = load_text  # before `start_gateway` puts another in its place
BODY: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 9,
    "stream": True,
    "messages": [{"role": "user", "content": "hello"}],
}


@pytest.fixture
def served(
    start_gateway: Callable[..., Gateway],
    engine: FakeEngine,
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Gateway:
    monkeypatch.setattr("appliance.server.process.load_text", LOAD_TEXT)
    facts = {"model": str(checkpoint), "vocab_size": 420, "outputs_sha256": "o", "journal": str(tmp_path / "j")}
    return start_gateway(engine, **facts)


def post(gateway: Gateway, body: dict[str, Any], **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return gateway.client.post("/v1/messages", json=body, headers=named)


def told(reader: Reader) -> list[tuple[str, Any]]:
    return [(event, record) for event, record in reader.all() if record["type"] != "ping"]


def test_a_stream_resumes_after_every_event_that_has_an_id(served: Gateway, engine: FakeEngine) -> None:
    engine.holding = True
    first = Reader(served, BODY, "/v1/messages", Idempotency_Key="k")
    until("it runs", lambda: len(engine.open) == 1)
    for tokens in range(1, 10):
        engine.give()
        until("the token is there", lambda tokens=tokens: texts(first) >= tokens - 2)  # type: ignore[misc]
    whole = told(first)
    ids = [event for event, _ in whole]
    assert ids[0] == "0" and ids[-1] == "9eu" and len({event for event in ids if event}) >= 6
    message = assembled([record for _, record in whole])
    assert message["usage"]["output_tokens"] == 9 and message["content"][0]["text"]
    for at, event in enumerate(ids):
        if event:
            rest = Reader(served, BODY, "/v1/messages", Idempotency_Key="k", Last_Event_ID=event)
            assert told(rest) == whole[at + 1 :], event
            assert rest.headers["idempotent-replayed"] == "true"
    assert len(engine.submits) == 1


def texts(reader: Reader) -> int:
    return sum(record["type"] == "content_block_delta" for _, record in list(reader.records))


def test_stream_and_whole_reply_of_one_key_are_one_message(served: Gateway, engine: FakeEngine) -> None:
    streamed = assembled(records(post(served, BODY, Idempotency_Key="k").text))
    whole = post(served, {**BODY, "stream": False}, Idempotency_Key="k").json()
    assert streamed == whole
    assert len(engine.submits) == 1


def test_the_same_key_with_another_body_is_refused_in_the_shape(served: Gateway) -> None:
    post(served, BODY, Idempotency_Key="k")
    reply = post(served, {**BODY, "thinking": {"type": "adaptive"}}, Idempotency_Key="k")
    assert (reply.status_code, reply.json()["error"]["type"]) == (422, "invalid_request_error")


def test_why_takes_the_id_of_a_message(served: Gateway) -> None:
    reply = post(served, {**BODY, "stream": False}).json()
    told = served.client.get(f"/v1/requests/{reply['id']}/why")
    assert told.status_code == 200 and told.json()["choices"][0]["events"]
