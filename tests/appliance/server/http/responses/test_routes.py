"""POST /v1/responses without a store: requests become prompts, and outputs become typed events."""

import asyncio
import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from engine.api.messages import Delta
from tests.appliance.server.http.responses.order import check_object, check_order, read_events

PATH = "/v1/responses"
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
NOTE = {"type": "custom", "name": "note", "description": "Takes a text"}
THOUGHT = "<think>\nhello world\n</think>\n\n"


@pytest.fixture
def gateway(make_gateway):
    return make_gateway(max_context=1024)


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "qwen", "input": "hello", **fields}


def events(gateway, **fields) -> list[dict[str, Any]]:
    """The events of a stream, whose order is checked."""

    async def get():
        async with gateway.client() as client:
            return await client.post(PATH, json=body(stream=True, **fields))

    reply = asyncio.run(get())
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    found = read_events(reply.text)
    check_order(found)
    return found


def whole(gateway, **fields) -> dict[str, Any]:
    status, reply = gateway.post(PATH, body(**fields))
    assert status == 200, reply
    return check_object(reply)


def refused(gateway, **fields) -> dict[str, Any]:
    count = len(gateway.submits)
    status, reply = gateway.post(PATH, {name: value for name, value in body(**fields).items() if value is not ...})
    assert status == 400, reply
    assert len(gateway.submits) == count
    return reply["error"]


def prompt(gateway) -> str:
    return gateway.tokenizer.decode(list(gateway.submits[-1].prompt), skip_special_tokens=False)


def kinds(found) -> list[str]:
    """Types of events, those that repeat once."""
    names = [event["type"].removeprefix("response.") for event in found]
    return [name for at, name in enumerate(names) if at == 0 or names[at - 1] != name]


def bare(value: Any) -> Any:
    """Return the object without values that differ between requests."""
    if isinstance(value, list):
        return [bare(each) for each in value]
    if not isinstance(value, dict):
        return value
    drawn = ("id", "item_id", "call_id", "created_at", "completed_at")
    return {key: bare(each) for key, each in value.items() if key not in drawn}


# Events


def test_the_verified_order_of_events_of_thoughts_text_and_a_call(gateway):
    """RS-01, RS-02, RS-03"""
    gateway.says(THOUGHT + "hello\n" + call("weather", '{"city": "Oslo"}'))
    found = events(gateway, tools=[WEATHER])
    assert kinds(found) == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    final = found[-1]["response"]
    assert [item["id"].partition("_")[0] for item in final["output"]] == ["rs", "msg", "fc"]
    assert final["output"][0]["content"] == [{"type": "reasoning_text", "text": "hello world"}]
    assert final["output"][1]["content"][0]["text"] == "hello\n"
    assert json.loads(final["output"][2]["arguments"]) == {"city": "Oslo"}


@pytest.mark.parametrize("each", [1, 2, 7, 1000])
def test_events_follow_from_the_tokens_however_they_come(gateway, each):
    text = THOUGHT + "hello 中文🎉 world" + call("weather", '{"city": "Oslo"}') + call("note", '{"input": "a\\n\\"b"}')
    asked = {"tools": [WEATHER, NOTE], "include": ["message.output_text.logprobs"]}
    alone = events(gateway.says(text), **asked)
    assert bare(events(gateway.says(text, each=each), **asked)) == bare(alone)


def test_deltas_add_up_to_the_whole_which_is_the_reply_without_a_stream(gateway):
    """RS-04, RSP-01"""
    text = THOUGHT + "hello world 🎉 中文" + call("weather", '{"city": "Os\\u006co"}')
    found = events(gateway.says(text), tools=[WEATHER])
    final = found[-1]["response"]
    deltas = {kind: "".join(e["delta"] for e in found if e["type"] == f"response.{kind}.delta") for kind in (
        "output_text", "function_call_arguments", "reasoning_text")}  # fmt: skip
    assert deltas["output_text"] == final["output"][1]["content"][0]["text"] == "hello world 🎉 中文"
    assert deltas["function_call_arguments"] == final["output"][2]["arguments"] == '{"city": "Os\\u006co"}'
    assert deltas["reasoning_text"] == "hello world"
    assert bare(whole(gateway.says(text), tools=[WEATHER])) == bare(final)


