"""Idempotency-Key and Last-Event-ID: one generation per key, streams that resume at a token, across gateways."""

import asyncio
import errno
import json
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from appliance.observability.log import Subject
from appliance.server.chat.completion_prompt import plan_completion
from appliance.server.chat.parsed import Served
from appliance.server.errors.api import BadRequest, Unavailable
from appliance.server.http.durable import Subscriber
from appliance.server.http.generate import records as records_of
from appliance.server.http.idempotency import read_position
from appliance.server.http.sse import DONE
from appliance.server.openai.completions import Completion
from appliance.server.process import load_text
from appliance.server.reply_store.entry import Entry
from appliance.server.reply_store.records import Identity, Opened
from appliance.server.schema.common import StreamOptions
from appliance.server.schema.completions import CompletionRequest
from engine.api.messages import Delta, Failed, Logprob
from tests.appliance.conftest import FakeEngine, Gateway, until

LOAD_TEXT = load_text  # before `start_gateway` puts another in its place
BODY = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 12, "n": 2, "stream": True, "temperature": 1}
BODY |= {"stream_options": {"include_usage": True}, "return_token_ids": True}
WHOLE = {"stream": False, "stream_options": None}
Records = list[tuple[str, Any]]


@pytest.fixture
def start(
    start_gateway: Callable[..., Gateway], checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Gateway]:
    """A gateway with text and a journal."""
    monkeypatch.setattr("appliance.server.process.load_text", LOAD_TEXT)

    def make(engine: FakeEngine, journal: str | None = "j", **values: Any) -> Gateway:
        facts = {"model": str(checkpoint), "vocab_size": 420, "outputs_sha256": "o", "endpoints.compat": "vllm"}
        return start_gateway(engine, **{**facts, "journal": str(tmp_path / journal) if journal else "", **values})

    return make


class Reader:
    """A client's stream, read in a thread: (id, record) as they come, [DONE] at the end."""

    def __init__(self, gateway: Gateway, body: Any = None, path: str = "/v1/completions", **headers: str) -> None:
        self.records: Records = []
        self.status = 0
        self.headers: httpx.Headers = httpx.Headers()
        self.text = ""
        self.left = threading.Event()
        self._given = (path, body or BODY, {name.replace("_", "-"): value for name, value in headers.items()})
        self._thread = threading.Thread(target=self._read, args=(gateway.url,), daemon=True)
        self._thread.start()

    def _read(self, url: str) -> None:
        path, body, headers = self._given
        with (
            httpx.Client(base_url=url, timeout=60) as client,
            client.stream("POST", path, json=body, headers=headers) as reply,
        ):
            self.status, self.headers = reply.status_code, reply.headers
            event = ""
            for line in reply.iter_lines():
                self.text += line
                if line.startswith("id: "):
                    event = line[4:]
                elif line.startswith("data: "):
                    data = line[6:]
                    self.records.append((event, data if data == "[DONE]" else json.loads(data)))
                    event = ""
                if self.left.is_set():
                    return

    def all(self) -> Records:
        self._thread.join(100)
        assert not self._thread.is_alive()
        return self.records

    def leave(self) -> None:
        """Closes the connection at the next line."""
        self.left.set()


def token_ids(records: Records) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for _, record in records:
        for choice in record["choices"] if record != "[DONE]" else ():
            found.setdefault(choice["index"], []).extend(choice["token_ids"])
    return found


def count(reader: Reader) -> int:
    return sum(map(len, token_ids(list(reader.records)).values()))


ALL = {0: list(range(100, 112)), 1: list(range(100, 112))}


def test_requests_with_one_key_are_one_generation(start: Callable[..., Gateway], engine: FakeEngine) -> None:
    engine.holding = True
    gateway = start(engine)
    one = Reader(gateway, Idempotency_Key="k1")
    until("it runs", lambda: len(engine.open) == 2)
    engine.give(4)
    until("records", lambda: count(one) == 8)
    two = Reader(gateway, Idempotency_Key="k1")
    until("it joined", lambda: count(two) == 8)
    engine.give(8)
    assert one.all() == two.all() and token_ids(one.records) == ALL
    assert len(engine.submits) == 2
    assert "idempotent-replayed" not in one.headers and two.headers["idempotent-replayed"] == "true"
    three = Reader(gateway, Idempotency_Key="k1")
    assert three.all() == one.records
    whole = gateway.client.post(
        "/v1/completions",
        json={name: value for name, value in BODY.items() if not name.startswith("stream")},
        headers={"Idempotency-Key": "k1"},
    ).json()
    assert whole["id"] == one.records[0][1]["id"] and whole["created"] == one.records[0][1]["created"]
    assert {choice["index"]: choice["token_ids"] for choice in whole["choices"]} == ALL
    assert whole["usage"] == one.records[-2][1]["usage"]
    assert len(engine.submits) == 2
    assert gateway.metric("slipway_requests_joined_total") == 3
    assert gateway.metric("slipway_requests_total") == 2
    assert gateway.metric("slipway_request_params_n_count") == 1
    assert gateway.metric("slipway_generation_tokens_total") == 24
    assert gateway.metric("slipway_journal_bytes") > 0
    Reader(gateway, Idempotency_Key="k2").left.set()
    until("another key is another request", lambda: len(engine.submits) == 4)


