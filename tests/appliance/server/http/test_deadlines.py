"""Deadlines and owners of requests: fields, headers, refusals, late replies, metrics and timelines."""

import hashlib
import time
from collections.abc import Callable
from typing import Any

import pytest

from appliance.server.chat.deadlines import LONGEST_MS
from appliance.server.process import load_text
from engine.api.messages import Delta, Output, Submit
from tests.appliance.conftest import FakeEngine, Gateway
from tests.appliance.server.http.test_durable import Reader, count, token_ids
from tests.appliance.server.http.test_headers import ROUTES, send

LOAD_TEXT = load_text
BODY = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 12, "stream": True, "return_token_ids": True}


@pytest.fixture
def start(
    start_gateway: Callable[..., Gateway], checkpoint: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> Callable[..., Gateway]:
    monkeypatch.setattr("appliance.server.process.load_text", LOAD_TEXT)

    def make(engine: FakeEngine, **values: Any) -> Gateway:
        engine.holding = True
        return start_gateway(engine, **{"model": str(checkpoint), "vocab_size": 420, **values})

    return make


def post(gateway: Gateway, headers: dict[str, str] | None = None, **fields: Any) -> Any:
    body = {**BODY, "stream": False, **fields}
    return gateway.client.post("/v1/completions", json=body, headers=headers)


def end_late(engine: FakeEngine) -> None:
    """End late requests as the engine's scheduler does."""
    ids = list(engine.open)
    engine.open.clear()
    engine.say(Output(9, tuple(Delta(id, finish="deadline") for id in ids)))


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_fields_and_headers_give_times_of_the_machines_clock(gateway: Any, path: str, body: dict[str, Any]) -> None:
    gateway.says("x")
    asked: list[tuple[dict[str, Any], dict[str, str]]] = [
        ({"ttft_deadline_ms": 500, "deadline_ms": 3000}, {}),
        ({}, {"X-TTFT-Deadline-Ms": "500", "X-Deadline-Ms": "3000"}),
        ({"ttft_deadline_ms": 500, "deadline_ms": 3000}, {"X-TTFT-Deadline-Ms": "7", "X-Deadline-Ms": "8"}),
    ]
    for fields, headers in asked:
        before = time.monotonic()
        assert send(gateway, path, {**body, **fields}, headers).status_code == 200
        after, submit = time.monotonic(), gateway.submits[-1]
        assert before + 0.5 <= submit.ttft_deadline <= after + 0.5
        assert submit.deadline - submit.ttft_deadline == pytest.approx(2.5)
    assert send(gateway, path, body, {}).status_code == 200
    assert (gateway.submits[-1].ttft_deadline, gateway.submits[-1].deadline) == (None, None)


@pytest.mark.parametrize("field", ["deadline_ms", "ttft_deadline_ms"])
@pytest.mark.parametrize("given", [0, -1, LONGEST_MS + 1])
def test_a_time_that_is_none_is_refused(gateway: Any, field: str, given: int) -> None:
    header = {"deadline_ms": "X-Deadline-Ms", "ttft_deadline_ms": "X-TTFT-Deadline-Ms"}[field]
    for status, reply in (
        gateway.post("/v1/completions", {"prompt": "hello", field: given}),
        gateway.post("/v1/completions", {"prompt": "hello"}, **{header: str(given)}),
    ):
        assert (status, reply["error"]["param"]) == (400, field)
        assert reply["error"]["message"] == f"{field} must be in [1, 86400000] milliseconds, got {given}."
    assert gateway.post("/v1/completions", {"prompt": "hello"}, **{header: "soon"})[0] == 400


def test_a_late_reply_is_an_error_that_is_not_to_be_repeated(
    start: Callable[..., Gateway], engine: FakeEngine, eventually: Any
) -> None:
    gateway = start(engine)
    stream = Reader(gateway, {**BODY, "deadline_ms": 60_000}, X_Request_Id="late")
    eventually("it is there", lambda: len(engine.open) == 1)
    engine.give(2)
    end_late(engine)
    *given, (_, error), (_, last) = stream.all()
    assert (stream.status, token_ids(given)) == (200, {0: [100, 101]})
    assert (error["error"]["code"], error["error"]["type"], last) == (504, "DeadlineExceededError", "[DONE]")
    eventually("all is let go", lambda: gateway.service.router.open == gateway.service.open_requests == 0)
    assert gateway.metric("slipway_requests_total", finished_reason="deadline") == 1
    assert gateway.metric("vllm:request_success_total", finished_reason="deadline") == 1
    timeline = gateway.client.get("/v1/requests/late/why").json()["choices"][0]
    assert timeline["events"][-1]["text"] == "finished (deadline) with 2 tokens"


def test_a_late_whole_reply_is_504(start: Callable[..., Gateway], engine: FakeEngine, eventually: Any) -> None:
    gateway = start(engine)
    reader = Reader(gateway, {**BODY, "stream": False, "deadline_ms": 60_000})
    eventually("it is there", lambda: len(engine.open) == 1)
    end_late(engine)
    reader.all()
    assert reader.status == 504 and reader.headers["x-should-retry"] == "false"


def test_one_that_waits_for_an_engine_is_late_too(
    start: Callable[..., Gateway], engine: FakeEngine, eventually: Any
) -> None:
    gateway = start(engine)
    short = Reader(gateway, {**BODY, "stream": False, "deadline_ms": 700}, X_Request_Id="short")
    first = Reader(gateway, {**BODY, "stream": False, "ttft_deadline_ms": 700}, X_Request_Id="first")
    long = Reader(gateway, {**BODY, "deadline_ms": 60_000})
    eventually("they are there", lambda: len(engine.open) == 3)
    engine.die()
    short.all(), first.all()
    assert (short.status, first.status) == (504, 504)
    texts = {}
    for name in ("short", "first"):
        timeline = gateway.client.get(f"/v1/requests/{name}/why").json()["choices"][0]
        texts[name] = [event["text"] for event in timeline["events"]][-2:]
    over = "finished (deadline) with 0 tokens"
    assert texts["short"] == ["deadline_ms passed while the request was queued", over]
    assert texts["first"] == ["ttft_deadline_ms passed while the request was queued", over]
    assert gateway.service.router.pending == 1
    engine.start()
    eventually("the third goes on", lambda: len(engine.open) == 1)
    engine.give(12)
    assert long.all()[-1] == ("", "[DONE]") and "error" not in long.text


HUNG = {
    "whole": {"stream": False},
    "stream": {"stream": True},
    "choices": {"stream": False, "n": 3},
    "first token": {"stream": False, "deadline_ms": None, "ttft_deadline_ms": 700},
}


@pytest.mark.parametrize("kind", HUNG)
def test_an_engine_that_does_not_answer_does_not_delay_a_deadline(
    kind: str, start: Callable[..., Gateway], engine: FakeEngine, eventually: Any
) -> None:
    """The engine keeps the request open and sends nothing; the gateway ends it and sends the engine an abort"""
    gateway = start(engine)
    fields = {name: value for name, value in {"deadline_ms": 700, **HUNG[kind]}.items() if value is not None}
    reader = Reader(gateway, {**BODY, **fields}, X_Request_Id="hung")
    eventually("the engine has it", lambda: len(engine.open) == fields.get("n", 1))
    reader.all()
    assert reader.status == 504 or '"code":504' in reader.text.replace(" ", "")
    eventually("aborted", lambda: not engine.open and gateway.service.router.open == 0)
    assert len(engine.aborted) == fields.get("n", 1)
    assert gateway.metric("slipway_requests_total", finished_reason="deadline") == fields.get("n", 1)
    events = gateway.client.get("/v1/requests/hung/why").json()["choices"][0]["events"]
    name = "ttft_deadline_ms" if "ttft_deadline_ms" in fields else "deadline_ms"
    assert events[-2]["text"] == f"{name} passed while the request was running"


def test_a_stream_of_an_engine_that_hangs_after_two_tokens_ends_at_its_deadline(
    start: Callable[..., Gateway], engine: FakeEngine, eventually: Any
) -> None:
    gateway = start(engine)
    stream = Reader(gateway, {**BODY, "deadline_ms": 1500, "ttft_deadline_ms": 1200})
    eventually("the engine has it", lambda: len(engine.open) == 1)
    engine.give(2)
    *given, (_, error), (_, last) = stream.all()
    assert (stream.status, token_ids(given)) == (200, {0: [100, 101]})
    assert (error["error"]["code"], last) == (504, "[DONE]")
    eventually("aborted", lambda: not engine.open)


def test_a_request_with_a_key_ends_at_its_deadline_while_the_engine_hangs(
    start: Callable[..., Gateway], engine: FakeEngine, eventually: Any
) -> None:
    gateway = start(engine)
    reader = Reader(gateway, {**BODY, "stream": False, "deadline_ms": 700}, Idempotency_Key="one")
    reader.all()
    assert reader.status == 504
    again = Reader(gateway, {**BODY, "stream": False}, Idempotency_Key="one")
    eventually("it begins again", lambda: len(engine.open) == 1)
    engine.give(12)
    again.all()
    assert again.status == 200


def queue(engine: FakeEngine, gateway: Gateway, eventually: Any) -> list[Reader]:
    """Two requests a second were started for a while, and six wait."""
    drain, moment = gateway.service.router.drain, time.monotonic() - 20.0
    for number in range(40):
        drain.enter(moment + number / 2)
        drain.start(moment + number / 2 + 0.5, 3)
    readers = [Reader(gateway, BODY) for _ in range(6)]
    eventually("all wait", lambda: len(engine.open) == 6)
    return readers


def test_impossible_deadlines_are_rejected_with_retry_after(
    start: Callable[..., Gateway], engine: FakeEngine, eventually: Any
) -> None:
    gateway = start(engine)
    readers = queue(engine, gateway, eventually)
    refused = post(gateway, ttft_deadline_ms=200)
    assert (refused.status_code, refused.json()["error"]["type"]) == (503, "Service Unavailable")
    # Six requests ahead at two a second take 3 s, and a moment has already passed.
    message = refused.json()["error"]["message"]
    assert message.startswith("This request cannot meet its ttft_deadline_ms: about 2,") or "about 3,0" in message
    assert "6 requests with 18 prompt tokens are queued before it. Retry later or increase the deadline." in message
    assert 2 <= int(refused.headers["retry-after"]) <= 3
    assert post(gateway, {"X-Deadline-Ms": "200"}).status_code == 503
    for field in ("ttft_deadline_ms", "deadline_ms"):
        assert gateway.metric("slipway_admission_rejections_total", reason=field) == 1
    assert len(engine.submits) == 6, "an engine saw it"
    patient = Reader(gateway, {**BODY, "deadline_ms": 60_000})
    eventually("it waits", lambda: len(engine.open) == 7)
    engine.give(12)
    for reader in [*readers, patient]:
        assert reader.all()[-1] == ("", "[DONE]")


@pytest.mark.parametrize(
    ("policy", "key", "priority", "status"),
    [("fair", "k1", 0, 503), ("fair", "k2", 0, None), ("fcfs", "k2", -1, 503), ("priority", "k1", 0, 503),
     ("priority", "k1", -1, None), ("priority", "k1", 1, 503)],
)  # fmt: skip
def test_only_earlier_requests_count_for_a_deadline(
    start_gateway: Callable[..., Gateway], start: Callable[..., Gateway], engine: FakeEngine, eventually: Any,
    policy: str, key: str, priority: int, status: int | None,
) -> None:  # fmt: skip
    gateway = start(engine, policy=policy, keys=["k1 name=one priority=yes", "k2 name=two priority=yes"])
    gateway.client.headers["authorization"] = "Bearer k1"
    drain, moment = gateway.service.router.drain, time.monotonic() - 20.0
    for number in range(40):
        drain.enter(moment + number / 2)
        drain.start(moment + number / 2 + 0.5, 3)
    readers = [Reader(gateway, BODY, authorization="Bearer k1") for _ in range(6)]
    eventually("all wait", lambda: len(engine.open) == 6)
    body = {**BODY, "stream": False, "ttft_deadline_ms": 300, "priority": priority}
    asked = Reader(gateway, body, authorization=f"Bearer {key}")
    if status is None:
        eventually("it is taken", lambda: len(engine.open) == 7)
    else:
        asked.all()
    engine_had = len(engine.submits)
    engine.give(12)
    asked.all()
    assert (asked.status, engine_had) == ((200, 7) if status is None else (status, 6))
    for reader in readers:
        reader.all()


def test_each_api_key_is_an_owner_and_none_is_sent_to_engines(
    start: Callable[..., Gateway], engine: FakeEngine
) -> None:
    gateway = start(engine, keys=["first-key", "second"])
    engine.holding = False
    for headers in ({"authorization": "Bearer first-key"}, {"x-api-key": "first-key"}, {"x-api-key": "second"}):
        assert post(gateway, headers).status_code == 200
    owners = [submit.owner for submit in engine.submits]
    assert owners[0] == owners[1] != owners[2]
    assert owners[0] == hashlib.sha256(b"first-key").hexdigest()[:16]


def test_without_keys_all_requests_have_one_owner(start: Callable[..., Gateway], engine: FakeEngine) -> None:
    gateway = start(engine)
    engine.holding = False
    assert post(gateway, {"authorization": "Bearer anything"}).status_code == 200
    assert [submit.owner for submit in engine.submits] == [""]


def test_a_durable_reply_resumes_with_the_deadline_of_the_new_request(
    start: Callable[..., Gateway], engine: FakeEngine, eventually: Any, tmp_path: Any
) -> None:
    gateway = start(engine, journal=str(tmp_path / "j"), **{"lifecycle.journal.linger": 0.0})
    body = {**BODY, "deadline_ms": 50_000}
    one = Reader(gateway, body, Idempotency_Key="k")
    eventually("it runs", lambda: len(engine.open) == 1)
    engine.give(3)
    eventually("three tokens", lambda: count(one) >= 3)
    one.leave()
    engine.give(1)
    eventually("it is left", lambda: not engine.open)
    entry = next(iter(gateway.service.reply_store._entries.values()))  # type: ignore[union-attr]
    assert [submit.deadline for submit in entry.opened.submits] == [None]
    two = Reader(gateway, body, Idempotency_Key="k")
    eventually("it goes on", lambda: len(engine.open) == 1)
    first, second = engine.submits
    assert isinstance(second, Submit) and first.deadline is not None and second.deadline is not None
    assert second.emitted and second.deadline > first.deadline
    engine.give(12)
    assert two.all()[-1][1] == "[DONE]" and two.status == 200


def test_a_durable_reply_that_was_late_is_generated_again(
    start: Callable[..., Gateway], engine: FakeEngine, eventually: Any, tmp_path: Any
) -> None:
    gateway = start(engine, journal=str(tmp_path / "j"))
    one = Reader(gateway, {**BODY, "stream": False, "deadline_ms": 50_000}, Idempotency_Key="k")
    eventually("it runs", lambda: len(engine.open) == 1)
    end_late(engine)
    one.all()
    two = Reader(gateway, {**BODY, "stream": False, "deadline_ms": 50_000}, Idempotency_Key="k")
    eventually("it runs again", lambda: len(engine.open) == 1)
    engine.give(12)
    two.all()
    assert (one.status, two.status) == (504, 200)