def test_a_call_without_arguments_is_done_with_no_delta(gateway):
    """RS-05"""
    gateway.says('<tool_call>\n{"name": "weather"}\n</tool_call>')
    found = events(gateway, tools=[WEATHER])
    names = kinds(found)
    assert "function_call_arguments.done" in names
    assert names.index("output_item.added") < names.index("function_call_arguments.done")
    (item,) = found[-1]["response"]["output"]
    assert item["name"] == "weather" and item["status"] == "completed"


def test_two_calls_are_two_items_one_after_the_other(gateway):
    """RS-06"""
    gateway.says(call("weather", '{"city": "Oslo"}') + "\n" + call("weather", '{"city": "Rome"}'))
    final = check_order(events(gateway, tools=[WEATHER]))
    assert [json.loads(item["arguments"])["city"] for item in final["output"]] == ["Oslo", "Rome"]
    assert len({item["call_id"] for item in final["output"]}) == len({item["id"] for item in final["output"]}) == 2


def test_a_reply_that_is_cut_is_incomplete_and_so_is_its_last_item(gateway):
    """RS-07"""
    gateway.says("hello world", finish="length")
    found = events(gateway, max_output_tokens=30)
    assert gateway.submits[-1].max_tokens == 30
    final = found[-1]["response"]
    assert found[-1]["type"] == "response.incomplete" and final["status"] == "incomplete"
    assert final["incomplete_details"] == {"reason": "max_output_tokens"} and final["completed_at"] is None
    assert final["output"][0]["status"] == "incomplete"
    assert bare(whole(gateway, max_output_tokens=30)) == bare(final)
    gateway.says("<think>\nhello", finish="length")
    assert [(item["type"], item["status"]) for item in whole(gateway)["output"]] == [("reasoning", "incomplete")]


def test_every_delta_of_text_has_logprobs_if_they_are_asked_for(gateway):
    """RS-08"""
    gateway.says(THOUGHT + "hello 🎉 world END")
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 3}
    found = events(gateway, **asked)
    deltas = [event for event in found if event["type"] == "response.output_text.delta"]
    assert deltas and all(event["logprobs"] for event in deltas)
    scores = [score for event in deltas for score in event["logprobs"]]
    assert all(score["logprob"] <= 0 and len(score["top_logprobs"]) == 3 for score in scores)
    assert "".join(score["token"] for score in scores).strip() == "hello 🎉 world END"
    final = found[-1]["response"]
    assert final["output"][1]["content"][0]["logprobs"] == scores and final["top_logprobs"] == 3
    assert not any(event["logprobs"] for event in events(gateway) if event["type"] == "response.output_text.delta")
    assert gateway.submits[-1].sampling.logprobs is None


def test_usage_counts_thoughts_and_what_was_cached_in_both_modes(gateway):
    """RS-09"""
    gateway.says(THOUGHT + "hello", cached_tokens=5)
    usage = whole(gateway)["usage"]
    assert usage == events(gateway)[-1]["response"]["usage"]
    assert usage["input_tokens"] == len(gateway.submits[-1].prompt)
    assert usage["input_tokens_details"]["cached_tokens"] == 5
    assert 0 < usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


