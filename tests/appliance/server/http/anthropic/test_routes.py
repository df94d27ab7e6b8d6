"""/v1/messages (docs/http.md, Messages): every id against scripted engines, with the official client where possible."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import anthropic
import httpx2
import pytest
from anthropic.types import Message

from appliance.security.keys import parse_keys
from engine.api.messages import Delta
from tests.appliance.server.http.anthropic.order import assembled, blocks, records

PATH = "/v1/messages"
BASE: dict[str, Any] = {"model": "qwen", "max_tokens": 100, "messages": [{"role": "user", "content": "hello"}]}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"name": "get_weather", "description": "d", "input_schema": SCHEMA}
TOOLS = {**BASE, "tools": [TOOL]}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
NO_ARGUMENTS = '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>'
BARE = '<tool_call>\n{"name": "get_weather"}\n</tool_call>'
THOUGHT = "<think>\nuser wants weather\n</think>\n\n"


def whole(gateway: Any, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    status, reply = gateway.post(PATH, {**BASE, **body}, **headers)
    assert status == 200, reply
    Message.model_validate(reply)
    found: dict[str, Any] = reply
    return found


def text_of(gateway: Any, body: dict[str, Any]) -> str:
    """Return the raw text of a stream."""
    return "\n\n".join(gateway.lines(PATH, {**BASE, **body})) + "\n\n"


def events(gateway: Any, body: dict[str, Any]) -> list[dict[str, Any]]:
    return records(text_of(gateway, body))


def refusal(gateway: Any, body: dict[str, Any], status: int = 400, kind: str = "invalid_request_error") -> str:
    """Check the shape of a refusal and return its message."""
    found, reply = gateway.post(PATH, body)
    assert found == status, reply
    assert not gateway.submits
    assert set(reply) == {"type", "error", "request_id"} and reply["type"] == "error" and reply["request_id"]
    assert set(reply["error"]) == {"type", "message"} and reply["error"]["type"] == kind
    return str(reply["error"]["message"])


def ask(gateway: Any, work: Callable[[anthropic.AsyncAnthropic], Any], **options: Any) -> Any:
    """Run `work` with the official client over this application."""

    async def call() -> Any:
        http = httpx2.AsyncClient(transport=httpx2.ASGITransport(gateway.app), base_url="http://gateway", timeout=60)
        async with http:
            given = {"api_key": "none", "base_url": "http://gateway", "max_retries": 0, **options}
            return await work(anthropic.AsyncAnthropic(http_client=http, **given))

    return asyncio.run(call())


def prompt_text(gateway: Any, at: int = -1) -> str:
    text: str = gateway.tokenizer.decode(gateway.submits[at].prompt, skip_special_tokens=False)
    return text


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    content = [{key: value for key, value in block.items() if key != "id"} for block in message["content"]]
    return {**message, "id": "", "content": content}


# Streams


@pytest.mark.parametrize("each", [1, 2, 5, 100])
@pytest.mark.parametrize(
    "text",
    [
        "hello 中文 🎉 world",
        "",
        f"{THOUGHT}hi",
        CALL,
        f"{THOUGHT}Let me see.\n{CALL}",
        f"{CALL}\n{NO_ARGUMENTS}\n{BARE}",
        f"{CALL}\nand that is it",
        f"{THOUGHT}a {CALL} b {CALL} c",
    ],
)
def test_a_stream_of_sequential_blocks_adds_up_to_the_whole_message(gateway: Any, text: str, each: int) -> None:
    """AN-01 AN-02 AN-03 AN-04 AN-05: for any split of the tokens."""
    gateway.says(text, each=each)
    streamed = assembled(events(gateway, TOOLS))
    assert without_ids(streamed) == without_ids(whole(gateway, TOOLS))
    kinds = [block["type"] for block in streamed["content"]]
    assert kinds == {
        "hello 中文 🎉 world": ["text"],
        "": ["text"],
        f"{THOUGHT}hi": ["thinking", "text"],
        CALL: ["tool_use"],
        f"{THOUGHT}Let me see.\n{CALL}": ["thinking", "text", "tool_use"],
        f"{CALL}\n{NO_ARGUMENTS}\n{BARE}": ["tool_use"] * 3,
        f"{CALL}\nand that is it": ["tool_use", "text"],
        f"{THOUGHT}a {CALL} b {CALL} c": ["thinking", "text", "tool_use", "text", "tool_use", "text"],
    }.get(text)
    for block in streamed["content"]:
        if block["type"] == "tool_use":
            assert block["id"].startswith("toolu_") and block["input"] in ({"city": "Oslo"}, {})
    ids = [block["id"] for block in streamed["content"] if block["type"] == "tool_use"]
    assert len(set(ids)) == len(ids)


def test_a_stream_opens_with_its_message_and_a_ping(gateway: Any) -> None:
    """AN-02: the first usage has the complete prompt and no output tokens."""
    found = events(gateway.says("hi"), BASE)
    assert [event["type"] for event in found[:2]] == ["message_start", "ping"]
    start = found[0]["message"]
    assert start["id"].startswith("msg_") and start["model"] == "qwen" and start["role"] == "assistant"
    assert start["usage"]["input_tokens"] == len(gateway.submits[0].prompt)


def test_a_pause_brings_a_ping(make_gateway: Callable[..., Any]) -> None:
    """H-2: a record that clients know, where other routes send a comment."""
    gateway = make_gateway(**{"endpoints.stream_keep_alive": 0.01})
    gateway.says("hi").router.hold = True

    text = asyncio.run(_until_pings(gateway, 4))
    assert text.count('event: ping\ndata: {"type":"ping"}\n\n') == 4 and ": keep-alive" not in text


async def _until_pings(gateway: Any, count: int) -> str:
    """Return the text of an endless stream up to the given number of pings, then disconnect."""
    body = json.dumps({**BASE, "stream": True}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    scope = {
        **{"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": PATH},
        **{"raw_path": PATH.encode(), "query_string": b"beta=true", "headers": headers, "scheme": "http"},
        **{"client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2), "root_path": ""},
    }
    text, enough = b"", asyncio.Event()
    given = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Any:
        for message in given:
            return message
        await enough.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        nonlocal text
        text += message.get("body", b"")
        if text.count(b"event: ping") == count:
            enough.set()

    await asyncio.wait_for(gateway.app(scope, receive, send), 100)
    assert all(generation.closed for generation in gateway.router.generations)
    return text.decode()


def test_a_failure_in_a_stream_closes_its_block_and_is_an_event(gateway: Any) -> None:
    """AN-06: no message_stop follows the error, and the official client raises."""
    gateway.router.failure = RuntimeError("secret")
    ids = gateway.ids("hello there")
    gateway.router.reply = lambda submit: [Delta(submit.id, (token,)) for token in ids]
    found = events(gateway, BASE)
    content: list[dict[str, Any]] = []
    blocks([event for event in found[1:-1] if event["type"] != "ping"], content)
    assert content == [{"type": "text", "text": "hello there"}]
    assert found[-1]["type"] == "error" and found[-1]["request_id"]
    assert found[-1]["error"] == {"type": "api_error", "message": "Internal server error"}
    assert "secret" not in json.dumps(found)

    async def streamed(client: anthropic.AsyncAnthropic) -> str:
        text = ""
        with pytest.raises(anthropic.APIStatusError) as caught:
            async for event in await client.messages.create(**BASE, stream=True):
                text += event.delta.text if event.type == "content_block_delta" else ""
        assert caught.value.type == "api_error"
        return text

    assert ask(gateway, streamed) == "hello there"


def test_a_reply_that_the_service_cuts_is_an_error_that_can_be_tried_again(gateway: Any) -> None:
    """AN-06 ER-23: this API has no stop_reason for it."""
    ids = gateway.ids("hello")
    gateway.router.reply = lambda submit: [Delta(submit.id, tuple(ids), finish="abort")]
    found = events(gateway, BASE)
    assert [event["delta"]["text"] for event in found if event["type"] == "content_block_delta"] == ["hello"]
    assert (found[-2]["type"], found[-1]["error"]["type"]) == ("content_block_stop", "overloaded_error")
    status, reply = gateway.post(PATH, BASE)
    assert (status, reply["error"]["type"]) == (503, "overloaded_error")


def test_the_official_stream_helper_puts_the_message_together(gateway: Any) -> None:
    """ANT-01: thinking, text and a call, as in the client's own snapshot."""
    gateway.says(f"{THOUGHT}Let me see.\n{CALL}", each=3)

    async def streamed(client: anthropic.AsyncAnthropic) -> Any:
        async with client.messages.stream(**TOOLS) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            return text, await stream.get_final_message()

    text, message = ask(gateway, streamed)
    assert text == message.content[1].text and "Let me see." in text
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    assert (message.content[0].thinking, message.content[2].input) == ("user wants weather", {"city": "Oslo"})
    assert message.content[0].signature and message.stop_reason == "tool_use"
    assert message.usage.input_tokens == len(gateway.submits[0].prompt) and message.usage.output_tokens > 10


