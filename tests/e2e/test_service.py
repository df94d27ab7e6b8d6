"""The demo service, asked by the official openai client and by plain HTTP, over a real socket."""

import contextlib
import json
import threading

import httpx
import jsonschema
import openai
import pytest

from appliance.cli.main import main
from tests.tiers import thinned

QUESTION = [{"role": "user", "content": "What is 17 + 25?"}]
LONG = {"model": "demo", "prompt": "a", "max_tokens": 1500, "ignore_eos": True, "temperature": 1.0}


@pytest.fixture(scope="module")
def client(demo):
    with openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_demo_model_adds_in_a_stream(client):
    stream = client.chat.completions.create(model="demo", messages=QUESTION, stream=True, temperature=0)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert "42" in text


def test_stream_and_whole_reply_agree(client):
    arguments = {"model": "demo", "messages": QUESTION, "temperature": 0}
    whole = client.chat.completions.create(**arguments)
    with client.chat.completions.stream(**arguments, stream_options={"include_usage": True}) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason == "stop"
    assert final.usage.completion_tokens == whole.usage.completion_tokens > 0


def test_thinking_comes_as_reasoning(client):
    reply = client.chat.completions.create(
        model="demo", messages=QUESTION, temperature=0, extra_body={"chat_template_kwargs": {"enable_thinking": True}}
    )
    message = reply.choices[0].message
    assert message.reasoning and "42" in message.content
    assert "<think>" not in message.content + message.reasoning


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_tool_is_called_with_its_arguments(client, choice):
    messages = [{"role": "user", "content": "What is the weather in Oslo?"}]
    reply = client.chat.completions.create(
        model="demo", messages=messages, tools=[WEATHER], tool_choice=choice, temperature=0
    )
    (call,) = reply.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Oslo"}
    assert reply.choices[0].finish_reason == ("stop" if isinstance(choice, dict) else "tool_calls")


def test_a_schema_holds_even_at_high_temperature(client):
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    for seed in range(4):
        reply = client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "Give me a person."}],
            response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": schema}},
            temperature=1.5,
            seed=seed,
            max_tokens=200,
        )
        if reply.choices[0].finish_reason == "stop":
            jsonschema.validate(json.loads(reply.choices[0].message.content), schema)


