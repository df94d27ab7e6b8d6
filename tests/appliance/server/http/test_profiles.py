"""`endpoints.compat`: all differences between the two profiles, each under both (docs/http.md, Profiles)."""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from appliance.config.gateway import PooledModel
from tests.appliance.server.http.anthropic.order import assembled, records
from tests.appliance.server.http.pooling.model import WIDTH, answer

PROFILES = ("openai", "vllm")
THOUGHT = "<think>\nuser wants weather\n</think>\n\n"
CHAT = {"messages": [{"role": "user", "content": "hello"}]}
CACHE = {"cached_tokens": 3, "cache_write_tokens": 8}
COUNTS = {"prompt_tokens", "completion_tokens", "total_tokens"}
MESSAGE: dict[str, Any] = {"model": "qwen", "max_tokens": 100, **CHAT}

Make = Callable[..., Any]


@pytest.fixture(params=PROFILES)
def compat(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def gateway(make_gateway: Make, compat: str) -> Any:
    return make_gateway(max_context=1024, **{"endpoints.compat": compat}).says(
        f"{THOUGHT}hi", cached_tokens=3, written_tokens=8
    )


@pytest.fixture
def embedder(make_gateway: Make, compat: str) -> Any:
    pooled = PooledModel(width=WIDTH, activation="normalize")
    gateway = make_gateway(tasks=("embed", "score"), pooled=pooled, **{"endpoints.compat": compat})
    gateway.router.reply = lambda submit: answer(submit, 0, 3)
    return gateway


def details(usage: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in usage.items() if name not in COUNTS and value is not None}


def get(gateway: Any, path: str, **headers: str) -> httpx.Response:
    async def call() -> httpx.Response:
        async with gateway.client() as client:
            return await client.get(path, headers=headers)

    return asyncio.run(call())


def test_usage_of_chat(gateway: Any, compat: str) -> None:
    """Section 0 #11, H-14"""
    whole = gateway.post("/v1/chat/completions", CHAT)[1]["usage"]
    asked = {**CHAT, "stream_options": {"include_usage": True}}
    streamed = gateway.stream("/v1/chat/completions", asked)[-1]["usage"]
    assert streamed == whole and whole.keys() >= COUNTS
    if compat == "vllm":
        assert details(whole) == {}
    else:
        assert details(whole)["prompt_tokens_details"] == CACHE
        assert details(whole)["completion_tokens_details"]["reasoning_tokens"] > 0


def test_usage_of_completions(gateway: Any, compat: str) -> None:
    usage = gateway.post("/v1/completions", {"prompt": "hello"})[1]["usage"]
    assert details(usage) == ({} if compat == "vllm" else {"prompt_tokens_details": CACHE})


@pytest.mark.parametrize(("path", "choices"), [("/v1/chat/completions", 2), ("/v1/completions", 1)])
def test_usage_with_speculative_decoding(make_gateway: Make, compat: str, path: str, choices: int) -> None:
    """The counts of all choices, in the fields of OpenAI's predicted outputs."""
    gateway = make_gateway(max_context=1024, speculation="ngram", **{"endpoints.compat": compat})
    gateway.says("hi", accepted_tokens=5, rejected_tokens=2)
    body = {"n": choices, **(CHAT if choices > 1 else {"prompt": "hello"})}
    whole = gateway.post(path, body)[1]["usage"]
    streamed = gateway.stream(path, {**body, "stream_options": {"include_usage": True}})[-1]["usage"]
    assert streamed == whole
    found = details(whole).get("completion_tokens_details", {})
    counts = {"accepted_prediction_tokens": 5 * choices, "rejected_prediction_tokens": 2 * choices}
    assert {name: value for name, value in found.items() if name in counts} == ({} if compat == "vllm" else counts)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling", "/score"])
def test_usage_of_pooling_routes(embedder: Any, compat: str, path: str) -> None:
    body = {"text_1": "hello", "text_2": "world"} if path == "/score" else {"input": ["hello", "world"]}
    usage = embedder.post(path, body)[1]["usage"]
    assert usage["completion_tokens"] == 0 and "prompt_tokens_details" in usage
    cache = {"cached_tokens": 6, "cache_write_tokens": 12}  # of both prompts
    assert details(usage) == ({} if compat == "vllm" else {"prompt_tokens_details": cache})


def test_usage_of_messages(gateway: Any, compat: str) -> None:
    whole = gateway.post("/v1/messages", MESSAGE)[1]["usage"]
    lines = gateway.lines("/v1/messages", MESSAGE)
    streamed = assembled(records("\n\n".join(lines) + "\n\n"))["usage"]
    prompt = len(gateway.submits[0].prompt)
    for usage in (whole, streamed):
        if compat == "vllm":
            assert usage["input_tokens"] == prompt and not any(name.startswith("cache") for name in usage)
        else:
            assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (prompt - 11, 3)
            assert usage["cache_creation_input_tokens"] == 8


def test_usage_of_a_response_is_whole_under_both(gateway: Any, compat: str) -> None:
    """Its clients treat no field as optional."""
    usage = gateway.post("/v1/responses", {"input": "hello"})[1]["usage"]
    assert usage["input_tokens_details"] == CACHE
    assert usage["output_tokens_details"]["reasoning_tokens"] > 0


def test_reasoning_has_the_names_that_clients_read(gateway: Any, compat: str) -> None:
    """Section 0 #10, H-13: both names say the same, in a whole reply and in every delta"""
    names = ["reasoning"] if compat == "vllm" else ["reasoning", "reasoning_content"]
    message = gateway.post("/v1/chat/completions", CHAT)[1]["choices"][0]["message"]
    deltas = [one["choices"][0]["delta"] for one in gateway.stream("/v1/chat/completions", CHAT)]
    thoughts = [delta for delta in deltas if "reasoning" in delta]
    for found in (message, *thoughts):
        said = {name: text for name, text in found.items() if name.startswith("reasoning")}
        assert sorted(said) == names and len(set(said.values())) == 1
    assert "".join(delta["reasoning"] for delta in thoughts) == message["reasoning"] == "user wants weather"
    assert not any("reasoning_content" in delta for delta in deltas if "reasoning" not in delta)


def test_reasoning_that_is_not_wanted_has_no_name(gateway: Any, compat: str) -> None:
    asked = {**CHAT, "include_reasoning": False}
    message = gateway.post("/v1/chat/completions", asked)[1]["choices"][0]["message"]
    assert {name: text for name, text in message.items() if name.startswith("reasoning") and text is not None} == {}
    deltas = [one["choices"][0]["delta"] for one in gateway.stream("/v1/chat/completions", asked)]
    assert not any(name.startswith("reasoning") for delta in deltas for name in delta)


def test_a_message_sent_back_thinks_once(gateway: Any) -> None:
    """Reasoning that a client received under both names reaches the template once."""
    message = gateway.post("/v1/chat/completions", CHAT)[1]["choices"][0]["message"]
    gateway.post("/v1/chat/completions", {"messages": [*CHAT["messages"], message, *CHAT["messages"]]})
    prompt = gateway.tokenizer.decode(gateway.submits[-1].prompt, skip_special_tokens=False)
    assert prompt.count("user wants weather") == 1


@pytest.mark.parametrize("path", ["/v1/models", "/nowhere"])
def test_the_request_id_header(gateway: Any, compat: str, path: str) -> None:
    """RT-04"""
    given = get(gateway, path, **{"x-request-id": "abc-1"}).headers.get("x-request-id")
    assert given == (None if compat == "vllm" else "abc-1")
    assert ("x-request-id" in get(gateway, path).headers) == (compat == "openai")


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/chat/completions", "/v1/messages", "/v1/responses/resp_1"])
def test_a_route_of_another_task(gateway: Any, embedder: Any, compat: str, path: str) -> None:
    """H-7: 404 as for an unknown path, 501 as in vLLM; both name the served tasks"""
    asked = gateway if path == "/v1/embeddings" else embedder
    if path.startswith("/v1/responses/"):
        answered = get(asked, path)
        status, reply = answered.status_code, answered.json()
    else:
        status, reply = asked.post(path, {})
    kinds = {"openai": (404, "NotFoundError"), "vllm": (501, "NotImplementedError")}
    if path == "/v1/messages":
        kinds = {"openai": (404, "not_found_error"), "vllm": (501, "api_error")}
    assert (status, reply["error"]["type"]) == kinds[compat]
    assert f"does not support {path}" in reply["error"]["message"] and "it serves" in reply["error"]["message"]
    assert asked.post("/v1/nothing", {})[0] == 404


def test_no_client_asks_again_for_another_task(gateway: Any, compat: str) -> None:
    """H-7: the official client retries a 5xx unless a header forbids it"""
    asked = 0

    async def counted(request: httpx.Request) -> None:
        nonlocal asked
        asked += 1

    async def call() -> None:
        hooks = {"request": [counted]}
        transport = httpx.ASGITransport(gateway.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway", event_hooks=hooks) as http:
            client = openai.AsyncOpenAI(api_key="none", base_url="http://gateway/v1", http_client=http, max_retries=2)
            await client.embeddings.create(model="qwen", input="hello")

    with pytest.raises(openai.NotFoundError if compat == "openai" else openai.InternalServerError):
        asyncio.run(call())
    assert asked == 1


def test_a_response_also_has_vllms_fields(gateway: Any, compat: str) -> None:
    assert ("kv_transfer_params" in gateway.post("/v1/responses", {"input": "hello"})[1]) == (compat == "vllm")


def test_types_of_input_that_a_model_does_not_know(embedder: Any, compat: str) -> None:
    """Cohere's client always sends a model name."""
    body = {"model": "qwen", "texts": ["hello"], "input_type": "search_query", "embedding_types": ["float"]}
    assert embedder.post("/v2/embed", body)[0] == (200 if compat == "openai" else 400)


def test_the_name_of_the_model_is_the_first_under_both(gateway: Any) -> None:
    """H-10"""
    assert gateway.post("/v1/chat/completions", {**CHAT, "model": "alias"})[1]["model"] == "qwen"


@pytest.mark.parametrize("also", [True, False])
def test_names_of_metrics_are_a_key_of_their_own(start_gateway: Make, engine: Any, compat: str, also: bool) -> None:
    text = (
        start_gateway(engine, **{"endpoints.compat": compat, "observability.vllm_metrics": also})
        .client.get("/metrics")
        .text
    )
    assert "\nslipway_" in text and ("\nvllm:" in text) == also