def test_hidden_thoughts_are_nowhere_and_are_counted(gateway):
    gateway.says(THOUGHT + "hello")
    reply = whole(gateway, include_reasoning=False, include=["message.output_text.logprobs"])
    assert [item["type"] for item in reply["output"]] == ["message"]
    assert reply["output"][0]["content"][0]["logprobs"] == []
    assert reply["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


def test_a_reply_of_nothing_is_an_empty_message(gateway):
    (item,) = whole(gateway.says(""))["output"]
    assert item["type"] == "message" and item["content"][0]["text"] == ""
    events(gateway)


def test_a_call_that_proves_broken_stays_and_is_not_complete(gateway):
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": oops}}\n</tool_call>hello'
    final = check_order(events(gateway.says(text), tools=[WEATHER]))
    assert final["output"][0]["type"] == "function_call" and final["output"][0]["status"] == "incomplete"
    assert final["output"][1]["content"][0]["text"] == "hello"
    assert bare(whole(gateway, tools=[WEATHER])["output"]) == bare(final["output"])


def test_a_failure_under_way_ends_the_stream_with_the_response_that_failed(gateway):
    """RS-14"""

    def reply(submit):
        given = gateway.deltas(submit, gateway.ids("hello world"), "stop", 1, {})[:-1]
        return [*given, Delta(submit.id, finish="error")]

    gateway.router.reply = reply
    found = events(gateway)
    assert found[-1]["type"] == "response.failed" and found[-1]["response"]["id"] == found[0]["response"]["id"]
    assert found[-1]["response"]["error"]["code"] == "server_error"
    assert found[-1]["response"]["output"][0]["status"] == "incomplete"
    status, error = gateway.post(PATH, body())
    assert status == 500 and error["error"]["type"] == "InternalServerError"


def test_a_client_that_leaves_its_stream_frees_it(gateway):
    """RSP-01, API-05"""
    gateway.says("hello", finish="length")
    gateway.router.hold = True
    inner = gateway.router.reply
    gateway.router.reply = lambda submit: inner(submit)[:-1]

    async def leave():
        scope_ready = asyncio.Event()

        async def receive():
            if not scope_ready.is_set():
                scope_ready.set()
                return {"type": "http.request", "body": json.dumps(body(stream=True)).encode()}
            while not got:
                await asyncio.sleep(0)
            assert gateway.service.open_requests == 1
            return {"type": "http.disconnect"}

        got: list[bytes] = []

        async def send(message):
            if message.get("body"):
                got.append(message["body"])

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": PATH, "raw_path": PATH.encode(), "query_string": b""}
        scope |= {"headers": headers, "http_version": "1.1", "scheme": "http", "root_path": ""}
        await gateway.app(scope, receive, send)

    asyncio.run(leave())
    assert gateway.router.generations[-1].closed and gateway.service.open_requests == 0


# Custom tools


@pytest.mark.parametrize("text", ["plain", 'quo"te', "line\nand\ttab", "back\\slash", "中文🎉", "", '{"input": 1}'])
def test_a_custom_tool_gets_its_text_decoded_as_it_comes(gateway, text):
    for escaped in (True, False):
        arguments = json.dumps({"input": text}, ensure_ascii=escaped)
        found = events(gateway.says(call("note", arguments)), tools=[WEATHER, NOTE])
        (item,) = found[-1]["response"]["output"]
        assert item["type"] == "custom_tool_call" and item["input"] == text and item["name"] == "note"
        assert item["id"].startswith("ctc_")
        assert bare(whole(gateway, tools=[WEATHER, NOTE])["output"][0]) == bare(item)


def test_a_custom_tool_is_a_bound_function_of_one_text(gateway):
    gateway.says("hello")
    form = {"type": "grammar", "syntax": "regex", "definition": "[a-z]+"}
    reply = whole(gateway, tools=[{**NOTE, "format": form}])
    assert '"pattern": "^(?:[a-z]+)$"' in prompt(gateway)
    grammar = gateway.submits[-1].grammar
    assert grammar is not None and "[a-z]+" in grammar.text
    assert reply["tools"] == [{**NOTE, "format": form}]
    error = refused(gateway, tools=[{**NOTE, "format": {**form, "syntax": "lark"}}])
    assert error["param"] == "tools" and "Use regex" in error["message"]


# Input


def test_a_string_and_items_make_the_same_prompt(gateway):
    gateway.says("hello")
    whole(gateway, instructions="Be short", input="hello")
    first = prompt(gateway)
    assert "<|im_start|>system\nBe short<|im_end|>" in first and "<|im_start|>user\nhello<|im_end|>" in first
    for item in (
        {"role": "user", "content": "hello"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]},
    ):
        whole(gateway, instructions="Be short", input=[item])
        assert prompt(gateway) == first
    whole(gateway, input=[{"role": "developer", "content": "Be short"}, {"role": "user", "content": "hello"}])
    assert prompt(gateway) == first