def test_a_stream_resumes_after_every_event(start: Callable[..., Gateway], engine: FakeEngine) -> None:
    gateway = start(engine)
    whole = Reader(gateway, Idempotency_Key="k").all()
    ids = [event for event, _ in whole]
    assert len(set(ids[:-1])) == len(ids) - 1 and ids[-2].endswith("u") and ids[-1] == ""
    for at, event in enumerate(ids[:-1]):
        assert Reader(gateway, Idempotency_Key="k", Last_Event_ID=event).all() == whole[at + 1 :], event
    assert len(engine.submits) == 2


def test_a_chat_stream_also_resumes_after_its_first_event(start: Callable[..., Gateway], engine: FakeEngine) -> None:
    gateway = start(engine)
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 9, "n": 2, "stream": True}
    whole = Reader(gateway, body, "/v1/chat/completions", Idempotency_Key="k").all()
    ids = [event for event, _ in whole]
    assert ids[:2] == ["", "0.0"] and ids[-1] == ""
    for at, event in enumerate(ids[1:-1], 1):
        rest = Reader(gateway, body, "/v1/chat/completions", Idempotency_Key="k", Last_Event_ID=event)
        assert rest.all() == whole[at + 1 :], event
    assert gateway.metric("slipway_request_params_n_count") == 1


def test_a_client_that_has_all_tokens_and_not_their_end_gets_it(
    start: Callable[..., Gateway], engine: FakeEngine
) -> None:
    gateway = start(engine)
    whole = Reader(gateway, Idempotency_Key="k").all()
    rest = Reader(gateway, Idempotency_Key="k", Last_Event_ID="12.12").all()
    ends = [record["choices"][0] for _, record in rest[:-2]]
    assert sorted((choice["index"], choice["finish_reason"], choice["text"]) for choice in ends) == [
        (0, "length", ""),
        (1, "length", ""),
    ]
    assert rest[-2:] == whole[-2:] and token_ids(rest) == {0: [], 1: []}


def test_without_a_key_nothing_is_kept_and_events_have_no_ids(
    start: Callable[..., Gateway], engine: FakeEngine, tmp_path: Path
) -> None:
    gateway = start(engine)
    reader = Reader(gateway)
    assert token_ids(reader.all()) == ALL and {event for event, _ in reader.records} == {""}
    assert (tmp_path / "j").stat().st_size == 0
    assert gateway.metric("slipway_requests_joined_total") == 0


@pytest.mark.parametrize(
    ("headers", "change", "status", "words"),
    [
        ({"Last_Event_ID": "1.1"}, {}, 400, "requires the Idempotency-Key"),
        ({"Idempotency_Key": "k" * 256}, {}, 400, "1 to 255 visible ASCII"),
        ({"Idempotency_Key": "a b"}, {}, 400, "1 to 255 visible ASCII"),
        ({"Idempotency_Key": "k", "Last_Event_ID": "x"}, {}, 400, "not an event ID"),
        ({"Idempotency_Key": "k", "Last_Event_ID": "1.1.1"}, {}, 400, "3 choices, but this one has 2"),
        ({"Idempotency_Key": "k", "Last_Event_ID": "1.1"}, WHOLE, 400, "stream=true"),
        ({"Idempotency_Key": "k"}, {"max_tokens": 11}, 422, "was already used for a different request"),
        ({"Idempotency_Key": "new", "Last_Event_ID": "1.1"}, {}, 404, "No reply is stored"),
    ],
)  # fmt: skip
def test_mistakes_are_reported(
    start: Callable[..., Gateway],
    engine: FakeEngine,
    headers: dict[str, str],
    change: dict[str, Any],
    status: int,
    words: str,
) -> None:
    gateway = start(engine)
    Reader(gateway, Idempotency_Key="k").all()
    body = {name: value for name, value in (BODY | change).items() if value is not None}
    reply = gateway.client.post(
        "/v1/completions", json=body, headers={name.replace("_", "-"): value for name, value in headers.items()}
    )
    assert reply.status_code == status and words in reply.json()["error"]["message"], reply.text
    assert len(engine.submits) == 2