def test_separators_that_clients_cut_lines_at_are_escaped(gateway: Any) -> None:
    """H-15"""
    text = text_of(gateway.says("a\u2028b\u2029c\x85d"), BASE)
    assert not set(text) & set("\u2028\u2029\x85")
    assert assembled(records(text))["content"] == [{"type": "text", "text": "a\u2028b\u2029c\x85d"}]


# Replies


def test_the_official_client_reads_a_message(make_gateway: Callable[..., Any]) -> None:
    """ANT-01 AN-14: with about the largest max_tokens that it asks for without a stream."""
    gateway = make_gateway(max_context=32768).says("hello")

    async def create(client: anthropic.AsyncAnthropic) -> Any:
        return await client.messages.create(**{**BASE, "max_tokens": 20_000})

    message = ask(gateway, create)
    assert (message.type, message.role, message.model) == ("message", "assistant", "qwen")
    assert message.content[0].text == "hello" and message.stop_reason == "end_turn"
    assert message.stop_sequence is None and "stop_sequence" in message.to_dict(exclude_unset=True)
    assert message.id == f"msg_{message._request_id}"


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("text", "body", "finish", "reason", "sequence"),
    [
        ("hello END world", {"stop_sequences": ["stop", "END"]}, "stop", "stop_sequence", "END"),
        ("hello", {}, "length", "max_tokens", None),
        ("hello", {"stop_sequences": ["END"]}, "stop", "end_turn", None),
        (CALL, {"tools": [TOOL]}, "stop", "tool_use", None),
        (CALL, {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "get_weather"}}, "stop", "tool_use", None),
        (CALL, {"tools": [TOOL], "tool_choice": {"type": "any"}}, "stop", "tool_use", None),
        (CALL, {"tools": [TOOL]}, "length", "max_tokens", None),
        (f"{CALL} END", {"tools": [TOOL], "stop_sequences": ["END"]}, "stop", "stop_sequence", "END"),
        (CALL, {"tools": [TOOL], "tool_choice": {"type": "none"}}, "stop", "end_turn", None),
    ],
)
def test_stop_reasons(
    gateway: Any, text: str, body: dict[str, Any], finish: str, reason: str, sequence: str | None, streamed: bool
) -> None:
    """AN-08"""
    gateway.says(text, finish=finish)
    reply = assembled(events(gateway, body)) if streamed else whole(gateway, body)
    assert (reply["stop_reason"], reply["stop_sequence"]) == (reason, sequence)
    assert "END" not in json.dumps(reply["content"])