def test_a_history_has_the_prompt_of_chat_with_and_without_ids_and_status(gateway):
    """RS-10"""
    gateway.says("hello")
    history = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "reasoning": "stop", "content": "the answer",
         "tool_calls": [{"id": "c1", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
        {"role": "assistant", "content": "is 42"},
        {"role": "user", "content": "world"},
    ]  # fmt: skip
    gateway.post("/v1/chat/completions", {"messages": history})
    expected = prompt(gateway)
    full = [
        {"type": "message", "role": "user", "content": "hello", "id": "msg_0", "status": "completed"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "status": "completed", "encrypted_content": None,
         "content": [{"type": "reasoning_text", "text": "stop"}]},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
         "content": [{"type": "output_text", "text": "the answer", "annotations": [], "logprobs": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "weather", "arguments": '{"city": "Oslo"}',
         "status": "completed"},
        {"type": "function_call_output", "call_id": "c1", "output": "42", "id": "fco_1", "status": "completed"},
        {"type": "message", "role": "assistant", "content": "is 42"},
        {"role": "user", "content": "world"},
    ]  # fmt: skip
    whole(gateway, input=full)
    assert prompt(gateway) == expected
    short = [{key: value for key, value in item.items() if key not in ("id", "status")} for item in full]
    short[1] = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "stop"}]}
    short[4]["output"] = [{"type": "input_text", "text": "42"}]
    whole(gateway, input=short)
    assert prompt(gateway) == expected


def test_an_unfinished_last_message_is_continued(gateway):
    """RS-15, RSP-03"""
    gateway.says(" is 42")
    user = {"role": "user", "content": "hello"}
    part = {"type": "output_text", "text": "The answer"}
    for status, content in (("in_progress", [part]), ("incomplete", "The answer")):
        last = {"type": "message", "role": "assistant", "status": status, "content": content}
        reply = whole(gateway, input=[user, last])
        assert prompt(gateway).endswith("<|im_start|>assistant\nThe answer")
        assert reply["output"][0]["content"][0]["text"] == " is 42"
    for last in (
        {"role": "assistant", "status": "completed", "content": "The answer"},
        {"role": "assistant", "content": "The answer"},
        {"role": "user", "status": "incomplete", "content": "The answer"},
    ):
        whole(gateway, input=[user, last])
        assert prompt(gateway).endswith("<|im_end|>\n<|im_start|>assistant\n")
    # It is not the last message, so it is history.
    whole(gateway, input=[{"role": "assistant", "status": "incomplete", "content": "The answer"}, user])
    assert prompt(gateway).endswith("<|im_start|>assistant\n")