def test_a_key_is_its_owners(start: Callable[..., Gateway], engine: FakeEngine) -> None:
    gateway = start(engine, keys=["alice", "bob"])
    for owner in ("alice", "bob"):
        Reader(gateway, Idempotency_Key="k", Authorization=f"Bearer {owner}").all()
    assert len(engine.submits) == 4
    assert Reader(gateway, Idempotency_Key="k", Authorization="Bearer mallory").all() == []
    gateway.client.headers["authorization"] = "Bearer alice"
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}  # another route
    reply = gateway.client.post("/v1/chat/completions", headers={"Idempotency-Key": "k"}, json=chat)
    assert reply.status_code == 200
    assert len(engine.submits) == 5


def test_an_abandoned_reply_pauses_and_resumes_on_request(start: Callable[..., Gateway], engine: FakeEngine) -> None:
    engine.holding, engine.cached = True, 2
    gateway = start(engine, **{"lifecycle.journal.linger": 0.05})
    one = Reader(gateway, Idempotency_Key="k")
    until("it runs", lambda: len(engine.open) == 2)
    engine.give(5)
    until("tokens", lambda: count(one) >= 10)
    one.leave()
    engine.give(1)
    until("it is taken from the engine", lambda: len(engine.aborted) == 2)
    seen = one.all()
    engine.cached = 3
    two = Reader(gateway, Idempotency_Key="k", Last_Event_ID=seen[-1][0])
    until("it runs again", lambda: len(engine.open) == 2)
    assert all(len(submit.emitted) in (5, 6) for submit in engine.submits[2:])
    assert [s.sampling.seed for s in engine.submits[2:]] == [s.sampling.seed for s in engine.submits[:2]]
    engine.give(7)
    rest = two.all()
    assert token_ids(seen + rest) == ALL
    assert rest[-2][1]["usage"]["completion_tokens"] == 24
    assert Reader(gateway, Idempotency_Key="k").all()[len(seen) :] == rest
    # One request: its usage is counted once, however its clients disconnected.
    assert gateway.metric("slipway_requests_total") == 2
    assert gateway.metric("slipway_requests_total", finished_reason="abort") == 0
    assert gateway.metric("slipway_request_params_n_count") == 1
    assert gateway.metric("slipway_prompt_tokens_total") == 6
    assert gateway.metric("slipway_request_generation_tokens_sum") == 24


def test_another_gateway_resumes_from_the_journal_of_a_killed_one(
    start: Callable[..., Gateway], new_engine: Callable[[], FakeEngine], tmp_path: Path
) -> None:
    """The file as it was at an earlier moment, with a torn end; the client has received more than the file contains."""
    first, second = new_engine().start(), new_engine().start()
    first.holding = True
    gateway = start(first)
    one = Reader(gateway, Idempotency_Key="k")
    until("it runs", lambda: len(first.open) == 2)
    first.give(3)
    until("tokens", lambda: count(one) >= 6)
    until("it is written", lambda: (tmp_path / "j").stat().st_size > 200)
    (tmp_path / "later").write_bytes((tmp_path / "j").read_bytes()[:-5])
    first.give(4)
    until("more tokens", lambda: count(one) >= 14)
    seen = list(one.records)
    heir = start(second, "later")
    two = Reader(heir, Idempotency_Key="k", Last_Event_ID=seen[-1][0])
    rest = two.all()
    assert token_ids(seen + rest) == ALL and two.headers["idempotent-replayed"] == "true"
    assert rest[0][1]["id"] == seen[0][1]["id"] and rest[0][1]["created"] == seen[0][1]["created"]
    assert all(len(submit.emitted) <= 3 for submit in second.submits)
    assert [s.sampling.seed for s in second.submits] == [s.sampling.seed for s in first.submits]
    assert rest[-2][1]["usage"]["completion_tokens"] == 24
    one.leave()
    first.give(5)
    one.all()


def test_a_gateway_that_shuts_down_pauses_and_the_next_one_resumes(
    start: Callable[..., Gateway], engine: FakeEngine, tmp_path: Path
) -> None:
    engine.holding = True
    gateway = start(engine)
    reader = Reader(gateway, Idempotency_Key="k")
    until("it runs", lambda: len(engine.open) == 2)
    engine.give(3)
    until("tokens", lambda: count(reader) >= 6)
    gateway.service.router.abort_all()  # the last action of a drain
    seen = reader.all()
    assert "Repeat the request with its Idempotency-Key" in seen[-2][1]["error"]["message"] and seen[-2][0] == ""
    again = Reader(gateway, Idempotency_Key="k", Last_Event_ID=seen[-3][0])
    until("it runs again", lambda: len(engine.open) == 2)
    engine.give(9)
    assert token_ids(seen[:-2] + again.all()) == ALL