@pytest.mark.parametrize("compat", ["vllm", "openai"])
@pytest.mark.parametrize("streamed", [False, True])
def test_usage_parts_the_prompt_by_profile(make_gateway: Callable[..., Any], compat: str, streamed: bool) -> None:
    """AN-02: input_tokens excludes cached tokens, so the two numbers add up to the prompt."""
    gateway = make_gateway(**{"endpoints.compat": compat}).says(f"{THOUGHT}hi", cached_tokens=3)
    usage = (assembled(events(gateway, BASE)) if streamed else whole(gateway, BASE))["usage"]
    prompt, reply = len(gateway.submits[0].prompt), len(gateway.ids(f"{THOUGHT}hi")) + 1
    assert usage.pop("service_tier") == "standard" and usage["output_tokens"] == reply
    if compat == "vllm":
        assert usage == {"input_tokens": prompt, "output_tokens": reply}
    else:
        assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (prompt - 3, 3)
        assert usage["cache_creation_input_tokens"] == 0
        thought = len(gateway.ids("\nuser wants weather\n"))
        assert abs(usage["output_tokens_details"]["thinking_tokens"] - thought) <= 1


def test_a_malformed_call_is_text_and_in_a_stream_a_call_that_ends(gateway: Any) -> None:
    """TC-05"""
    gateway.says('<tool_call>\n{"name": "get_weather", "arguments": [1]}\n</tool_call>')
    reply = whole(gateway, TOOLS)
    assert [block["type"] for block in reply["content"]] == ["text"] and reply["stop_reason"] == "end_turn"
    assert '"arguments": [1]' in reply["content"][0]["text"]
    streamed = assembled(events(gateway, TOOLS))
    assert [block["type"] for block in streamed["content"]] == ["tool_use"] and streamed["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("cut", "expected"),
    [
        ('{"city": "Os', {}),
        ('{"city": "Oslo", "days": [1, 2', {"city": "Oslo", "days": [1, 2]}),
        ('{"city"', {}),
        ("", {}),
    ],
)
def test_a_call_that_is_cut_keeps_what_is_complete(gateway: Any, cut: str, expected: Any) -> None:
    """AN-03: the official client parses the pieces of a stream."""
    gateway.says('<tool_call>\n{"name": "get_weather", "arguments": ' + cut, finish="length")

    async def streamed(client: anthropic.AsyncAnthropic) -> Any:
        async with client.messages.stream(**TOOLS) as stream:
            return await stream.get_final_message()

    reply = whole(gateway, TOOLS)
    assert (reply["content"][-1]["input"], reply["stop_reason"]) == (expected, "max_tokens")
    assert ask(gateway, streamed).content[-1].input == expected


