"""The Responses API of the demo model, as the official client uses it: tools, schemas, chains, the background; streams
that engine and gateway are killed under."""

import json
import os
import signal
import time

import httpx
import openai
import pytest
from pydantic import BaseModel, Field

from tests.appliance.server.http.responses.order import Order, check_order, read_events

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
LONG = {
    "model": "demo",
    "input": "Tell me",
    "ignore_eos": True,
    "max_output_tokens": 300,
    "temperature": 1.0,
    "seed": 5,
}


class Person(BaseModel):
    name: str = Field(max_length=12)  # at any temperature the reply must end
    age: int = Field(ge=0, le=120)


@pytest.fixture(scope="module")
def appliance(demo):
    return demo


@pytest.fixture(scope="module")
def own(launch):
    """A service whose programs are killed."""
    appliance = launch()
    appliance.wait_ready()
    return appliance


@pytest.fixture(scope="module")
def client(appliance):
    with openai.OpenAI(api_key="none", base_url=f"{appliance.url}/v1", timeout=60, max_retries=5) as client:
        yield client


def text_of(response):
    return "".join(part["text"] for item in response["output"] for part in item.get("content", ()))


@pytest.fixture(scope="module")
def undisturbed(appliance):
    """The text of LONG."""
    reply = appliance.client.post("/v1/responses", json=LONG).json()
    assert reply["usage"]["output_tokens"] == 300
    return text_of(reply)


@pytest.mark.parametrize("chained", [True, False])
def test_the_right_tool_is_called_and_its_result_is_told(client, chained):
    """RS-17: a stream with a call, its result sent by previous_response_id or with all items, the final answer"""
    question = {"role": "user", "content": "What is the weather in Oslo?"}
    with client.responses.stream(model="demo", input=[question], tools=[WEATHER], temperature=0) as stream:
        names = [event.type for event in stream]
        first = stream.get_final_response()
    assert names[:2] == ["response.created", "response.in_progress"] and names[-1] == "response.completed"
    (call,) = [item for item in first.output if item.type == "function_call"]
    assert call.name == "get_weather" and json.loads(call.arguments) == {"city": "Oslo"}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": '{"temperature": 7, "sky": "rain"}'}
    if chained:
        asked = {"input": [result], "previous_response_id": first.id}
    else:
        history = [item.model_dump(exclude={"parsed_arguments"}, exclude_none=True) for item in first.output]
        asked = {"input": [question, *history, result]}
    final = client.responses.create(model="demo", tools=[WEATHER], temperature=0, **asked)
    assert final.status == "completed" and not [item for item in final.output if item.type == "function_call"]
    assert "7" in final.output_text or "rain" in final.output_text.lower()


SEEDED = {"temperature": 1.0, "extra_body": {"seed": 5}}  # some draws never end their white space


def test_a_schema_is_parsed(client):
    reply = client.responses.parse(model="demo", input="Make up a person", text_format=Person, **SEEDED)
    assert isinstance(reply.output_parsed, Person)
    with client.responses.stream(model="demo", input="A person", text_format=Person, **SEEDED) as stream:
        done = [event.parsed for event in stream if event.type == "response.output_text.done"]
        assert stream.get_final_response().output_parsed == done[0]


def test_a_partial_reply_is_continued(client, appliance):
    """RS-15"""
    asked = {"model": "demo", "temperature": 0, "reasoning": {"effort": "none"}}
    question = {"role": "user", "content": "What is the weather in Oslo?"}
    whole = client.responses.create(input=[question], **asked).output_text
    begun = {"type": "message", "role": "assistant", "status": "incomplete", "content": whole[: len(whole) // 2]}
    rest = client.responses.create(input=[question, begun], **asked)
    assert rest.output_text and rest.output[0].type == "message"


def test_the_background_is_polled_followed_and_cancelled(client):
    """RS-12"""
    short = {**LONG, "max_output_tokens": 40}
    extra = {name: short.pop(name) for name in ("ignore_eos", "seed")}
    reply = client.responses.create(**short, background=True, extra_body=extra)
    assert reply.status == "queued"
    deadline = time.monotonic() + 100
    while (now := client.responses.retrieve(reply.id)).status in ("queued", "in_progress"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert now.status == "incomplete" and now.usage.output_tokens == 40
    longer = client.responses.create(**short | {"max_output_tokens": 1500}, background=True, extra_body=extra)
    events = client.responses.retrieve(longer.id, stream=True)
    assert next(event for event in events if event.type == "response.output_text.delta").delta
    assert client.responses.cancel(longer.id).status == "cancelled"
    assert list(events)[-1].response.status == "cancelled"
    client.responses.delete(longer.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(longer.id)


@pytest.mark.nightly("tests/e2e/test_survive.py::test_no_request_notices_that_its_engine_was_killed")
def test_an_engine_killed_under_a_stream_is_not_noticed(own, undisturbed):
    """RS-14"""
    text, killed = "", False
    with own.client.stream("POST", "/v1/responses", json=LONG | {"stream": True}) as reply:
        for piece in reply.iter_text():
            text += piece
            if not killed and text.count("output_text.delta") > 20:
                os.kill(own.pids()["engine-0"], signal.SIGKILL)
                killed = True
    final = check_order(read_events(text))
    assert killed and text_of(final) == undisturbed
    own.wait_ready()


@pytest.mark.nightly("tests/e2e/test_sourced.py::test_a_reply_with_a_key_goes_on_in_another_gateway")
def test_a_gateway_killed_under_a_stream_tells_the_exact_rest(own, undisturbed, eventually):
    """RS-11"""
    order, text, killed = Order(), "", own.pids()["gateway"]
    with httpx.Client(base_url=own.url, timeout=60) as http:
        try:
            with http.stream("POST", "/v1/responses", json=LONG | {"stream": True, "background": True}) as reply:
                for piece in reply.iter_text():
                    text += piece
                    if text.count("output_text.delta") > 40 and killed:
                        os.kill(killed, signal.SIGKILL)
                        killed = 0
        except httpx.TransportError:
            pass
    assert not killed
    seen = read_events(text[: text.rindex("\n\n") + 2])
    for event in seen:
        order.take(event)
    assert order.response is None, "the kill came too late"
    own.wait_ready()
    path = f"/v1/responses/{order.id}?stream=true&starting_after={order.number - 1}"
    for event in read_events(own.client.get(path).text):
        order.take(event)
    assert order.response["status"] == "incomplete" and text_of(order.response) == undisturbed
    assert own.client.get(f"/v1/responses/{order.id}").json() == order.response
    eventually("nothing is under way", lambda: own.metric("slipway_open_requests") == 0)