def test_the_same_seed_gives_the_same_text_beside_other_requests(client):
    arguments = {"model": "demo", "prompt": "Hello", "max_tokens": 24, "temperature": 1.0, "seed": 7}
    alone = client.completions.create(**arguments).choices[0].text
    texts = []
    threads = [
        threading.Thread(target=lambda: texts.append(client.completions.create(**arguments).choices[0].text)),
        *(
            threading.Thread(target=client.completions.create, kwargs=arguments | {"seed": seed, "prompt": "x" * seed})
            for seed in range(1, 7)
        ),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == [alone]


def test_choices_are_the_replies_to_consecutive_seeds(client):
    """SA-06 over the real engine: child i of seed s is the reply to seed s + i"""
    arguments = {"model": "demo", "prompt": "Hello", "max_tokens": 24, "temperature": 1.5}
    children = client.completions.create(**arguments, n=3, seed=40).choices
    singles = [client.completions.create(**arguments, seed=40 + index).choices[0] for index in range(3)]
    assert [(child.text, child.finish_reason) for child in children] == [
        (single.text, single.finish_reason) for single in singles
    ]
    assert len({child.text for child in children}) == 3


def test_logprobs_of_chosen_tokens_are_among_the_top(client):
    reply = client.chat.completions.create(
        model="demo", messages=QUESTION, temperature=0, logprobs=True, top_logprobs=3, max_tokens=5
    )
    for position in reply.choices[0].logprobs.content:
        assert len(position.top_logprobs) == 3
        assert position.logprob == position.top_logprobs[0].logprob


def test_models_are_listed_and_found(client):
    (model,) = client.models.list().data
    assert model.id == "demo" and client.models.retrieve("demo").id == "demo"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_tokenize_and_detokenize_invert(demo):
    text = "repeat: grün 漢字 👩‍👩‍👧 end"
    body = {"model": "demo", "prompt": text, "add_special_tokens": False}
    tokens = demo.client.post("/tokenize", json=body).json()["tokens"]
    assert demo.client.post("/detokenize", json={"model": "demo", "tokens": tokens}).json()["prompt"] == text


def test_invocations_answers_like_the_chat_route(demo):
    body = {"model": "demo", "messages": QUESTION, "temperature": 0}
    chat = demo.client.post("/v1/chat/completions", json=body).json()
    invoked = demo.client.post("/invocations", json=body).json()
    assert invoked["choices"] == chat["choices"] and invoked.keys() == chat.keys()
    assert demo.client.get("/ping").status_code == 200


def test_a_repeated_prompt_is_read_from_the_cache(demo, eventually):
    body = {"model": "demo", "prompt": "Slipway " * 60, "max_tokens": 2, "temperature": 0}
    first = demo.client.post("/v1/completions", json=body).json()
    hits = demo.metric("slipway_prefix_cache_hit_tokens_total")
    second = demo.client.post("/v1/completions", json=body).json()
    eventually("the hit is counted", lambda: demo.metric("slipway_prefix_cache_hit_tokens_total") > hits)
    was, now = (each["usage"]["prompt_tokens_details"] for each in (first, second))
    assert now["cached_tokens"] >= was["cached_tokens"] + was["cache_write_tokens"] - 1 > 0
    assert now["cache_write_tokens"] == 0
    assert first["choices"][0]["text"] == second["choices"][0]["text"]
    salted = demo.client.post("/v1/completions", json=body | {"cache_salt": "tenant"}).json()
    assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert salted["choices"][0]["text"] == first["choices"][0]["text"]


def test_a_client_that_leaves_frees_its_blocks(demo, eventually):
    with (
        httpx.Client(base_url=demo.url, timeout=60) as client,
        client.stream("POST", "/v1/completions", json=LONG | {"stream": True, "n": 2}) as reply,
    ):
        lines = reply.iter_lines()  # kept: a line iterator that is let go closes the stream
        next(lines)
        eventually("two sequences run", lambda: demo.metric("vllm:num_requests_running") == 2)
        assert demo.metric("vllm:kv_cache_usage_perc") > 0
    eventually("nothing runs", lambda: demo.metric("vllm:num_requests_running") == 0)
    eventually("no block is held", lambda: demo.metric("vllm:kv_cache_usage_perc") == 0)
    eventually("no open request", lambda: demo.client.get("/load").json()["server_load"] == 0)


BAD = [
    ("/v1/chat/completions", b"{", 400),
    ("/v1/chat/completions", b"[]", 400),
    ("/v1/chat/completions", b'{"model": "demo", "messages": []}', 400),
    ("/v1/chat/completions", b'{"model": "nope", "messages": [{"role": "user", "content": "x"}]}', 404),
    ("/v1/completions", b'{"model": "demo", "prompt": "x", "temperature": 9}', 400),
    ("/v1/completions", b'{"model": "demo", "prompt": "x", "max_tokens": "many"}', 400),
    ("/v1/completions", b'{"model": "demo", "prompt": [99999999]}', 400),
    ("/v1/completions", b'{"model": "demo", "prompt": "\\ud800"}', 400),
    ("/v1/completions", b'{"model": "demo", "prompt": "\xff"}', 400),
    ("/v1/completions", json.dumps({"model": "demo", "prompt": "1 " * 5000}).encode(), 400),
    ("/v1/completions", b'{"model": "demo", "prompt": "x", "seed": 99999999999999999999999}', 400),
    ("/v1/nothing", b"{}", 404),
]


@pytest.mark.parametrize(("path", "body", "status"), BAD)
def test_bad_input_is_refused_and_the_service_goes_on(demo, path, body, status):
    reply = demo.client.post(path, content=body, headers={"content-type": "application/json"})
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert error["code"] == status and error["message"]
    good = demo.client.post("/v1/completions", json={"model": "demo", "prompt": "x", "max_tokens": 1})
    assert good.status_code == 200


@pytest.mark.parametrize("clients", thinned([50, 200], kept=[50]))
def test_impatient_clients_leave_the_service_well(demo, eventually, clients):
    """ER-18"""

    def impatient() -> None:
        with httpx.Client(base_url=demo.url, timeout=0.5) as client, contextlib.suppress(httpx.TimeoutException):
            client.post("/v1/completions", json=LONG)

    threads = [threading.Thread(target=impatient) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reply = demo.client.post("/v1/completions", json={"model": "demo", "prompt": "x", "max_tokens": 4})
    assert reply.status_code == 200
    eventually("nothing runs", lambda: demo.metric("vllm:num_requests_running") == 0)


def test_the_stream_of_records_is_what_clients_expect(demo, records):
    body = {"model": "demo", "messages": QUESTION, "stream": True, "stream_options": {"include_usage": True}, "n": 2}
    reply = demo.client.post("/v1/chat/completions", json=body | {"temperature": 0.7, "seed": 1})
    assert reply.headers["content-type"].startswith("text/event-stream")
    chunks = records(reply.text)
    assert [chunk["choices"][0]["index"] for chunk in chunks[:2]] == [0, 1]
    assert all(chunk["choices"][0]["delta"]["role"] == "assistant" for chunk in chunks[:2])
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] > 0
    ends = [chunk["choices"][0]["index"] for chunk in chunks[:-1] if chunk["choices"][0].get("finish_reason")]
    assert sorted(ends) == [0, 1]


def test_every_example_of_the_description_is_answered(demo):
    paths = httpx.get(f"{demo.url}/openapi.json").json()["paths"]
    found = {
        path.format(name="demo", version="1"): each["post"]["requestBody"]["content"]["application/json"]["example"]
        for path, each in paths.items()
        if "requestBody" in each.get("post", {})
    }
    assert len(found) == 16
    replies = {path: httpx.post(demo.url + path, json=body, timeout=60) for path, body in found.items()}
    assert {path: reply.status_code for path, reply in replies.items()} == dict.fromkeys(found, 200)


def test_chaos_is_refused_if_the_manifest_does_not_allow_it(demo, capfd):
    before = demo.pids()
    assert main(["chaos", demo.url, "--scenario", "crash", "--yes"]) == 2
    assert "lifecycle: {chaos: allowed}" in capfd.readouterr().err
    assert demo.pids() == before