def test_digits_of_a_call_are_the_models_own(gateway: Any) -> None:
    """TC-03"""
    arguments = '{"city": "\\ud83d \\u00e9", "n": 123456789012345678901234567890, "x": 1.10}'
    gateway.says('<tool_call>\n{"name": "get_weather", "arguments": ' + arguments + "}\n</tool_call>")
    body = {**BASE, "tools": [TOOL]}

    async def call() -> str:
        async with gateway.client() as client:
            return str((await client.post(PATH, json=body)).text)

    assert f'"input":{arguments}' in asyncio.run(call())


# Thinking


@pytest.mark.parametrize("streamed", [False, True])
def test_omitted_thinking_is_restored_from_its_signature(gateway: Any, streamed: bool) -> None:
    """AN-04: nothing of it is sent, and the next prompt has it."""
    gateway.says(f"{THOUGHT}hi", each=2)
    body = {**BASE, "thinking": {"type": "adaptive", "display": "omitted"}}
    raw = events(gateway, body) if streamed else []
    reply = assembled(raw) if streamed else whole(gateway, body)
    assert [block["type"] for block in reply["content"]] == ["thinking", "text"]
    assert reply["content"][0]["thinking"] == "" and reply["content"][0]["signature"]
    assert "weather" not in json.dumps([reply, raw])
    history = [*BASE["messages"], {"role": "assistant", "content": reply["content"]}, BASE["messages"][0]]
    whole(gateway, {"messages": history})
    assert "<think>\nuser wants weather\n</think>\n\nhi<|im_end|>" in prompt_text(gateway)


def test_disabled_thinking_is_neither_generated_nor_shown(gateway: Any) -> None:
    gateway.says(f"{THOUGHT}hi")
    body = {"thinking": {"type": "disabled"}}
    assert whole(gateway, body)["content"] == [{"type": "text", "text": "hi"}]
    assert assembled(events(gateway, body))["content"] == [{"type": "text", "text": "hi"}]
    assert prompt_text(gateway).endswith("<think>\n\n</think>\n\n")
    whole(gateway, {"thinking": {"type": "adaptive"}})
    assert prompt_text(gateway).endswith("<|im_start|>assistant\n")


def test_a_signature_that_was_changed_is_refused(gateway: Any) -> None:
    for signature in ("kept.!", "kept.eJw=", "kept.AAAA"):
        block = {"type": "thinking", "thinking": "", "signature": signature}
        body = {**BASE, "messages": [*BASE["messages"], {"role": "assistant", "content": [block]}, *BASE["messages"]]}
        assert refusal(gateway, body).startswith("messages.1.content.0.signature")