def test_an_unfinished_last_thought_is_continued(gateway):
    """RS-15, RSP-03"""
    gateway.says(" world\n</think>\n\nhello")
    user = {"role": "user", "content": "hello"}
    for status in ("in_progress", "incomplete"):
        last = {
            "type": "reasoning",
            "summary": [],
            "status": status,
            "content": [{"type": "reasoning_text", "text": "stop"}],
        }
        reply = whole(gateway, input=[user, last])
        assert prompt(gateway).endswith("<|im_start|>assistant\n<think>\nstop")
        assert reply["output"][0]["content"][0]["text"] == " world"
        assert reply["output"][1]["content"][0]["text"] == "hello"
    assert (
        refused(gateway, input=[user, {"type": "reasoning", "summary": [], "status": "incomplete"}])["param"] == "input"
    )


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ({"type": "mcp_call", "id": "x"}, "items of type 'mcp_call' are not supported. Allowed: message, reasoning"),
        ({"type": "message", "role": "critic", "content": "x"}, "input[0].role must be user, assistant, system or"),
        ({"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}, "the model accepts only text"),
        ({"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}, "Allowed: input_text, output_text"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "needs a string in 'text'"),
        ({"role": "user", "content": 3}, "must be a string or a list of parts"),
        ({"type": "function_call", "call_id": "c", "name": "f"}, "arguments must be a string"),
        ({"type": "function_call", "name": "f", "arguments": "{}"}, "call_id must be a non-empty string"),
        ({"type": "reasoning", "summary": [], "encrypted_content": "x"}, "encrypted reasoning is not supported"),
        ({"type": "item_reference", "id": "msg_1"}, "no item with id 'msg_1' is stored"),
    ],
)  # fmt: skip
def test_unsupported_items_are_named(gateway, item, words):
    error = refused(gateway, input=[item])
    assert words in error["message"] and error["param"] == "input" and error["type"] == "invalid_request_error"


def test_truncation_leaves_out_the_oldest_messages_and_keeps_the_instructions(make_gateway):
    gateway = make_gateway(max_context=256).says("hello")
    items = [
        {"role": "user" if at % 2 == 0 else "assistant", "content": f"number {at} " + "hello " * 12} for at in range(21)
    ]
    error = refused(gateway, input=items, instructions="Be short", max_output_tokens=20)
    assert "maximum context length is 256" in error["message"]
    assert (
        whole(gateway, input=items, instructions="Be short", max_output_tokens=20, truncation="auto")["truncation"]
        == "auto"
    )
    text, length = prompt(gateway), len(gateway.submits[-1].prompt)
    assert "Be short" in text and "number 20 " in text and "number 0 " not in text
    assert length + 20 <= 256
    kept = [at for at in range(21) if f"number {at} " in text]
    assert kept == list(range(kept[0], 21))
    one_more = length + len(gateway.ids(f"<|im_start|>user\nnumber {kept[0] - 1} " + "hello " * 12 + "<|im_end|>\n"))
    assert one_more + 20 > 256
    whole(gateway, input="hello", truncation="auto")
    assert "hello" in prompt(gateway)
    error = refused(gateway, input="hello " * 900, truncation="auto")
    assert "maximum context length" in error["message"]


def test_results_of_calls_that_are_left_out_go_with_them(make_gateway):
    gateway = make_gateway(max_context=256).says("hello")
    items = []
    for at in range(9):
        items.append({"type": "function_call", "call_id": f"c{at}", "name": "f", "arguments": '{"city": "Oslo"}'})
        items.append({"type": "function_call_output", "call_id": f"c{at}", "output": f"result {at} " + "hello " * 12})
    whole(gateway, input=[*items, {"role": "user", "content": "go"}], truncation="auto")
    text = prompt(gateway)
    assert text.count("<tool_call>") == text.count("result ") > 0


# Tools and formats


def test_a_tool_choice_without_tools_is_refused(gateway):
    """RS-16"""
    for choice in ("required", {"type": "function", "name": "weather"}):
        error = refused(gateway, tool_choice=choice)
        assert error["param"] == "tool_choice" and "tools must be set" in error["message"]
    for choice in ("auto", "none", None):
        whole(gateway.says("hello"), tool_choice=choice, tools=[])


@pytest.mark.parametrize("kind", ["web_search", "file_search", "mcp", "code_interpreter", "image_generation", "shell"])
def test_hosted_tools_are_refused_by_name(gateway, kind):
    error = refused(gateway, tools=[{"type": kind}])
    assert error["param"] == "tools" and repr(kind) in error["message"] and "function and custom" in error["message"]


def test_tool_choices_bind_the_reply(gateway):
    gateway.says(call("weather", '{"city": "Oslo"}'))
    tools = [WEATHER, {"type": "function", "name": "other", "parameters": {"type": "object"}}]
    whole(gateway, tools=tools, tool_choice={"type": "function", "name": "weather"})
    named = gateway.submits[-1].grammar.text
    assert "weather" in named and "other" not in named
    whole(gateway, tools=tools, tool_choice="required")
    assert "other" in gateway.submits[-1].grammar.text
    whole(gateway, tools=tools)
    assert gateway.submits[-1].grammar is None
    for mode in ("auto", "required"):
        allowed = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "other"}]}
        reply = whole(gateway, tools=tools, tool_choice=allowed)
        grammar = gateway.submits[-1].grammar.text
        assert "other" in grammar and "weather" not in grammar and reply["tool_choice"] == allowed
        assert "weather" in prompt(gateway)
    assert reply["tools"][1]["strict"] is None and reply["tools"][0]["description"] == "Of a city"
    error = refused(gateway, tools=tools, tool_choice={"type": "function", "name": "nobody"})
    assert error["param"] == "tool_choice"
    bad = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "nobody"}]}
    assert refused(gateway, tools=tools, tool_choice=bad)["param"] == "tool_choice"
    assert refused(gateway, tools=tools, tool_choice={"type": "web_search"})["param"] == "tool_choice"


