"""Stored responses: retrieved, followed from any event, run in the background, cancelled, deleted and chained; per
owner, across gateways, within bounds. The gateway is live on a port; its engine replies as the test directs."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from appliance.config.gateway import GatewayConfig
from appliance.security.keys import parse_keys
from appliance.server.app import build_app
from appliance.server.http.service import Service
from appliance.server.process import build_service
from appliance.server.reply_store.log import framed, unframed
from engine.api.messages import Failed
from tests.appliance.conftest import FakeEngine, Gateway, running, until
from tests.appliance.server.http.responses.order import check_object, check_order, read_events

PATH = "/v1/responses"
BODY = {"model": "tiny", "input": "hello", "max_output_tokens": 12}
Event = dict[str, Any]


class Live(Gateway):
    """Gateway that shuts down on request."""

    def __init__(self, service: Service) -> None:
        app, listener = build_app(service), socket.create_server(("127.0.0.1", 0))
        self.app = app
        super().__init__(service, f"http://127.0.0.1:{listener.getsockname()[1]}")
        self._stack = ExitStack()
        self._stack.enter_context(running(service, app, listener))
        self._stack.enter_context(self.client)
        until("/ready", lambda: self.client.get("/ready").status_code == 200)

    def stop(self) -> None:
        self._stack.close()


@pytest.fixture
def start(new_config: Callable[..., GatewayConfig], checkpoint: Path, tmp_path: Path) -> Iterator[Callable[..., Live]]:
    """Starts gateways with text and a store."""
    started: list[Live] = []

    def make(engine: FakeEngine, store: str = "r", keys: Sequence[str] = (), **values: Any) -> Live:
        facts = {"model": str(checkpoint), "vocab_size": 420, "outputs_sha256": "o", "max_context": 2048}
        facts |= {"responses": str(tmp_path / store) if store else "", **values}
        started.append(Live(build_service(new_config(engine, **facts), parse_keys(keys, "keys"))))
        return started[-1]

    yield make
    for gateway in started:
        gateway.stop()


class Reader:
    """A client's stream of events, read in a thread as they come."""

    def __init__(self, gateway: Gateway, method: str, path: str, body: Any = None, **headers: str) -> None:
        self.text = ""
        self.status = 0
        self.left = threading.Event()
        self._given = (method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        self._thread = threading.Thread(target=self._read, args=(gateway.url,), daemon=True)
        self._thread.start()

    def _read(self, url: str) -> None:
        method, path, body, headers = self._given
        with (
            httpx.Client(base_url=url, timeout=60, verify=False) as client,
            client.stream(method, path, json=body, headers=headers) as reply,
        ):
            self.status = reply.status_code
            for piece in reply.iter_text():
                self.text += piece
                if self.left.is_set():
                    return

    @property
    def events(self) -> list[Event]:
        whole, end, _ = self.text.rpartition("\n\n")
        return read_events(whole + end) if end else []

    def all(self) -> list[Event]:
        self._thread.join(100)
        assert not self._thread.is_alive()
        return read_events(self.text)


def created(gateway: Gateway, **fields: Any) -> Event:
    reply = gateway.client.post(PATH, json=BODY | fields)
    assert reply.status_code == 200, reply.text
    return check_object(reply.json())


def stream(gateway: Gateway, **fields: Any) -> Reader:
    return Reader(gateway, "POST", PATH, BODY | {"stream": True} | fields)


def follow(gateway: Gateway, id: str, after: int | None = None) -> Reader:
    rest = "" if after is None else f"&starting_after={after}"
    return Reader(gateway, "GET", f"{PATH}/{id}?stream=true{rest}")


def get(gateway: Gateway, id: str, status: int = 200, **headers: str) -> Any:
    reply = gateway.client.get(f"{PATH}/{id}", headers=headers)
    assert reply.status_code == status, reply.text
    return check_object(reply.json()) if status == 200 else reply.json()["error"]


def text_of(response: Event) -> str:
    return "".join(part["text"] for item in response["output"] for part in item.get("content", ()))


def given(gateway: Gateway, id: str, tokens: int) -> None:
    def has() -> bool:
        store = gateway.app.state.responses
        stored = store.find("", id)
        return sum(len(stored.entry.delta(at)[1].ids) for at in range(len(stored.entry.gained))) >= tokens

    until(f"{tokens} tokens of {id}", has)


def test_a_response_and_its_events_can_be_retrieved_after_every_number(start, engine):
    """RS-11"""
    gateway = start(engine)
    told = stream(gateway).all()
    final = check_order(told)
    assert final["store"] is True and final["status"] == "incomplete" and final["usage"]["output_tokens"] == 12
    assert get(gateway, final["id"]) == final
    assert follow(gateway, final["id"]).all() == told
    for event in told:
        number = event["sequence_number"]
        assert follow(gateway, final["id"], number).all() == told[number + 1 :]
    whole = created(gateway)
    assert get(gateway, whole["id"]) == whole and check_order(follow(gateway, whole["id"]).all()) == whole
    assert len(engine.submits) == 2
    assert gateway.metric("slipway_responses_bytes") > 0


def test_a_stream_resumes_in_another_gateway_with_the_exact_rest(start, engine, tmp_path):
    """RS-11: the gateway shuts down during a stream; the next one sends the same event numbers, however tokens are
    split"""
    engine.holding = True
    one = start(engine)
    reader = stream(one, background=True)
    until("it runs", lambda: len(engine.open) == 1)
    engine.give(5)
    until("events", lambda: len(reader.events) > 6)
    id = reader.events[0]["response"]["id"]
    given(one, id, 5)
    one.stop()
    seen = [event for event in reader.all() if event.get("type")]
    assert "error" in read_events(reader.text)[-1], "a stream that is let go says so, and not that its response ended"
    engine.cached = 2
    two = start(engine)
    until("it runs again by itself", lambda: len(engine.submits) == 2 and len(engine.open) == 1)
    assert len(engine.submits[1].emitted) == 5 and engine.submits[1].sampling == engine.submits[0].sampling
    rest = follow(two, id, seen[-1]["sequence_number"])
    engine.give(7)
    whole = seen + rest.all()
    final = check_order(whole)
    assert final["usage"]["output_tokens"] == 12 and get(two, id) == final
    assert follow(two, id).all() == whole
    undisturbed = check_order(follow(two, stream_whole(two, engine)["id"]).all())
    assert text_of(undisturbed) == text_of(final)


def stream_whole(gateway: Gateway, engine: FakeEngine) -> Event:
    engine.holding = False
    return created(gateway)


def test_a_log_that_lost_its_end_is_generated_again_into_the_same_events(start, engine, tmp_path):
    """RS-11: the tokens are also split differently"""
    engine.holding = True
    one = start(engine)
    reader = stream(one, background=True)
    until("it runs", lambda: len(engine.open) == 1)
    until("the first event", lambda: reader.events)
    for tokens in range(1, 13):
        engine.give()
        given(one, reader.events[0]["response"]["id"], tokens)
    told = reader.all()
    id = told[0]["response"]["id"]
    one.stop()
    log = tmp_path / "r"
    records = unframed(log.read_bytes()).records
    assert len(records) >= 14
    log.write_bytes(b"".join(map(framed, records[:4])))
    engine.holding = False
    two = start(engine)
    until("it is over again", lambda: get(two, id)["status"] == "incomplete")
    again = follow(two, id).all()
    assert again[:-1] == told[:-1] and check_order(again)["output"] == told[-1]["response"]["output"]
    assert 1 <= len(engine.submits[1].emitted) <= 3


def test_an_engine_crash_during_a_response_is_invisible_to_the_client(start, engine):
    """RS-14"""
    engine.holding = True
    gateway = start(engine)
    reader = stream(gateway)
    until("it runs", lambda: len(engine.open) == 1)
    engine.give(4)
    until("events", lambda: len(reader.events) > 5)
    engine.die()
    engine.start()
    until("another engine has it", lambda: len(engine.open) == 1)
    engine.give(8)
    final = check_order(reader.all())
    assert final["status"] == "incomplete" and final["usage"]["output_tokens"] == 12


def test_a_response_in_the_background_is_polled_to_its_end(start, engine):
    """RS-12, RSP-02"""
    engine.holding = True
    gateway = start(engine)
    first = created(gateway, background=True)
    assert first["status"] == "queued" and first["background"] is True and first["output"] == []
    until("it runs", lambda: len(engine.open) == 1)
    assert get(gateway, first["id"])["status"] == "queued"
    engine.give(3)
    until("progress", lambda: get(gateway, first["id"])["status"] == "in_progress")
    until("text", lambda: text_of(get(gateway, first["id"])))
    engine.give(9)
    until("its end", lambda: get(gateway, first["id"])["status"] == "incomplete")
    told = follow(gateway, first["id"]).all()
    assert [event["type"] for event in told[:3]] == ["response.created", "response.queued", "response.in_progress"]
    assert check_order(told) == get(gateway, first["id"])
    assert gateway.metric("slipway_open_requests") == 0


def test_a_response_that_is_cancelled_stops_and_keeps_what_it_had(start, engine):
    """RS-12, RSP-02"""
    engine.holding = True
    gateway = start(engine)
    id = created(gateway, background=True)["id"]
    until("it runs", lambda: len(engine.open) == 1)
    reader = follow(gateway, id)
    engine.give(4)
    given(gateway, id, 4)
    reply = gateway.client.post(f"{PATH}/{id}/cancel")
    assert reply.status_code == 200
    cancelled = check_object(reply.json())
    assert cancelled["status"] == "cancelled" and cancelled["usage"]["output_tokens"] == 4
    until("the engine is free", lambda: not engine.open)
    assert get(gateway, id) == cancelled == check_order(reader.all()) == check_order(follow(gateway, id).all())
    assert gateway.client.post(f"{PATH}/{id}/cancel").json() == cancelled
    assert gateway.metric("slipway_requests_total", finished_reason="abort") == 1
    engine.holding = False
    done = created(gateway)["id"]
    error = gateway.client.post(f"{PATH}/{done}/cancel")
    assert error.status_code == 400 and error.json()["error"]["message"] == "Cannot cancel a synchronous response."
    assert error.json()["error"]["type"] == "invalid_request_error"
    missing = gateway.client.post(f"{PATH}/resp_none/cancel")
    assert missing.status_code == 404 and "Response with id 'resp_none' not found." in missing.text


def test_deleted_responses_are_gone(start, engine):
    gateway = start(engine)
    id = created(gateway)["id"]
    reply = gateway.client.delete(f"{PATH}/{id}")
    assert reply.json() == {"id": id, "object": "response", "deleted": True}
    assert get(gateway, id, 404)["param"] == "response_id"
    assert gateway.client.delete(f"{PATH}/{id}").status_code == 404
    assert gateway.client.get(f"{PATH}/{id}/input_items").status_code == 404
    chained = gateway.client.post(PATH, json=BODY | {"previous_response_id": id})
    assert chained.status_code == 404 and chained.json()["error"]["param"] == "previous_response_id"
    engine.holding = True
    running = created(gateway, background=True)["id"]
    until("it runs", lambda: len(engine.open) == 1)
    reader = follow(gateway, running)
    until("it is followed", lambda: len(reader.events) == 2)
    assert gateway.client.delete(f"{PATH}/{running}").status_code == 200
    until("the engine is free", lambda: not engine.open)
    assert "was deleted" in reader.all()[-1]["error"]["message"]
    gateway.stop()
    again = start(engine)
    assert get(again, id, 404) and get(again, running, 404)


def test_a_chain_carries_items_and_no_instructions(start, engine):
    """RS-13"""
    gateway = start(engine)
    first = created(gateway, instructions="Be short", input="one")
    second = created(gateway, input="two", previous_response_id=first["id"])
    third = created(gateway, input="three", previous_response_id=second["id"], store=False)
    prompts = [gateway.service.tokenizer.decode(list(s.prompt), skip_special_tokens=False) for s in engine.submits]
    assert "Be short" in prompts[0] and "Be short" not in prompts[1]
    assert prompts[1].count("<|im_start|>user") == 2 and prompts[2].count("<|im_start|>user") == 3
    assert text_of(first) in prompts[1] and text_of(second) in prompts[2]
    assert third["previous_response_id"] == second["id"] and third["store"] is False
    assert get(gateway, third["id"], 404)
    by_hand = [
        {"role": "user", "content": "one"}, *first["output"], {"role": "user", "content": "two"}, *second["output"],
        {"role": "user", "content": "three"},
    ]  # fmt: skip
    created(gateway, input=by_hand, store=False)
    assert engine.submits[-1].prompt == engine.submits[2].prompt
    gateway.client.delete(f"{PATH}/{first['id']}")
    assert created(gateway, input="three", previous_response_id=second["id"]), "a chain has all of its items"


def test_an_unfinished_response_cannot_be_continued(start, engine):
    engine.holding = True
    gateway = start(engine)
    id = created(gateway, background=True)["id"]
    reply = gateway.client.post(PATH, json=BODY | {"previous_response_id": id})
    assert reply.status_code == 400 and "is not finished" in reply.json()["error"]["message"]
    gateway.client.post(f"{PATH}/{id}/cancel")
    engine.holding = False
    created(gateway, previous_response_id=id)


def test_input_items_are_listed_in_pages_and_referred_to(start, engine):
    gateway = start(engine)
    texts = ["one", "two", "three"]
    first = created(gateway, input=[{"role": "user", "content": text} for text in texts])
    second = created(gateway, input="four", previous_response_id=first["id"])
    client = openai.OpenAI(api_key="none", base_url=f"{gateway.url}/v1")

    def listed(**fields: Any) -> list[str]:
        page = client.responses.input_items.list(second["id"], **fields)
        return [item.content[0].text for item in page]

    every = listed(order="asc")
    assert every[:3] == texts and every[4:] == ["four"] and every[3] == text_of(first)
    assert listed() == every[::-1]
    assert listed(order="asc", limit=2) == every  # the client asks for further pages by itself
    page = gateway.client.get(f"{PATH}/{second['id']}/input_items?limit=2&order=asc").json()
    assert page["has_more"] and page["last_id"] == page["data"][-1]["id"] and len(page["data"]) == 2
    for query in ("limit=0", "limit=101", "order=up", "after=nothing"):
        assert gateway.client.get(f"{PATH}/{second['id']}/input_items?{query}").status_code == 400
    reference = {"type": "item_reference", "id": page["data"][0]["id"]}
    made = {"type": "item_reference", "id": first["output"][0]["id"]}
    created(gateway, input=[reference, made, {"role": "user", "content": "go"}])
    prompt = gateway.service.tokenizer.decode(list(engine.submits[-1].prompt))
    assert "one" in prompt and text_of(first) in prompt and "two" not in prompt


def test_another_key_finds_nothing(start, engine):
    gateway = start(engine, keys=["alice", "bob"])
    alice, bob = ({"authorization": f"Bearer {name}"} for name in ("alice", "bob"))
    reply = gateway.client.post(PATH, json=BODY, headers=alice)
    id, item = reply.json()["id"], reply.json()["output"][0]["id"]
    assert get(gateway, id, **alice)["id"] == id
    assert get(gateway, id, **{"x-api-key": "alice"})["id"] == id
    for method, path in (
        ("GET", ""),
        ("DELETE", ""),
        ("POST", "/cancel"),
        ("GET", "/input_items"),
        ("GET", "?stream=true"),
    ):
        assert gateway.client.request(method, f"{PATH}/{id}{path}", headers=bob).status_code == 404, (method, path)
    for body in ({"previous_response_id": id}, {"input": [{"type": "item_reference", "id": item}]}):
        assert gateway.client.post(PATH, json=BODY | body, headers=bob).status_code in (400, 404)
    assert get(gateway, id, **alice)["id"] == id


def test_the_store_survives_gateways_and_other_models(start, engine):
    """RS-11, RS-13"""
    one = start(engine)
    told = stream(one, metadata={"a": "b"}).all()
    final = check_order(told)
    one.stop()
    two = start(engine)
    assert get(two, final["id"]) == final and follow(two, final["id"], 3).all() == told[4:]
    created(two, previous_response_id=final["id"])
    two.stop()
    three = start(engine, outputs_sha256="another")
    assert get(three, final["id"]) == final
    refused = three.client.get(f"{PATH}/{final['id']}?stream=true")
    assert refused.status_code == 400 and "has changed" in refused.json()["error"]["message"]
    created(three, previous_response_id=final["id"])


def test_bounds_forget_the_oldest(start, engine):
    gateway = start(engine, **{"endpoints.responses.count": 3})
    ids = [created(gateway)["id"] for _ in range(5)]
    found = [gateway.client.get(f"{PATH}/{id}").status_code for id in ids]
    assert found == [404, 404, 200, 200, 200]
    gateway.stop()
    gateway = start(engine, **{"endpoints.responses.count": 3})
    assert [gateway.client.get(f"{PATH}/{id}").status_code for id in ids] == found
    gateway.stop()
    old = start(engine, **{"endpoints.responses.keep": 0.001})
    assert [old.client.get(f"{PATH}/{id}").status_code for id in ids] == [404] * 5
    old.stop()
    small = start(engine, store="s", **{"endpoints.responses.size": 12_000})
    ids = [created(small)["id"] for _ in range(9)]
    found = [small.client.get(f"{PATH}/{id}").status_code for id in ids]
    assert found[0] == 404 and found[-1] == 200 and found == sorted(found, reverse=True)


def test_a_store_that_is_full_of_running_ones_keeps_no_more(start, engine):
    engine.holding = True
    gateway = start(engine, **{"endpoints.responses.count": 1})
    created(gateway, background=True)
    until("it runs", lambda: len(engine.open) == 1)
    refused = gateway.client.post(PATH, json=BODY | {"background": True})
    assert refused.status_code == 503 and refused.headers["retry-after"]
    until("what was refused is free", lambda: len(engine.open) == 1)
    reader = stream(gateway)
    until("it runs too", lambda: len(engine.open) == 2)
    engine.give(12)
    final = check_order(reader.all())
    assert final["store"] is False and get(gateway, final["id"], 404)


def test_a_disconnected_client_frees_the_engine_and_can_resume(start, engine):
    """RSP-01"""
    engine.holding = True
    gateway = start(engine)
    reader = stream(gateway)
    until("it runs", lambda: len(engine.open) == 1)
    engine.give(4)
    until("events", lambda: len(reader.events) > 5)
    reader.left.set()
    engine.give(1)
    until("the engine is free", lambda: not engine.open)
    seen = reader.all()
    id = seen[0]["response"]["id"]
    until("nobody holds the service", lambda: gateway.metric("slipway_open_requests") == 0)
    rest = follow(gateway, id, seen[-1]["sequence_number"])
    until("it runs again", lambda: len(engine.open) == 1)
    engine.give(9)
    assert check_order(seen + rest.all())["usage"]["output_tokens"] == 12


def test_a_stream_that_its_client_leaves_is_counted_once(start, engine):
    """OBS-01 aborted; a resumed response is not counted again"""
    engine.holding = True
    gateway = start(engine)

    def count(reason: str) -> float:
        samples = gateway.samples().items()
        names = {"slipway_requests_total", "vllm:request_success_total"}
        found = [value for (name, own), value in samples if name in names and dict(own)["finished_reason"] == reason]
        return max(found, default=0.0)

    reader = stream(gateway)
    until("it runs", lambda: len(engine.open) == 1)
    engine.give(4)
    until("events", lambda: len(reader.events) > 5)
    reader.left.set()
    engine.give(1)
    until("the engine is free", lambda: not engine.open)
    until("it is counted", lambda: count("abort") == 1)
    assert gateway.metric("vllm:request_params_n_count") == 1
    id = reader.all()[0]["response"]["id"]
    rest = follow(gateway, id)
    until("it runs again", lambda: len(engine.open) == 1)
    engine.give(9)
    assert rest.all()[-1]["type"] == "response.incomplete"
    assert (count("abort"), count("length"), gateway.metric("vllm:request_params_n_count")) == (1, 0, 1)


def test_a_client_that_leaves_before_its_whole_reply_frees_the_engine(start, engine):
    """RSP-01"""
    engine.holding = True
    gateway = start(engine)
    with pytest.raises(httpx.ReadTimeout):
        gateway.client.post(PATH, json=BODY, timeout=0.2)
    until("the engine is free", lambda: len(engine.submits) == 1 and not engine.open)


def test_whole_replies_one_after_the_other_are_all_written_down(start, engine):
    gateway = start(engine)
    for _ in range(20):
        assert created(gateway)["status"] == "incomplete"


def test_items_that_come_again_are_listed_once_each(start, engine):
    gateway = start(engine)
    first = created(gateway)
    second = created(gateway, previous_response_id=first["id"], input=[*first["output"], *first["output"]])
    client = openai.OpenAI(api_key="none", base_url=f"{gateway.url}/v1")
    items = list(client.responses.input_items.list(second["id"], limit=1))
    assert len(items) == len({item.id for item in items}) == 4


def test_numbers_that_json_cannot_tell_back_are_refused(start, engine):
    """ER-20"""
    tool = {"type": "function", "name": "f", "parameters": {"type": "object", "maxProperties": 2**80}}
    reply = start(engine).client.post(PATH, json=BODY | {"tools": [tool]})
    assert reply.status_code == 400 and reply.json()["error"]["type"] == "invalid_request_error"


def test_whoever_asks_for_a_response_that_was_left_has_it_generated(start, engine):
    engine.holding = True
    gateway = start(engine, **{"lifecycle.journal.linger": 60.0})
    reader = stream(gateway)
    until("it runs", lambda: len(engine.open) == 1)
    engine.give(2)
    until("events", lambda: len(reader.events) > 4)
    id = reader.events[0]["response"]["id"]
    reader.left.set()
    engine.give(1)
    until("the engine is free", lambda: not engine.open)
    assert get(gateway, id)["status"] == "in_progress"
    until("it runs again", lambda: len(engine.open) == 1)
    engine.give(11)
    until("its end", lambda: get(gateway, id)["status"] == "incomplete")


def test_a_background_response_that_fails_is_kept_as_failed(start, engine):
    """RS-14"""
    engine.refusal = Failed("", "step", "the model gave no usable logits")
    gateway = start(engine)
    id = created(gateway, background=True)["id"]
    until("it failed", lambda: get(gateway, id)["status"] == "failed")
    final = get(gateway, id)
    assert final["error"]["code"] == "server_error" and final["usage"]["output_tokens"] == 0
    assert check_order(follow(gateway, id).all()) == final
    whole = gateway.client.post(PATH, json=BODY)
    assert whole.status_code == 500 and "logits" not in whole.text
    gateway.stop()
    assert get(start(engine), id) == final


def test_an_idempotency_key_is_one_response(start, engine):
    gateway = start(engine)
    headers = {"Idempotency_Key": "k"}
    told = Reader(gateway, "POST", PATH, BODY | {"stream": True}, **headers)
    events = told.all()
    assert "\nid: 3\n" in told.text
    key = {"Idempotency-Key": "k"}
    again = gateway.client.post(PATH, json=BODY, headers=key)
    assert again.json() == events[-1]["response"] and again.headers["idempotent-replayed"] == "true"
    rest = Reader(gateway, "POST", PATH, BODY | {"stream": True}, Last_Event_ID="4", **headers)
    assert rest.all() == events[5:]
    assert gateway.client.post(PATH, json=BODY | {"input": "x"}, headers=key).status_code == 422
    assert gateway.client.post(PATH, json=BODY, headers={"Last-Event-ID": "4"}).status_code == 400
    assert len(engine.submits) == 1
    assert get(gateway, again.json()["id"]) == again.json()
    hidden = gateway.client.post(PATH, json=BODY | {"store": False}, headers={"Idempotency-Key": "h"}).json()
    assert hidden["store"] is False and get(gateway, hidden["id"], 404)


def test_client_ids_are_used_unless_they_exist(start, engine):
    gateway = start(engine)
    reply = [gateway.client.post(PATH, json=BODY, headers={"X-Request-Id": "mine"}).json()["id"] for _ in range(2)]
    assert reply[0] == "resp_mine" and reply[1] != "resp_mine"
    assert gateway.client.post(PATH, json=BODY, headers={"X-Request-Id": "a/b"}).json()["id"] != "resp_a/b"
    assert created(gateway, request_id="resp_other")["id"] == "resp_other"
    assert gateway.client.post(PATH, json=BODY | {"request_id": "resp_other"}).status_code == 400
    why = gateway.client.get("/v1/requests/resp_mine/why")
    assert why.status_code == 200 and why.json()["choices"]


def test_without_a_store_nothing_is_kept(start, engine):
    gateway = start(engine, store="")
    reply = created(gateway)
    assert reply["store"] is False
    assert "endpoints.responses.keep" in get(gateway, reply["id"], 404)["message"]
    background = gateway.client.post(PATH, json=BODY | {"background": True})
    assert background.status_code == 400 and background.json()["error"]["param"] == "background"


def test_background_needs_store(start, engine):
    gateway = start(engine)
    reply = gateway.client.post(PATH, json=BODY | {"background": True, "store": False})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "background"
    assert gateway.client.get(f"{PATH}/x?starting_after=3").status_code == 404
    id = created(gateway)["id"]
    for query in ("starting_after=3", "stream=true&starting_after=x"):
        assert gateway.client.get(f"{PATH}/{id}?{query}").status_code == 400


def test_the_official_client_does_it_all(start, engine):
    """RS-11, RS-12"""
    gateway = start(engine)
    client = openai.OpenAI(api_key="none", base_url=f"{gateway.url}/v1")
    reply = client.responses.create(model="tiny", input="hello", max_output_tokens=12)
    assert client.responses.retrieve(reply.id).to_dict() == reply.to_dict()
    events = list(client.responses.retrieve(reply.id, stream=True))
    rest = list(client.responses.retrieve(reply.id, stream=True, starting_after=4))
    assert [event.to_dict() for event in rest] == [event.to_dict() for event in events][5:]
    counted = client.responses.input_tokens.count(model="tiny", input="hello")
    assert counted.input_tokens == reply.usage.input_tokens
    engine.holding = True
    background = client.responses.create(model="tiny", input="hello", background=True, max_output_tokens=12)
    assert background.status == "queued"
    assert client.responses.cancel(background.id).status == "cancelled"
    client.responses.delete(reply.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(reply.id)


def test_many_at_once_keep_apart(start, engine):
    gateway = start(engine)

    async def work() -> list[Any]:
        async with openai.AsyncOpenAI(api_key="none", base_url=f"{gateway.url}/v1") as client:
            made = [client.responses.create(model="tiny", input=f"n {at}", max_output_tokens=5 + at) for at in range(8)]
            return [reply.to_dict() for reply in await asyncio.gather(*made)]

    replies = asyncio.run(work())
    assert [reply["usage"]["output_tokens"] for reply in replies] == list(range(5, 13))
    assert all(get(gateway, reply["id"]) == reply for reply in replies)


def test_a_resumed_response_keeps_its_prompt(start, engine, tmp_path):
    """A template that renders differently each time, like templates that insert the time"""
    template = tmp_path / "template"
    template.write_text("{{ 'hello ' * (range(1, 500) | random) }}{{ messages[0].content }}")
    engine.holding = True
    one = start(engine, chat_template=str(template))
    id = created(one, background=True)["id"]
    until("it runs", lambda: len(engine.open) == 1)
    engine.give(2)
    given(one, id, 2)
    one.stop()
    two = start(engine, chat_template=str(template))
    until("it runs again", lambda: len(engine.submits) == 2 and len(engine.open) == 1)
    engine.give(10)
    until("its end", lambda: get(two, id)["status"] == "incomplete")
    assert engine.submits[0].prompt == engine.submits[1].prompt
    assert get(two, id)["usage"]["input_tokens"] == len(engine.submits[0].prompt)