# Conversations


def test_results_of_tools_go_round(make_gateway: Callable[..., Any]) -> None:
    """AN-09: text, blocks and errors, several in one turn, before the user's own text."""
    gateway = make_gateway(max_context=1024).says("done")
    calls = [{"type": "tool_use", "id": f"t{at}", "name": "get_weather", "input": {"city": "Oslo"}} for at in range(3)]
    results = [
        {"type": "tool_result", "tool_use_id": "t0", "content": "rain"},
        {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": part} for part in "ab"]},
        {"type": "tool_result", "tool_use_id": "t2", "content": "no such city", "is_error": True},
        {"type": "text", "text": "and now?"},
    ]  # fmt: skip
    turns = [*BASE["messages"], {"role": "assistant", "content": calls}, {"role": "user", "content": results}]
    whole(gateway, {**TOOLS, "messages": turns})
    prompt = prompt_text(gateway)
    assert prompt.count('{"name": "get_weather", "arguments": {"city": "Oslo"}}') == 3
    tail = prompt[prompt.rindex("</tool_call>") :]
    roles = [part.partition("\n")[::2] for part in tail.split("<|im_start|>")[1:]]
    assert [(role, text.removesuffix("<|im_end|>\n")) for role, text in roles] == [
        ("tool", "rain"),
        ("tool", "a\nb"),
        ("tool", "Error: no such city"),
        ("user", "and now?"),
        ("assistant", ""),
    ]


def test_a_last_message_of_the_assistant_is_the_beginning_of_the_reply(gateway: Any) -> None:
    gateway.says(" 42")
    turns = [*BASE["messages"], {"role": "assistant", "content": "The answer is"}]
    assert whole(gateway, {"messages": turns})["content"] == [{"type": "text", "text": " 42"}]
    assert prompt_text(gateway).endswith("<|im_start|>assistant\nThe answer is")


def test_system_prompts_and_turns_of_one_role_are_joined(gateway: Any) -> None:
    gateway.says("ok")
    blocks = [
        {"type": "text", "text": "x-anthropic-billing-header: 123"},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Be kind."},
    ]
    turns = [{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "b"}]}]
    whole(gateway, {"system": blocks, "messages": turns})
    wanted = "<|im_start|>system\nBe brief.\nBe kind.<|im_end|>\n\n<|im_start|>user\na\nb<|im_end|>\n"
    assert wanted in prompt_text(gateway).replace("<|im_end|>\n<|im", "<|im_end|>\n\n<|im")
    whole(gateway, {"system": "Be brief.\nBe kind.", "messages": [{"role": "user", "content": "a\nb"}]})
    assert gateway.submits[0].prompt == gateway.submits[1].prompt


@pytest.mark.parametrize(
    ("body", "where"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [{"type": "hologram"}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t"}]}]}, "tool_use_id"),
        ({"tools": [{"type": "web_search_20260209", "name": "web_search"}]}, "tools.0"),
        ({"tools": [{"name": "f"}]}, "tools.0: input_schema"),
        ({"tools": [TOOL, TOOL]}, "tools.1"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"stop_sequences": [""]}, "stop_sequences cannot contain"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences has 17 strings"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.budget_tokens must be less"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1023}}, "thinking.budget_tokens must be at least 1024"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "much"}}, "thinking"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": 5}}}}, "output_config.format"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"model": ""}, "model"),
        ({"max_tokens": 257}, "max_tokens=257 cannot be greater"),
    ],
)  # fmt: skip
def test_invalid_requests_are_rejected_with_their_place(gateway: Any, body: dict[str, Any], where: str) -> None:
    """AN-07"""
    assert where in refusal(gateway, {**BASE, **body})


def test_a_call_cannot_be_continued(gateway: Any) -> None:
    call = {"type": "tool_use", "id": "t", "name": "get_weather", "input": {}}
    assert "tool_result" in refusal(
        gateway, {**TOOLS, "messages": [*BASE["messages"], {"role": "assistant", "content": [call]}]}
    )


# Fields