def test_a_text_format_constrains_the_reply_and_is_echoed(gateway):
    gateway.says('{"city": "Oslo"}')
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    form = {"type": "json_schema", "name": "place", "schema": schema, "strict": True}
    reply = whole(gateway, text={"format": form, "verbosity": "low"})
    assert json.dumps(schema)[:-1] in gateway.submits[-1].grammar.text
    assert reply["text"]["format"] == {**form, "description": None} and reply["text"]["verbosity"] == "low"
    whole(gateway, text={"format": {"type": "json_object"}})
    assert gateway.submits[-1].grammar is not None
    whole(gateway, text={"format": {"type": "text"}})
    assert gateway.submits[-1].grammar is None
    assert refused(gateway, text={"format": {"type": "json_schema", "name": "x"}})["param"] == "text.format.schema"
    bad = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nonsense"}}}
    assert refused(gateway, text=bad)["param"] == "text.format"
    both = {"text": {"format": form}, "structured_outputs": {"regex": "a+"}}
    assert refused(gateway, **both)["param"] == "structured_outputs"
    whole(gateway, structured_outputs={"json": schema})
    assert gateway.submits[-1].grammar is not None


def test_effort_reaches_the_template(gateway):
    gateway.says("hello")
    reply = whole(gateway, reasoning={"effort": "none", "summary": "auto"})
    assert prompt(gateway).endswith("<think>\n\n</think>\n\n")
    assert reply["reasoning"] == {"effort": "none", "summary": "auto"}
    whole(gateway, reasoning={"effort": "high"})
    assert prompt(gateway).endswith("<|im_start|>assistant\n")


def test_sampling_fields_apply_and_are_returned(gateway):
    gateway.says("hello")
    reply = whole(gateway, temperature=0.5, top_p=0.25, seed=7, top_k=3, presence_penalty=0.5, stop=["END"])
    sampling = gateway.submits[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed, sampling.top_k) == (0.5, 0.25, 7, 3)
    assert (reply["temperature"], reply["top_p"], reply["presence_penalty"]) == (0.5, 0.25, 0.5)
    gateway.says("hello END world")
    assert whole(gateway, stop="END")["output"][0]["content"][0]["text"] == "hello "
    found = events(gateway, stop="END")
    assert check_order(found)["status"] == "completed"
    assert gateway.router.generations[-1].stopped


