"""Tools of chat completions in all their forms: none, custom, functions; calls of tools that were not offered."""

import json
from typing import Any

import openai
import pytest

from engine.structured.grammar import Compiler

PATH = "/v1/chat/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "get_weather", "description": "d", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
OTHER = CALL.replace("get_weather", "launch")
CUSTOM = {"type": "custom", "custom": {"name": "run", "description": "Runs code"}}
CODE = 'print("a\\b")\n# 中'
CODE_CALL = f'<tool_call>\n{{"name": "run", "arguments": {{"input": {json.dumps(CODE)}}}}}\n</tool_call>'


def choice(gateway: Any, **fields: Any) -> dict[str, Any]:
    status, reply = gateway.post(PATH, {**HELLO, **fields})
    assert status == 200, reply
    found: dict[str, Any] = reply["choices"][0]
    return found


def fault(gateway: Any, **fields: Any) -> dict[str, Any]:
    status, reply = gateway.says("x").post(PATH, {**HELLO, **fields})
    assert status == 400, reply
    found: dict[str, Any] = reply["error"]
    return found


def deltas(gateway: Any, **fields: Any) -> list[dict[str, Any]]:
    return [one["choices"][0]["delta"] for one in gateway.stream(PATH, {**HELLO, **fields}) if one["choices"]]


def prompt_text(gateway: Any) -> str:
    return str(gateway.tokenizer.decode(gateway.submits[-1].prompt, skip_special_tokens=False))


@pytest.fixture
def gateway(make_gateway: Any) -> Any:
    return make_gateway(max_context=1000)


@pytest.fixture(scope="module")
def compiler(checkpoint: Any) -> Any:
    made = Compiler(checkpoint, 420)
    yield made
    made.close()