def test_fields_act_as_on_the_chat_route(gateway: Any) -> None:
    """CH-17: fields that only Anthropic's service supports are accepted and ignored."""
    gateway.says("ok")
    own = {
        **{"metadata": {"user_id": "u"}, "service_tier": "auto", "container": None, "inference_geo": "eu"},
        **{"speed": "standard", "cache_control": {"type": "ephemeral"}, "diagnostics": {}, "context_management": {}},
    }
    status, reply = gateway.post(
        f"{PATH}?beta=true",
        {**BASE, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 5, "cache_salt": "s", "priority": 3, **own},
        **{"anthropic-version": "2023-06-01", "anthropic-beta": "a,b"},
    )
    assert status == 200, reply
    status, _ = gateway.post(
        "/v1/chat/completions",
        {"messages": BASE["messages"], "max_tokens": 100, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 5}
        | {"cache_salt": "s", "priority": 3},
    )  # fmt: skip
    one, two = gateway.submits
    assert one.sampling.top_k == 7
    assert [(each.prompt, each.sampling, each.max_tokens, each.salt, each.priority) for each in (one, two)] == [
        (two.prompt, two.sampling, two.max_tokens, "s", 3)
    ] * 2


@pytest.mark.parametrize(
    ("choice", "chat"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "auto", "disable_parallel_tool_use": True}, {"tool_choice": "auto", "parallel_tool_calls": False}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "any", "disable_parallel_tool_use": True}, {"tool_choice": "required", "parallel_tool_calls": False}),
        ({"type": "tool", "name": "get_weather"}, {"tool_choice": NAMED}),
        ({"type": "none"}, {"tool_choice": "none"}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("strict", [False, True])
def test_tool_choices_bind_as_on_the_chat_route(gateway: Any, choice: Any, chat: Any, strict: bool) -> None:
    gateway.says(f"{CALL}\n{CALL}")
    tool = {**TOOL, "strict": True} if strict else TOOL
    reply = whole(gateway, {"tools": [tool], "tool_choice": choice})
    function = {"name": tool["name"], "description": "d", "parameters": SCHEMA} | ({"strict": True} if strict else {})
    body = {"messages": BASE["messages"], "max_tokens": 100, "tools": [{"type": "function", "function": function}]}
    status, other = gateway.post("/v1/chat/completions", body | chat)
    assert status == 200
    one, two = gateway.submits
    assert (one.prompt, one.grammar) == (two.prompt, two.grammar)
    calls = [block for block in reply["content"] if block["type"] == "tool_use"]
    assert len(calls) == len(other["choices"][0]["message"].get("tool_calls") or [])


@pytest.mark.parametrize("field", ["output_config", "output_format"])
def test_a_schema_binds_the_reply(gateway: Any, field: str) -> None:
    gateway.says('{"city": "Oslo"}')
    form = {"type": "json_schema", "schema": SCHEMA}
    whole(gateway, {field: {"format": form} if field == "output_config" else form})
    (submit,) = gateway.submits
    assert submit.grammar is not None and json.dumps(SCHEMA)[1:-1] in submit.grammar.text
    both = {**BASE, "output_config": {"format": form}, "output_format": form}
    gateway.submits.clear()
    assert "output_format" in refusal(gateway, both)


def test_the_official_client_parses_a_structured_reply(gateway: Any) -> None:
    from pydantic import BaseModel

    class City(BaseModel):
        city: str

    gateway.says('{"city": "Oslo"}')

    async def parsed(client: anthropic.AsyncAnthropic) -> Any:
        return await client.messages.parse(**BASE, output_format=City)

    assert ask(gateway, parsed).parsed_output == City(city="Oslo")
    assert gateway.submits[0].grammar is not None


# Counting


COUNTED: list[dict[str, Any]] = [
    {},
    {"system": "Be brief."},
    {"tools": [TOOL]},
    {"tools": [TOOL], "tool_choice": {"type": "any"}},
    {"thinking": {"type": "disabled"}},
    {"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}},
    {"messages": [*BASE["messages"], {"role": "assistant", "content": "The"}]},
]


@pytest.mark.parametrize("body", COUNTED)
def test_tokens_are_counted_as_the_request_then_has_them(gateway: Any, body: dict[str, Any]) -> None:
    """AN-10: with the official client."""
    counted = {key: value for key, value in {**BASE, **body}.items() if key != "max_tokens"}

    async def count(client: anthropic.AsyncAnthropic) -> Any:
        return await client.messages.count_tokens(**counted)

    tokens = ask(gateway, count).input_tokens
    assert not gateway.submits
    reply = whole(gateway.says("ok"), body)
    assert tokens == reply["usage"]["input_tokens"] == len(gateway.submits[0].prompt) > 3


def test_tokens_beyond_the_context_window_are_counted_too(gateway: Any) -> None:
    """AN-10: clients ask in order to find out if the prompt fits."""
    status, reply = gateway.post(
        f"{PATH}/count_tokens", {"model": "qwen", "messages": [{"role": "user", "content": "中" * 300}]}
    )
    assert status == 200 and reply["input_tokens"] > 256


# Errors


@pytest.mark.parametrize("path", [PATH, f"{PATH}/count_tokens"])
def test_an_unknown_model_and_bad_json_have_the_shape(gateway: Any, path: str) -> None:
    """AN-12"""
    status, reply = gateway.post(path, {**BASE, "model": "gpt"})
    assert (status, reply["type"], reply["error"]["type"]) == (404, "error", "not_found_error")
    assert "qwen, alias" in reply["error"]["message"]

    async def raw(content: bytes, kind: str) -> Any:
        async with gateway.client() as client:
            return await client.post(path, content=content, headers={"content-type": kind})

    for content, kind in ((b"{", "application/json"), (b"[]", "application/json"), (b"{}", "text/plain")):
        reply = asyncio.run(raw(content, kind))
        assert reply.status_code == 400 and reply.headers["request-id"] == reply.json()["request_id"]
        assert reply.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", PATH, 405, "invalid_request_error"),
        ("DELETE", f"{PATH}/count_tokens", 405, "invalid_request_error"),
        ("POST", f"{PATH}/batches", 404, "not_found_error"),
        ("GET", f"{PATH}/x/y", 404, "not_found_error"),
    ],
)
def test_paths_and_methods_that_are_not_there_have_the_shape(
    gateway: Any, method: str, path: str, status: int, kind: str
) -> None:
    """AN-12 H-21"""

    async def call() -> Any:
        async with gateway.client() as client:
            return await client.request(method, path)

    reply = asyncio.run(call())
    assert (reply.status_code, reply.json()["error"]["type"]) == (status, kind)
    assert status != 405 or reply.headers["allow"] == "POST"


