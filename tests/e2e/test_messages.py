"""The demo service over /v1/messages, asked by the official anthropic client over a real socket."""

import json

import anthropic
import httpx
import jsonschema
import pytest

from tests.appliance.server.http.anthropic.order import assembled, records

QUESTION = [{"role": "user", "content": "What is 17 + 25?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "Get the weather of a city", "input_schema": SCHEMA}
OSLO = {"role": "user", "content": "What is the weather in Oslo?"}
GREEDY = {"temperature": 0}


@pytest.fixture(scope="module")
def client(demo):
    with anthropic.Anthropic(base_url=demo.url, api_key="none", max_retries=0) as client:
        yield client


def whole_prompt(usage):
    """Return the total prompt tokens: uncached, written to the cache and read from the cache."""
    return usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens


def create(client, **fields):
    return client.messages.create(**{"model": "demo", "max_tokens": 200, "extra_body": GREEDY, **fields})


def test_the_demo_model_answers_a_message(client):
    """ANT-01"""
    message = create(client, messages=QUESTION)
    assert "42" in message.content[0].text and message.stop_reason == "end_turn"
    counted = client.messages.count_tokens(model="demo", messages=QUESTION).input_tokens
    usage = message.usage
    assert counted == whole_prompt(usage) > 0 and usage.output_tokens > 10


@pytest.mark.parametrize("thinking", [{"type": "disabled"}, {"type": "adaptive"}])
def test_a_stream_is_the_whole_message_in_order(demo, client, thinking):
    """AN-01 AN-02 AN-04: by the client's helper and by an order of our own."""
    fields = {"messages": QUESTION, "thinking": thinking}
    whole = create(client, **fields)
    with client.messages.stream(model="demo", max_tokens=200, extra_body=GREEDY, **fields) as stream:
        streamed = stream.get_final_message()
    body = {"model": "demo", "max_tokens": 200, "stream": True, **GREEDY, **fields}
    reply = demo.client.post("/v1/messages", json=body, headers={"anthropic-version": "2023-06-01"})
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    ours = assembled(records(reply.text))
    assert [block.model_dump() for block in streamed.content] == [block.model_dump() for block in whole.content]
    assert [block["type"] for block in ours["content"]] == [block.type for block in whole.content]
    kinds = ["thinking", "text"] if thinking["type"] == "adaptive" else ["text"]
    assert [block.type for block in whole.content] == kinds and "42" in whole.content[-1].text


def test_a_tool_is_called_and_its_result_answered(client):
    """AN-03 AN-09: the loop of an agent, streamed."""
    turns = [OSLO]
    for _ in range(3):
        with client.messages.stream(
            model="demo", max_tokens=200, messages=turns, tools=[WEATHER], extra_body=GREEDY
        ) as stream:
            message = stream.get_final_message()
        turns.append({"role": "assistant", "content": message.content})
        if message.stop_reason != "tool_use":
            break
        (call,) = [block for block in message.content if block.type == "tool_use"]
        assert (call.name, call.input) == ("get_weather", {"city": "Oslo"})
        result = json.dumps({"temperature": 7, "sky": "rain"})
        turns.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": result}]})
    assert len(turns) == 4, "one call, one result, one answer"
    assert message.stop_reason == "end_turn" and "7" in message.content[0].text


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_forced_call_stops_for_its_use(client, choice):
    message = create(client, messages=[OSLO], tools=[WEATHER], tool_choice=choice)
    assert [block.type for block in message.content] == ["tool_use"] and message.stop_reason == "tool_use"
    assert message.content[0].input == {"city": "Oslo"}


def test_a_schema_holds_even_at_high_temperature(client):
    """SO-01"""
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    for seed in range(3):
        message = create(
            client,
            messages=[{"role": "user", "content": "Give me a person."}],
            output_config={"format": {"type": "json_schema", "schema": schema}},
            extra_body={"temperature": 1.5, "seed": seed},
        )
        if message.stop_reason == "end_turn":
            jsonschema.validate(json.loads(message.content[0].text), schema)


def test_a_prefill_is_gone_on_with_and_a_stop_sequence_ends_it(client):
    """AN-08"""
    turns = [*QUESTION, {"role": "assistant", "content": "17 + 25: 7 + 5 = 12, 1 + 2 + 1 = 4. 17 + 25 ="}]
    message = create(client, messages=turns)
    assert message.content[0].text.strip() == "42"
    message = create(client, messages=QUESTION, stop_sequences=["= 12"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "= 12")
    assert message.content[0].text.endswith("7 + 5 ")


def test_a_repeated_prompt_is_read_from_the_cache_and_counted(client):
    """AN-02 AN-10: start is the whole prompt; the end parts it."""
    system = "Remember these words: " + " ".join(f"word{number}" for number in range(60))
    fields = {"system": system, "messages": QUESTION, "tools": [WEATHER]}
    counted = client.messages.count_tokens(model="demo", **fields).input_tokens
    reads, writes = [], []
    for _ in range(2):
        events = list(create(client, stream=True, **fields))
        start = events[0].message.usage.input_tokens
        end = next(event.usage for event in events if event.type == "message_delta")
        assert start == counted == whole_prompt(end)
        reads.append(end.cache_read_input_tokens)
        writes.append(end.cache_creation_input_tokens)
    assert reads[0] < reads[1] and reads[1] > counted / 2
    assert writes[0] > counted / 2 and writes[1] == 0 and reads[1] >= reads[0] + writes[0] - 1


def test_a_client_that_leaves_a_stream_frees_it(demo, eventually):
    """ER-16"""
    body = {"model": "demo", "max_tokens": 1500, "stream": True, "temperature": 1.5, "messages": QUESTION}
    body["stop_sequences"] = []
    with httpx.Client(base_url=demo.url, timeout=60) as http, http.stream("POST", "/v1/messages", json=body) as reply:
        assert next(reply.iter_lines()) == "event: message_start"
    eventually("no open request", lambda: demo.client.get("/load").json() == {"server_load": 0})


def test_mistakes_have_anthropics_shape(client):
    """AN-12"""
    with pytest.raises(anthropic.NotFoundError) as unknown:
        client.messages.create(model="claude", max_tokens=5, messages=QUESTION)
    assert unknown.value.type == "not_found_error" and unknown.value.request_id
    with pytest.raises(anthropic.BadRequestError) as wrong:
        create(client, messages=QUESTION, max_tokens=5000)
    assert wrong.value.type == "invalid_request_error" and "max_tokens" in wrong.value.message