def takes(compiler: Compiler, gateway: Any, text: str) -> bool:
    """Return True if the grammar of the last request accepts the text."""
    grammar, end = gateway.submits[-1].grammar, gateway.tokenizer.convert_tokens_to_ids("<|endoftext|>")
    matcher = compiler.compile(grammar, [end])
    for token in gateway.ids(text):
        if not matcher.mask()[token // 32] >> token % 32 & 1:
            return False
        matcher.advance(token)
    return bool(matcher.mask()[end // 32] >> end % 32 & 1)


# tool_choice none


@pytest.mark.parametrize("hidden", [False, True])
def test_choice_none_hides_the_tools_and_forbids_calls(gateway: Any, compiler: Compiler, hidden: bool) -> None:
    found = choice(gateway.says("hello"), tools=[TOOL], tool_choice="none", include_reasoning=not hidden)
    assert found["message"]["content"] == "hello" and found["finish_reason"] == "stop"
    assert "get_weather" not in prompt_text(gateway)
    assert takes(compiler, gateway, 'hello {"name": 1}')
    assert takes(compiler, gateway, "<think>\nso\n</think>\n\nhello")
    assert not takes(compiler, gateway, CALL)
    assert not takes(compiler, gateway, f"hello {CALL}")


def test_choice_none_keeps_a_response_format(gateway: Any, compiler: Compiler) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    choice(gateway.says("{}"), tools=[TOOL], tool_choice="none", response_format=form)
    assert takes(compiler, gateway, '{"city": "Oslo"}') and not takes(compiler, gateway, "hello")


def test_choice_none_counts_the_tokens_that_the_prompt_has(gateway: Any) -> None:
    body = {**HELLO, "model": "qwen", "tools": [{"name": "f", "input_schema": SCHEMA}], "tool_choice": {"type": "none"}}
    status, counted = gateway.post("/v1/messages/count_tokens", body)
    assert status == 200
    status, reply = gateway.says("x").post("/v1/messages", {**body, "max_tokens": 9})
    assert reply["usage"]["input_tokens"] == counted["input_tokens"] == len(gateway.submits[-1].prompt)


# Calls of functions that were not offered


@pytest.mark.parametrize("each", [1, 2, 1000])
def test_call_of_a_function_that_was_not_offered_is_content(gateway: Any, each: int) -> None:
    gateway.says(f"{OTHER}\n{CALL}", each=each)
    found = choice(gateway, tools=[TOOL])
    assert found["message"]["content"] == '{"name": "launch", "arguments": {"city": "Oslo"}}'
    (call,) = found["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather" and found["finish_reason"] == "tool_calls"
    streamed = deltas(gateway, tools=[TOOL])
    assert "".join(delta.get("content") or "" for delta in streamed) == found["message"]["content"]
    calls = [call for delta in streamed for call in delta.get("tool_calls", ())]
    assert {call["index"] for call in calls} == {0}
    assert json.loads("".join(call["function"].get("arguments", "") for call in calls)) == {"city": "Oslo"}


def test_reply_with_no_call_that_was_offered_stops(gateway: Any) -> None:
    found = choice(gateway.says(OTHER), tools=[TOOL])
    assert "tool_calls" not in found["message"] and found["finish_reason"] == "stop"
    tool = {"type": "function", "name": "get_weather", "parameters": SCHEMA}
    reply = gateway.post("/v1/responses", {"input": "a", "tools": [tool]})[1]
    assert [item["type"] for item in reply["output"]] == ["message"]
    body = {**HELLO, "model": "qwen", "max_tokens": 99, "tools": [{"name": "get_weather", "input_schema": SCHEMA}]}
    reply = gateway.post("/v1/messages", body)[1]
    assert [block["type"] for block in reply["content"]] == ["text"] and reply["stop_reason"] == "end_turn"


def test_call_that_was_not_offered_is_content_when_it_is_cut(gateway: Any) -> None:
    cut = OTHER.removesuffix('lo"}}\n</tool_call>')
    found = choice(gateway.says(cut, finish="length"), tools=[TOOL])
    assert found["message"]["content"] == '{"name": "launch", "arguments": {"city": "Os}'
    assert found["finish_reason"] == "length"


def test_response_of_a_required_call_that_is_cut_has_an_item(gateway: Any) -> None:
    tool = {"type": "function", "name": "get_weather", "parameters": SCHEMA}
    body = {"input": "a", "tools": [tool], "tool_choice": "required", "max_output_tokens": 2}
    reply = gateway.says("<tool_call>\n", finish="length").post("/v1/responses", body)[1]
    assert reply["status"] == "incomplete"
    (item,) = reply["output"]
    assert item["type"] == "message" and item["status"] == "incomplete"


# functions and function_call


def test_functions_get_a_function_call(gateway: Any) -> None:
    gateway.says(f"{CALL}\n{CALL}")
    found = choice(gateway, functions=[FUNCTION])
    assert found["message"]["function_call"] == {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    assert "tool_calls" not in found["message"] and found["finish_reason"] == "function_call"
    legacy = gateway.submits[-1].prompt
    choice(gateway, tools=[TOOL])
    assert gateway.submits[-1].prompt == legacy


@pytest.mark.parametrize("each", [1, 1000])
def test_stream_of_a_function_call(gateway: Any, each: int) -> None:
    records = gateway.says(CALL, each=each).stream(PATH, {**HELLO, "functions": [FUNCTION], "function_call": "auto"})
    pieces = [one["choices"][0]["delta"].get("function_call") for one in records]
    pieces = [piece for piece in pieces if piece]
    assert [piece["name"] for piece in pieces if "name" in piece] == ["get_weather"]
    assert json.loads("".join(piece.get("arguments", "") for piece in pieces)) == {"city": "Oslo"}
    assert records[-1]["choices"][0]["finish_reason"] == "function_call"
    assert not any("tool_calls" in one["choices"][0]["delta"] for one in records)


def test_forced_function_call(gateway: Any, compiler: Compiler) -> None:
    found = choice(gateway.says(CALL), functions=[FUNCTION], function_call={"name": "get_weather"})
    assert found["finish_reason"] == "stop" and found["message"]["function_call"]["name"] == "get_weather"
    assert takes(compiler, gateway, CALL) and not takes(compiler, gateway, "hello")


def test_function_call_none(gateway: Any) -> None:
    found = choice(gateway.says("hello"), functions=[FUNCTION], function_call="none")
    assert found["message"]["function_call"] is None
    assert "get_weather" not in prompt_text(gateway)


def test_history_of_function_calls(gateway: Any) -> None:
    call = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    results = ({"role": "function", "name": "get_weather", "content": "rain"}, {"role": "tool", "content": "rain"})
    calls = ({"function_call": call}, {"tool_calls": [{"id": "c", "type": "function", "function": call}]})
    prompts = []
    for called, result in zip(calls, results, strict=True):
        messages = [*HELLO["messages"], {"role": "assistant", "content": None, **called}, result]
        choice(gateway.says("x"), messages=messages, functions=[FUNCTION])
        prompts.append(gateway.submits[-1].prompt)
    assert prompts[0] == prompts[1]


def test_invalid_function_call_is_rejected(gateway: Any) -> None:
    assert fault(gateway, functions=[FUNCTION], tools=[TOOL])["param"] == "functions"
    assert fault(gateway, functions=[])["param"] == "functions"
    assert fault(gateway, functions=[FUNCTION], function_call={"name": "x"})["param"] == "function_call"
    assert fault(gateway, functions=[FUNCTION], function_call={"name": ["x"]})["param"] == "function_call"
    assert fault(gateway, functions=[FUNCTION], function_call="required")["param"] == "function_call"
    assert fault(gateway, function_call={"name": "x"})["param"] == "functions"
    assert fault(gateway, functions=[FUNCTION], tool_choice="auto")["param"] == "function_call"


# Custom tools


@pytest.mark.parametrize("each", [1, 3, 1000])
def test_custom_tool_gets_its_text(gateway: Any, each: int) -> None:
    gateway.says(CODE_CALL, each=each)
    found = choice(gateway, tools=[CUSTOM, TOOL])
    (call,) = found["message"]["tool_calls"]
    assert call["type"] == "custom" and call["custom"] == {"name": "run", "input": CODE}
    assert found["finish_reason"] == "tool_calls"
    calls = [call for delta in deltas(gateway, tools=[CUSTOM, TOOL]) for call in delta.get("tool_calls", ())]
    assert calls[0]["type"] == "custom" and calls[0]["custom"]["name"] == "run" and calls[0]["id"]
    assert "".join(call["custom"]["input"] for call in calls) == CODE


def test_custom_tool_can_be_forced_and_bound(gateway: Any, compiler: Compiler) -> None:
    form = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[a-z]+"}}
    tool = {"type": "custom", "custom": {**CUSTOM["custom"], "format": form}}  # type: ignore[dict-item]
    forced = {"type": "custom", "custom": {"name": "run"}}
    call = '<tool_call>\n{"name": "run", "arguments": {"input": "abc"}}\n</tool_call>'
    found = choice(gateway.says(call), tools=[tool, TOOL], tool_choice=forced)
    assert found["message"]["tool_calls"][0]["custom"]["input"] == "abc"
    assert takes(compiler, gateway, call) and not takes(compiler, gateway, call.replace("abc", "123"))
    allowed = {"mode": "required", "tools": [forced]}
    choice(gateway, tools=[tool, TOOL], tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert takes(compiler, gateway, call) and not takes(compiler, gateway, CALL)


def test_history_of_custom_calls(gateway: Any) -> None:
    custom = {"id": "c", "type": "custom", "custom": {"name": "run", "input": CODE}}
    function = {"id": "c", "type": "function", "function": {"name": "run", "arguments": json.dumps({"input": CODE})}}
    prompts = []
    for call in (custom, function):
        messages = [
            *HELLO["messages"],
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "1"},
        ]
        choice(gateway.says("x"), messages=messages, tools=[CUSTOM])
        prompts.append(gateway.submits[-1].prompt)
    assert prompts[0] == prompts[1]


def test_invalid_custom_tools_are_rejected(gateway: Any) -> None:
    lark = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "a"'}}
    for wrong in (lark, {"type": "text2"}, {"type": "grammar"}, {"type": "grammar", "grammar": {"syntax": ["regex"]}}):
        tool = {"type": "custom", "custom": {"name": "run", "format": wrong}}
        assert fault(gateway, tools=[tool])["param"] == "tools", wrong
    assert fault(gateway, tools=[{"type": "custom"}])["param"].startswith("body.tools")
    call = {"id": "c", "type": "custom", "custom": {"name": "run", "input": {}}}
    assert fault(gateway, messages=[{"role": "assistant", "tool_calls": [call]}])["param"] == "messages"


def test_official_client_reads_both_forms(gateway: Any) -> None:
    async def ask(client: openai.AsyncOpenAI) -> Any:
        legacy = await client.chat.completions.create(model="qwen", **HELLO, functions=[FUNCTION])
        gateway.says(CODE_CALL)
        custom = await client.chat.completions.create(model="qwen", **HELLO, tools=[CUSTOM])
        return legacy.choices[0].message, custom.choices[0].message

    legacy, custom = gateway.says(CALL).openai(ask)
    assert legacy.function_call.name == "get_weather"
    assert custom.tool_calls[0].type == "custom" and custom.tool_calls[0].custom.input == CODE


# Details


@pytest.mark.parametrize("parameters", [[], {"type": "object", "properties": []}])
def test_empty_lists_are_empty_objects(gateway: Any, parameters: Any) -> None:
    tool = {"type": "function", "function": {"name": "now", "parameters": parameters}}
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert choice(gateway.says(call), tools=[tool], tool_choice="required")["message"]["tool_calls"]
    assert fault(gateway, tools=[{"type": "function", "function": {"name": "now", "parameters": [1]}}])
    message = {**HELLO, "model": "qwen", "max_tokens": 99, "tools": [{"name": "now", "input_schema": parameters}]}
    assert gateway.post("/v1/messages", message)[0] == 200
    response = {"input": "a", "tools": [{"type": "function", "name": "now", "parameters": parameters}]}
    assert gateway.post("/v1/responses", response)[0] == 200


@pytest.mark.parametrize("kind", [["text"], {"a": 1}, 1, None, "unheard_of"])
def test_part_types_that_are_no_names(gateway: Any, kind: Any) -> None:
    part = {"type": kind, "text": "x"}
    assert fault(gateway, messages=[{"role": "user", "content": [part]}])["param"] == "messages"
    body = {"input": [{"role": "user", "content": [part]}]}
    assert gateway.post("/v1/responses", body)[0] == 400
    message = {"model": "qwen", "max_tokens": 9, "messages": [{"role": "user", "content": [part]}]}
    assert gateway.post("/v1/messages", message)[0] == 400
    assert gateway.post("/v1/responses", {"input": [{"role": "user", "content": "x", "id": kind}]})[0] in (200, 400)


@pytest.mark.parametrize("penalty", [1e-300, 1e-9, 1e300, 1e5])
def test_penalties_beyond_float32_are_refused(gateway: Any, penalty: float) -> None:
    assert fault(gateway, repetition_penalty=penalty)["param"] == "repetition_penalty"
    assert choice(gateway.says("x"), repetition_penalty=1e-3)


@pytest.mark.parametrize("path", [PATH, "/v1/completions"])
def test_chunks_before_the_usage_say_null(make_gateway: Any, path: str) -> None:
    body = {**(HELLO if path == PATH else {"prompt": "a"}), "stream_options": {"include_usage": True}}
    for compat in ("openai", "vllm"):
        *before, last = make_gateway(**{"endpoints.compat": compat}).says("hello").stream(path, body)
        assert last["usage"]["completion_tokens"] > 0
        for chunk in before:
            assert ("usage" in chunk, chunk.get("usage")) == (compat == "openai", None)
    body["stream_options"]["continuous_usage_stats"] = True
    assert all(
        chunk["usage"] for chunk in make_gateway(**{"endpoints.compat": "openai"}).says("hello").stream(path, body)
    )


def test_role_of_a_continued_message(make_gateway: Any) -> None:
    for compat, role in (("openai", "assistant"), ("vllm", "user")):
        gateway = make_gateway(**{"endpoints.compat": compat}).says("x")
        assert choice(gateway, continue_final_message=True)["message"]["role"] == role
        assert deltas(gateway, continue_final_message=True)[0]["role"] == role


@pytest.mark.parametrize(
    ("kind", "name", "commands"),
    [
        ("bash_20250124", "bash", None),
        ("text_editor_20250124", "str_replace_editor", "undo_edit"),
        ("text_editor_20250728", "str_replace_based_edit_tool", "insert"),
        ("memory_20250818", "memory", "rename"),
    ],
)
def test_tools_that_anthropics_client_runs(make_gateway: Any, kind: str, name: str, commands: str | None) -> None:
    gateway = make_gateway(max_context=4000)
    body = {**HELLO, "model": "qwen", "max_tokens": 99, "tools": [{"type": kind, "name": name}]}
    arguments = {"command": commands or "ls", "path": "/a"} if commands else {"command": "ls"}
    call = f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
    status, reply = gateway.says(call).post("/v1/messages", body)
    assert status == 200, reply
    (block,) = reply["content"]
    assert block["type"] == "tool_use" and block["input"] == arguments
    assert name in prompt_text(gateway) and (commands or "restart") in prompt_text(gateway)
    status, reply = gateway.post("/v1/messages", {**body, "tools": [{"type": "computer_20250124", "name": "computer"}]})
    assert status == 400 and "computer_20250124" in reply["error"]["message"]