def test_other_paths_keep_their_own_shape(gateway: Any) -> None:
    for path in ("/v1/messagesx", "/v1/message", "/v2/messages"):
        assert gateway.post(path, {})[1]["error"]["code"] == 404


def test_a_body_over_the_limit_has_the_shape(make_gateway: Callable[..., Any]) -> None:
    """RT-09"""
    gateway = make_gateway(**{"limits.max_body": 200})
    body = {**BASE, "messages": [{"role": "user", "content": "x" * 300}]}
    assert "limits.max_body" in refusal(gateway, body, 413, "request_too_large")


def test_a_drain_has_the_shape(gateway: Any) -> None:
    gateway.service.closed = True
    refusal(gateway, BASE, 503, "overloaded_error")


@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
def test_either_header_carries_the_key(gateway: Any, header: str) -> None:
    """AN-11: the official client's api_key header, and the header of older clients."""
    gateway.service.set_keys(parse_keys(["secret"], "keys"))
    gateway.says("ok")

    async def create(client: anthropic.AsyncAnthropic) -> Any:
        return await client.messages.create(**BASE)

    assert ask(gateway, create, api_key="secret").content[0].text == "ok"
    value = "Bearer secret" if header == "authorization" else "secret"
    assert gateway.post(PATH, BASE, **{header: value})[0] == 200
    with pytest.raises(anthropic.AuthenticationError) as caught:
        ask(gateway, create, api_key="wrong")
    assert caught.value.type == "authentication_error" and caught.value.request_id