def test_replies_are_kept_while_engines_are_unavailable(start: Callable[..., Gateway], engine: FakeEngine) -> None:
    engine.holding = True
    gateway = start(engine, **{"lifecycle.journal.linger": 0.0, "lifecycle.restart.hold": 0.0})
    reader = Reader(gateway, Idempotency_Key="k")
    until("it runs", lambda: len(engine.open) == 2)
    engine.give(3)
    until("tokens", lambda: count(reader) >= 6)
    reader.leave()
    engine.give(1)
    until("it is taken from the engine", lambda: len(engine.aborted) == 2)
    seen = reader.all()
    engine.die()
    until("503", lambda: gateway.client.get("/ready").status_code == 503)
    headers = {"Idempotency-Key": "k", "Last-Event-ID": seen[-1][0]}
    assert gateway.client.post("/v1/completions", json=BODY, headers=headers).status_code == 503
    engine.start()
    until("/ready", lambda: gateway.client.get("/ready").status_code == 200)
    rest = Reader(gateway, Idempotency_Key="k", Last_Event_ID=seen[-1][0])
    until("it runs again", lambda: len(engine.open) == 2)
    engine.give(12)
    assert token_ids(seen + rest.all()) == ALL


def test_engines_that_go_while_it_is_gone_on_with_lose_nothing_of_it(
    start: Callable[..., Gateway], engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.holding = True
    gateway = start(engine, **{"lifecycle.journal.linger": 0.0})
    reader = Reader(gateway, Idempotency_Key="k")
    until("it runs", lambda: len(engine.open) == 2)
    engine.give(3)
    until("tokens", lambda: count(reader) >= 6)
    reader.leave()
    engine.give(1)
    until("it is taken from the engine", lambda: len(engine.aborted) == 2)
    seen = reader.all()

    def gone(*given: Any) -> Any:
        raise Unavailable("no engine", 1)

    with monkeypatch.context() as patch:
        patch.setattr(gateway.service.router, "generate_all", gone)
        failed = Reader(gateway, Idempotency_Key="k", Last_Event_ID=seen[-1][0]).all()
    assert failed[-2][1]["error"]["code"] == 503
    rest = Reader(gateway, Idempotency_Key="k", Last_Event_ID=seen[-1][0])
    until("it runs again", lambda: len(engine.open) == 2)
    engine.give(12)
    assert token_ids(seen + rest.all()) == ALL


def test_a_failed_request_can_be_retried(start: Callable[..., Gateway], engine: FakeEngine) -> None:
    gateway = start(engine)
    engine.refusal = Failed("", "nan", "numbers", None)
    failed = Reader(gateway, Idempotency_Key="k").all()
    assert failed[-2][1]["error"]["code"] >= 400
    engine.refusal = None
    assert token_ids(Reader(gateway, Idempotency_Key="k").all()) == ALL


def test_a_disk_that_fails_costs_no_stream(
    start: Callable[..., Gateway], engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = start(engine)

    def full(file: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("appliance.server.reply_store.log.os.write", full)
    assert token_ids(Reader(gateway, Idempotency_Key="k").all()) == ALL
    assert Reader(gateway, Idempotency_Key="k").all()[-1] == ("", "[DONE]")
    until("it is told", lambda: gateway.metric("slipway_journal_errors_total") > 0)
    assert len(engine.submits) == 2


def test_a_journal_full_of_running_replies_refuses_more(start: Callable[..., Gateway], engine: FakeEngine) -> None:
    engine.holding = True
    gateway = start(engine, **{"lifecycle.journal.size": 2_000})
    readers, refused = [], None
    while refused is None and len(readers) < 50:
        reader = Reader(gateway, Idempotency_Key=str(len(readers)))
        until("an answer", lambda reader=reader: reader.status)  # type: ignore[misc]
        readers.append(reader)
        refused = reader if reader.status == 503 else None
    assert refused is not None and 1 < len(readers) < 50
    refused.all()
    assert "with an Idempotency-Key are in progress" in refused.text
    until("it holds no engine", lambda: len(engine.open) == 2 * (len(readers) - 1))
    engine.give(12)
    assert all(token_ids(reader.all()) == ALL for reader in readers[:-1])


def test_a_gateway_without_a_journal_ignores_idempotency_keys(
    start: Callable[..., Gateway], engine: FakeEngine
) -> None:
    gateway = start(engine, journal=None)
    for _ in range(2):
        assert token_ids(Reader(gateway, Idempotency_Key="k", Last_Event_ID="1").all()) == ALL


# -- positions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "a", "1..2", "1.2.", "-1.2", "1.2uu", "u", "1.2e3", "1" * 11 + ".1", "１.2"])
def test_only_ids_of_events_are_positions(text: str) -> None:
    with pytest.raises(BadRequest):
        read_position(text, 2)


def test_a_stream_resumes_at_its_token_however_tokens_are_split(make_gateway: Callable[..., Any]) -> None:
    """A client resumes a stream in a run whose deltas are split differently: texts, tokens and logprobs join."""
    gateway = make_gateway()
    rng = random.Random(3)
    words = "中文 emoji 🎉 hello world stop END the answer is 42 👩‍👩‍👧 "
    ids = gateway.ids(words * 3)
    stop = gateway.ids("x")
    for trial in range(9):
        n = rng.choice((1, 2, 3))
        body = CompletionRequest(
            prompt=[3, 4], n=n, max_tokens=200, logprobs=1, stop=["is 4"] if trial % 3 == 0 else None,
            stream=True, stream_options=StreamOptions(include_usage=True), return_token_ids=True,
            min_tokens=rng.choice((0, 30)),
        )  # fmt: skip
        plan = plan_completion(body, Served(gateway.service.text, gateway.config, "r"))
        replies = [(ids[: rng.randrange(5, len(ids))] + stop, rng.choice(("length", "stop"))) for _ in range(n)]
        runs = [cut(rng, replies) for _ in range(2)]
        first, again = (read(gateway, body, plan, run, None) for run in runs)
        assert merged(first) == merged(again)
        for at, (event, _) in enumerate(first[:-1]):
            rest = read(gateway, body, plan, runs[1], event)
            assert merged(first[: at + 1] + rest) == merged(again), (trial, event)
            assert rest[-1][1] == first[-1][1]


def cut(rng: random.Random, replies: list[tuple[list[int], str]]) -> list[tuple[int, Delta]]:
    """Return the deltas of all choices, split and interleaved at random."""
    left = [list(ids) for ids, _ in replies]
    found = []
    while any(left):
        index = rng.choice([number for number, ids in enumerate(left) if ids])
        count = rng.choice((1, 1, 1, 2, 5))
        part, left[index] = left[index][:count], left[index][count:]
        scores = tuple(Logprob(token, -0.5, 1, (token,), (-0.5,)) for token in part)
        finish = None if left[index] else replies[index][1]
        found.append((index, Delta(f"r-{index}", tuple(part), scores, finish=finish)))  # type: ignore[arg-type]
    return found


def read(gateway: Any, body: CompletionRequest, plan: Any, run: list[tuple[int, Delta]], after: str | None) -> Records:
    submits = plan.prompts[0].submits
    entry = Entry(Opened(0, b"k", b"b", Identity("r", 1, "s"), submits, "o", 0.0), lambda record: None)

    async def collect() -> list[bytes]:
        for index, delta in run:
            entry.append(index, delta)
        entry.state = "ended"
        position = None if after is None else read_position(after, len(submits))
        source = Subscriber(entry, position, 1.0)
        reply = Completion(gateway.service, Subject("r"), body, plan, entry.opened.identity)
        return [data async for data in records_of(source, reply) if data != DONE]

    records = []
    for raw in asyncio.run(collect()):
        event, data = raw.decode().strip().split("\n")
        records.append((event.removeprefix("id: "), json.loads(data.removeprefix("data: "))))
    return records


def merged(records: Records) -> Any:
    """Return the merged records of each choice, and the usage."""
    found: dict[int, Any] = {}
    usage = None
    for _, record in records:
        usage = record.get("usage") or usage
        for choice in record["choices"]:
            own = found.setdefault(choice["index"], {"text": "", "ids": [], "logprobs": [], "finish": []})
            own["text"] += choice["text"]
            own["ids"] += choice["token_ids"]
            own["logprobs"] += list(
                zip(*(choice["logprobs"][name] for name in sorted(choice["logprobs"])), strict=True)
            )
            own["finish"] += [choice["finish_reason"]] if choice["finish_reason"] else []
    return found, usage


def test_the_file_is_for_its_owner_alone(start: Callable[..., Gateway], engine: FakeEngine, tmp_path: Path) -> None:
    gateway = start(engine)
    Reader(gateway, Idempotency_Key="a-secret-word").all()
    data = (tmp_path / "j").read_bytes()
    assert b"a-secret-word" not in data and os.stat(tmp_path / "j").st_mode & 0o077 == 0