def test_the_response_repeats_the_request_fields(gateway):
    gateway.says("hello")
    told = {"metadata": {"a": "b"}, "user": "u", "safety_identifier": "s", "prompt_cache_key": "p", "max_tool_calls": 3,
            "max_output_tokens": 9, "instructions": "Be short", "parallel_tool_calls": False}  # fmt: skip
    reply = whole(gateway, service_tier="flex", **told)
    assert {name: reply[name] for name in told} == told
    assert reply["service_tier"] == "default" and reply["model"] == "qwen" and reply["store"] is False
    assert gateway.router.placements[-1].session == "p"
    whole(gateway, prompt_cache_key="p", session_id="s")
    assert gateway.router.placements[-1].session == "s"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"include": ["everything"]}, "include"),
        ({"background": True}, "background"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 2000}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"input": []}, "input"),
        ({"input": ...}, "body.input"),
        ({"metadata": {"k" * 65: "v"}}, "body.metadata"),
        ({"metadata": {str(at): "v" for at in range(17)}}, "body.metadata"),
        ({"truncation": "middle"}, "body.truncation"),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 21}, "top_logprobs"),
        ({"chat_template": "x"}, "chat_template"),
    ],
)  # fmt: skip
def test_mistakes_name_their_field(gateway, fields, param):
    error = refused(gateway, **fields)
    assert (error["param"] or "").startswith(param), error
    assert "max_completion_tokens" not in error["message"] and "messages" not in error["message"]


def test_unknown_models_and_unknown_responses_are_refused(gateway):
    assert gateway.post(PATH, body(model="nobody"))[1]["error"]["param"] == "model"
    status, reply = gateway.post(PATH, body(previous_response_id="resp_1"))
    assert status == 404 and "Response with id 'resp_1' not found." in reply["error"]["message"]


def test_input_is_counted_as_it_would_be_submitted(gateway):
    gateway.says("hello")
    asked = {"instructions": "Be short", "tools": [WEATHER], "reasoning": {"effort": "none"}}
    status, counted = gateway.post(PATH + "/input_tokens", body(**asked))
    assert status == 200 and not gateway.submits
    used = whole(gateway, **asked)["usage"]["input_tokens"]
    assert counted == {"object": "response.input_tokens", "input_tokens": used}
    assert gateway.post(PATH + "/input_tokens", {"instructions": "Be short"})[1]["input_tokens"] > 0


def test_profiles_differ_in_one_field(make_gateway):
    assert "kv_transfer_params" in whole(make_gateway(**{"endpoints.compat": "vllm"}).says("hello"))
    assert "kv_transfer_params" not in whole(make_gateway(**{"endpoints.compat": "openai"}).says("hello"))


# The official client


class City(BaseModel):
    city: str


def test_the_official_client_reads_replies_and_streams(gateway):
    """RS-17"""
    gateway.says(THOUGHT + "hello world")

    async def work(client: openai.AsyncOpenAI):
        reply = await client.responses.create(model="qwen", input="hello")
        async with client.responses.stream(model="qwen", input="hello") as stream:
            text = "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])
            final = await stream.get_final_response()
        return reply, text, final

    reply, text, final = gateway.openai(work)
    assert reply.output_text == text == final.output_text == "hello world"
    assert final.output[0].content[0].text == "hello world" and final.usage.output_tokens > 0


def test_the_official_client_parses_a_schema_and_calls(gateway):
    async def parse(client: openai.AsyncOpenAI):
        return await client.responses.parse(model="qwen", input="hello", text_format=City)

    assert gateway.says('{"city": "Oslo"}').openai(parse).output_parsed == City(city="Oslo")

    async def stream(client: openai.AsyncOpenAI):
        tool = openai.pydantic_function_tool(City, name="weather")["function"]
        tools = [{"type": "function", **tool}]
        async with client.responses.stream(model="qwen", input="hello", tools=tools) as stream:
            async for _ in stream:
                pass
            return await stream.get_final_response()

    (item,) = gateway.says(call("weather", '{"city": "Oslo"}')).openai(stream).output
    assert City.model_validate(item.parsed_arguments) == City(city="Oslo")


def test_the_official_client_raises_at_a_stream_that_was_cut_or_failed(gateway):
    """RS-07, RS-14"""

    async def final(client: openai.AsyncOpenAI):
        async with client.responses.stream(model="qwen", input="hello") as stream:
            return [event.type async for event in stream], await stream.get_final_response()

    with pytest.raises(RuntimeError):
        gateway.says("hello", finish="length").openai(final)