@pytest.mark.parametrize(
    ("status", "raised"),
    [
        (400, anthropic.BadRequestError),
        (404, anthropic.NotFoundError),
        (413, anthropic.ContentTooLargeError),
        (503, anthropic.ServiceUnavailableError),
    ],
)
def test_the_official_client_raises_the_class_of_the_error(
    make_gateway: Callable[..., Any], status: int, raised: type[anthropic.APIStatusError]
) -> None:
    gateway = make_gateway(**{"limits.max_body": 2000})
    changes: dict[int, dict[str, Any]] = {
        400: {"max_tokens": 9999},
        404: {"model": "gpt"},
        413: {"system": "x" * 3000},
        503: {},
    }
    gateway.service.closed = status == 503

    async def create(client: anthropic.AsyncAnthropic) -> Any:
        return await client.messages.create(**{**BASE, **changes[status]})

    with pytest.raises(raised) as caught:
        ask(gateway, create)
    assert caught.value.status_code == status and caught.value.type


# Alternative routes


def test_models_have_fields_of_both_apis_for_versioned_clients(gateway: Any) -> None:
    """AN-13"""

    async def listed(client: anthropic.AsyncAnthropic) -> Any:
        page = await client.models.list()
        assert (page.has_more, page.first_id, page.last_id) == (False, "qwen", "alias")
        return page.data, await client.models.retrieve("alias")

    models, alias = ask(gateway, listed)
    assert [(model.id, model.display_name, model.type) for model in models] == [
        ("qwen", "qwen", "model"),
        ("alias", "alias", "model"),
    ]
    assert alias.id == "alias" and alias.created_at.year > 2000 and alias.max_input_tokens == 256

    async def plain() -> Any:
        async with gateway.client() as client:
            return (await client.get("/v1/models")).json()

    assert set(asyncio.run(plain())) == {"object", "data"}


def test_a_load_report_comes_with_a_whole_reply(gateway: Any) -> None:
    """RT-06"""

    async def call() -> Any:
        async with gateway.says("ok").client() as client:
            return await client.post(PATH, json=BASE, headers={"endpoint-load-metrics-format": "TEXT"})

    assert asyncio.run(call()).headers["endpoint-load-metrics"].startswith("TEXT named_metrics.")


@pytest.mark.parametrize("characters", [300, 9999])
def test_a_prompt_over_the_window_is_refused_in_the_words_that_agents_know(gateway: Any, characters: int) -> None:
    """ER-06 ER-08"""
    message = refusal(gateway, {**BASE, "messages": [{"role": "user", "content": "中" * characters}]})
    assert message.startswith("prompt is too long: ") and "256 tokens" in message


async def weather(city: str) -> str:
    """Get the weather of a city.

    Args:
        city: Name of the city.
    """
    return f"sunny in {city}"


def test_tool_runner_continues_without_a_thread(make_gateway: Any) -> None:
    """The SDK asks for a thread stored on the server; the error code makes it send complete conversations."""
    gateway = make_gateway(max_context=1000)
    texts = [CALL.replace("get_weather", "weather"), "It is sunny."]
    gateway.says(*texts)

    async def run(client: anthropic.AsyncAnthropic) -> list[Any]:
        runner = client.beta.messages.tool_runner(
            model="qwen",
            max_tokens=100,
            tools=[anthropic.beta_async_tool(weather)],
            messages=[{"role": "user", "content": "How is it in Oslo?"}],
        )
        return [message async for message in runner]

    called, answered = ask(gateway, run)
    assert called.stop_reason == "tool_use"
    assert answered.content[0].text == "It is sunny."
    assert "sunny in Oslo" in prompt_text(gateway) and "How is it in Oslo?" in prompt_text(gateway)


@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}])
@pytest.mark.parametrize("stream", [False, True])
def test_threads_are_refused_with_the_code_that_clients_check(gateway: Any, thread: Any, stream: bool) -> None:
    status, reply = gateway.post(PATH, {**BASE, "thread": thread, "stream": stream})
    assert status == 400 and reply["error"]["type"] == "invalid_request_error"
    assert reply["error"]["details"] == {"error_code": "thread_unsupported_request"}
    assert gateway.says("x").post(PATH, {**BASE, "thread": None})[0] == 200

    async def create(client: anthropic.AsyncAnthropic) -> Any:
        with pytest.raises(anthropic.BadRequestError) as caught:
            await client.beta.messages.create(**BASE, thread=thread)
        return caught.value

    assert ask(gateway, create).error_code == "thread_unsupported_request"
