"""/v1/chat/completions (docs/http.md): every id against scripted engines, and the official client."""

import asyncio
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel

PATH = "/v1/chat/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "d", "parameters": PARAMETERS}}
TOOLS: dict[str, Any] = {**HELLO, "tools": [TOOL]}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
THOUGHT = "<think>\nuser wants weather\n</think>\n\n"


def whole(gateway: Any, body: dict[str, Any]) -> dict[str, Any]:
    status, reply = gateway.post(PATH, {**HELLO, **body})
    assert status == 200, reply
    found: dict[str, Any] = reply
    return found


def message(gateway: Any, body: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = whole(gateway, body)["choices"][0]["message"]
    return found


def error(gateway: Any, body: dict[str, Any]) -> dict[str, Any]:
    status, reply = gateway.post(PATH, {**HELLO, **body})
    assert status == 400, reply
    assert not gateway.submits
    fault: dict[str, Any] = reply["error"]
    return fault


def deltas(gateway: Any, body: dict[str, Any]) -> list[dict[str, Any]]:
    records = gateway.stream(PATH, {**HELLO, **body})
    return [record["choices"][0]["delta"] for record in records if record["choices"]]


def prompt_text(gateway: Any, at: int = -1) -> str:
    text: str = gateway.tokenizer.decode(gateway.submits[at].prompt, skip_special_tokens=False)
    return text


@pytest.mark.parametrize("compat", ["vllm", "openai"])
def test_usage_has_three_fields_and_details_by_profile(make_gateway: Callable[..., Any], compat: str) -> None:
    """CH-01: in the vllm profile exactly three; openai adds cached and reasoning tokens."""
    gateway = make_gateway(**{"endpoints.compat": compat})
    usage = whole(gateway.says(f"{THOUGHT}hi", cached_tokens=2), {})["usage"]
    prompt, reply = len(gateway.submits[0].prompt), len(gateway.ids(f"{THOUGHT}hi")) + 1
    plain = {"prompt_tokens": prompt, "completion_tokens": reply, "total_tokens": prompt + reply}
    if compat == "vllm":
        assert usage == plain
    else:
        thought = len(gateway.ids("\nuser wants weather\n"))
        assert usage["prompt_tokens_details"] == {"cached_tokens": 2, "cache_write_tokens": 0}
        assert abs(usage["completion_tokens_details"]["reasoning_tokens"] - thought) <= 1


@pytest.mark.parametrize("each", [1, 3, 100])
@pytest.mark.parametrize("finish", ["length", "stop"])
def test_a_stream_adds_up_to_the_whole_reply(gateway: Any, each: int, finish: str) -> None:
    """CH-02: one finish_reason, equal to the whole reply's; the last chunk carries text when the length ended it."""
    gateway.says("hello 中文 🎉 world", finish=finish, each=each)
    choice = whole(gateway, {})["choices"][0]
    records = gateway.stream(PATH, HELLO)
    found = [record["choices"][0] for record in records]
    assert "".join(part["delta"].get("content", "") for part in found) == choice["message"]["content"]
    assert [part["finish_reason"] for part in found if part["finish_reason"]] == [choice["finish_reason"]] == [finish]
    assert found[-1]["finish_reason"] and (finish == "stop" or found[-1]["delta"]["content"])


def test_the_role_comes_once_per_choice_and_first(gateway: Any) -> None:
    """CH-03"""
    found = deltas(gateway.says("hello world"), {})
    assert found[0] == {"role": "assistant", "content": ""}
    assert not any("role" in delta for delta in found[1:])


def test_all_chunks_have_the_same_head(gateway: Any) -> None:
    """CH-04"""
    body = {**HELLO, "model": "alias", "stream_options": {"include_usage": True}}
    records = gateway.says("hello world").stream(PATH, body)
    heads = {(record["id"], record["created"], record["model"], record["object"]) for record in records}
    assert len(heads) == 1
    assert next(iter(heads))[2:] == ("qwen", "chat.completion.chunk")


@pytest.mark.parametrize(
    "options,every,last",
    [
        ({}, False, False),
        ({"include_usage": True}, False, True),
        ({"include_usage": True, "continuous_usage_stats": True}, True, True),
        ({"include_usage": False, "continuous_usage_stats": True}, False, False),
    ],
)
def test_stream_options_say_which_chunks_have_usage(
    gateway: Any, options: dict[str, Any], every: bool, last: bool
) -> None:
    """CH-05: the count starts with 0 at the role and grows with every token."""
    records = gateway.says("one two").stream(PATH, {**HELLO, "stream_options": options})
    body = records[:-1] if last else records
    assert all(("usage" in record) == every for record in body)
    assert (records[-1]["choices"] == []) == last
    if every:
        assert [record["usage"]["completion_tokens"] for record in body] == list(range(len(body)))
        assert records[-1]["usage"] == body[-1]["usage"]


def test_stream_options_without_a_stream_are_refused(gateway: Any) -> None:
    """CH-05"""
    assert error(gateway, {"stream_options": {}})["param"] == "stream_options"


@pytest.mark.parametrize("rank", [1, 9])
@pytest.mark.parametrize("count", [0, 5, 20])
def test_top_logprobs_are_the_true_most_likely_ones(gateway: Any, rank: int, count: int) -> None:
    """CH-06: a token outside the top k does not displace the k-th."""
    gateway.rank = rank
    found = whole(gateway.says("a中", finish="length"), {"logprobs": True, "top_logprobs": count})
    content = found["choices"][0]["logprobs"]["content"]
    assert "".join(token["token"] for token in content) == "a中"
    assert [len(token["top_logprobs"]) for token in content] == [count] * len(content)
    assert all(bytes(token["bytes"]).decode() == token["token"] for token in content)
    if count:
        assert [top["logprob"] for top in content[0]["top_logprobs"]] == [-0.5 * (at + 1) for at in range(count)]


@pytest.mark.parametrize("count", [21, -2])
def test_top_logprobs_beyond_the_limit_are_refused(gateway: Any, count: int) -> None:
    """CH-06"""
    assert error(gateway, {"logprobs": True, "top_logprobs": count})["param"] == "top_logprobs"


@pytest.mark.parametrize("body", [{"top_logprobs": 3}, {"logprobs": False, "top_logprobs": 1}])
def test_top_logprobs_need_logprobs(gateway: Any, body: dict[str, Any]) -> None:
    """CH-07"""
    assert error(gateway, body)["param"] == "top_logprobs"


def test_top_logprobs_must_be_an_integer(gateway: Any) -> None:
    """CH-07"""
    assert error(gateway, {"logprobs": True, "top_logprobs": 1.5})["param"] == "body.top_logprobs"


def test_prompt_logprobs_are_not_streamed(gateway: Any) -> None:
    """CH-08"""
    fault = error(gateway, {"stream": True, "prompt_logprobs": 1})
    assert fault["message"] == "prompt_logprobs are not available when stream=True"
    assert gateway.says("x").stream(PATH, {**HELLO, "prompt_logprobs": 0})


@pytest.mark.parametrize("count", [0, 1, 2])
def test_prompt_logprobs_are_next_to_the_choices(gateway: Any, count: int) -> None:
    """CH-09"""
    found = whole(gateway.says("x"), {"prompt_logprobs": count})["prompt_logprobs"]
    assert found[0] is None and len(found) == len(gateway.submits[0].prompt)
    assert all(len(scores) == max(1, count) for scores in found[1:])


def test_prompt_logprobs_of_all_tokens_are_refused_and_null_gives_none(gateway: Any) -> None:
    """CH-09"""
    assert error(gateway, {"prompt_logprobs": -1})["param"] == "prompt_logprobs"
    assert whole(gateway.says("x"), {"prompt_logprobs": None})["prompt_logprobs"] is None


def test_a_template_in_the_request_needs_trust(gateway: Any, make_gateway: Callable[..., Any]) -> None:
    """CH-10"""
    body = {"chat_template": "{% for m in messages %}[{{ m.content }}]{% endfor %}"}
    assert error(gateway, body)["param"] == "chat_template"
    trusting = make_gateway(**{"endpoints.trust_request_chat_template": True})
    whole(trusting.says("x"), body)
    assert prompt_text(trusting) == "[hello]"
    assert (
        error(make_gateway(**{"endpoints.trust_request_chat_template": True}), {"chat_template": "{% if %}"})["param"]
        == "chat_template"
    )


def test_one_of_the_models_own_templates_may_be_named_without_trust(
    make_gateway: Callable[..., Any], checkpoint: Path, tmp_path: Path
) -> None:
    """CH-10 named templates"""
    own = shutil.copytree(checkpoint, tmp_path / "own")
    (own / "chat_template.jinja").write_text("default")
    (own / "additional_chat_templates").mkdir()
    (own / "additional_chat_templates" / "rag.jinja").write_text("rag {{ documents[0].text }}")
    gateway = make_gateway(model=str(own))
    whole(gateway.says("x"), {"chat_template": "rag", "documents": [{"text": "hello"}]})
    assert prompt_text(gateway) == "rag hello"
    whole(gateway.says("x"), {})
    assert prompt_text(gateway) == "default"
    assert error(make_gateway(model=str(own)), {"chat_template": "absent"})["param"] == "chat_template"


def test_the_last_message_is_continued_without_a_new_header(gateway: Any) -> None:
    """CH-11"""
    messages = [*HELLO["messages"], {"role": "assistant", "content": "The answer is"}]
    reply = whole(gateway.says(" 42"), {"messages": messages, "continue_final_message": True, "echo": True})
    assert prompt_text(gateway).endswith("<|im_start|>assistant\nThe answer is")
    assert reply["choices"][0]["message"]["content"] == "The answer is 42"
    fault = {"continue_final_message": True, "add_generation_prompt": True, "messages": messages}
    assert gateway.post(PATH, fault)[0] == 400


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "hologram"}],
        [{"type": "text"}],
        [{"type": "text", "text": 3}],
        [{"type": "image_url", "image_url": "http://nowhere.invalid/x.png"}],
        [{"type": "input_audio", "input_audio": {}}],
        3,
        [7],
    ],
)
def test_content_that_is_no_text_is_refused(gateway: Any, content: Any) -> None:
    """CH-12: unknown part types, missing text, media of any kind: the model takes text."""
    assert error(gateway, {"messages": [{"role": "user", "content": content}]})["param"] == "messages"


class City(BaseModel):
    city: str


def test_a_response_format_binds_the_reply(gateway: Any) -> None:
    """CH-13: the grammar sent to the engine; the client's parse() and its error for a truncated reply."""
    whole(gateway.says("{}"), {"response_format": {"type": "json_object"}, "include_reasoning": False})
    assert (gateway.submits[-1].grammar.kind, json.loads(gateway.submits[-1].grammar.text)) == (
        "json_schema",
        {"type": "object"},
    )

    async def parsed(client: openai.AsyncOpenAI) -> Any:
        reply = await client.chat.completions.parse(model="qwen", response_format=City, **HELLO)
        return reply.choices[0].message.parsed

    assert gateway.says('{"city": "Oslo"}').openai(parsed) == City(city="Oslo")
    assert '"city"' in gateway.submits[-1].grammar.text
    with pytest.raises(openai.LengthFinishReasonError):
        gateway.says('{"ci', finish="length").openai(parsed)
    fault = gateway.post(PATH, {**HELLO, "response_format": {"type": "json_schema"}})[1]["error"]
    assert fault["param"] == "response_format"


@pytest.mark.parametrize("stream", [False, True])
def test_the_last_token_of_a_complete_grammar_is_text(gateway: Any, stream: bool) -> None:
    """CH-13: the engine ends such a reply with "stop" and no end token."""
    text = '{"a": 1}'
    body = {"response_format": {"type": "json_object"}}
    gateway.gives(gateway.ids(text), finish="stop")
    if stream:
        assert "".join(delta.get("content") or "" for delta in deltas(gateway, body)) == text
    else:
        assert message(gateway, body)["content"] == text


def test_a_null_tool_choice_is_the_default(gateway: Any) -> None:
    """CH-14"""
    reply = whole(gateway.says(CALL), {**TOOLS, "tool_choice": None})
    assert reply["choices"][0]["finish_reason"] == "tool_calls"


def test_template_errors_are_request_errors(gateway: Any) -> None:
    """CH-15"""
    turns = [
        {"role": "system", "content": [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}]},
        {"role": "user", "name": "eve", "content": "a"},
        {"role": "user", "content": "b"},
    ]
    whole(gateway.says("x"), {"messages": turns})
    assert "be\nbrief" in prompt_text(gateway)
    status, reply = gateway.post(PATH, {"messages": [{"role": "forbidden", "content": "a"}]})
    assert (status, reply["error"]["type"]) == (400, "BadRequestError")
    assert "no such role here" in reply["error"]["message"]


@pytest.mark.parametrize("messages", [[], [{}], [{"content": "a"}], [{"role": ""}], ["a"], "a", None])
def test_messages_that_are_none_are_refused(gateway: Any, messages: Any) -> None:
    """CH-16"""
    assert error(gateway, {"messages": messages})["code"] == 400


def test_sampling_fields_act_as_on_completions(gateway: Any) -> None:
    """CH-17"""
    body = {
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [70],
        "bad_words": ["hello"],
        "allowed_token_ids": [1, 2],
        "logit_bias": {"70": 1},
        "max_completion_tokens": 9,
        "max_tokens": 5,
        "seed": 7,
    }
    whole(gateway.says("x"), body)
    gateway.post("/v1/completions", {**{k: v for k, v in body.items() if k != "max_completion_tokens"}, "prompt": "a"})
    chat, completion = gateway.submits
    assert chat.sampling == completion.sampling
    assert (chat.ignore_eos, chat.stop_token_ids) == (completion.ignore_eos, completion.stop_token_ids)
    assert (chat.max_tokens, completion.max_tokens) == (9, 5)


def test_without_a_limit_the_reply_fills_the_window(gateway: Any) -> None:
    whole(gateway.says("x"), {})
    assert gateway.submits[0].max_tokens == 256 - len(gateway.submits[0].prompt)


def test_choices_open_in_order_and_end_once(gateway: Any) -> None:
    """CH-18: n choices, as the client's list of choices needs them."""
    gateway.says("a", "b c d e")
    records = gateway.stream(PATH, {**HELLO, "n": 2, "temperature": 1})
    assert [record["choices"][0]["index"] for record in records[:2]] == [0, 1]
    ends = [part["index"] for record in records for part in record["choices"] if part["finish_reason"]]
    assert sorted(ends) == [0, 1]


def test_tokens_without_text_are_chunks_too(gateway: Any, make_gateway: Callable[..., Any], tmp_path: Any) -> None:
    """CH-19: without a parser each token has a chunk with content and without a role."""
    template = tmp_path / "plain.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    plain = make_gateway(chat_template=str(template))
    ids = plain.ids("🎉🎉")
    found = deltas(plain.gives(ids), {})
    assert len(found) == 1 + len(ids)
    assert all(set(delta) == {"content"} for delta in found[1:])


def test_any_role_and_either_form_of_content_give_the_same_prompt(gateway: Any) -> None:
    """CH-21"""
    gateway.says("x")
    for content in ("hi there", [{"type": "text", "text": "hi there"}]):
        whole(gateway, {"messages": [{"role": "narrator", "content": content}]})
    assert gateway.submits[0].prompt == gateway.submits[1].prompt
    assert "<|im_start|>narrator\nhi there" in prompt_text(gateway)


def test_the_developer_role_is_the_systems_where_the_template_knows_no_other(gateway: Any) -> None:
    whole(gateway.says("x"), {"messages": [{"role": "developer", "content": "hi"}]})
    assert "<|im_start|>system\nhi" in prompt_text(gateway)


def test_invocations_answer_like_the_chat_route(gateway: Any) -> None:
    """CH-22"""
    gateway.says("hello")
    status, reply = gateway.post("/invocations", HELLO)
    direct = whole(gateway, {})
    assert status == 200 and set(reply) == set(direct) and reply["choices"] == direct["choices"]


@pytest.mark.parametrize("text", ["<tool_call>", '<tool_call>\n{"na', "<"])
def test_a_required_call_that_is_cut_at_once_is_no_call(gateway: Any, text: str) -> None:
    """CH-23"""
    reply = whole(gateway.says(text, finish="length"), {**TOOLS, "tool_choice": "required", "max_completion_tokens": 1})
    choice = reply["choices"][0]
    assert choice["finish_reason"] == "length" and not choice["message"].get("tool_calls")
    assert "<tool_call>" not in (choice["message"]["content"] or "")


@pytest.mark.parametrize("native", [True, False])
def test_a_named_tool_has_only_arguments(make_gateway: Callable[..., Any], tmp_path: Any, native: bool) -> None:
    """CH-24: no content in any delta; finish_reason stop; the engine is bound to the schema. The model calls in
    its own way, or just its arguments where its template shows none."""
    plain = tmp_path / "plain.jinja"
    plain.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    gateway = make_gateway() if native else make_gateway(chat_template=str(plain))
    gateway.says(CALL if native else '{"city": "Oslo"}')
    body = {**TOOLS, "tool_choice": NAMED, "include_reasoning": False}
    choice = whole(gateway, body)["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "stop")
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    assert "Oslo" not in gateway.submits[0].grammar.text and '"city"' in gateway.submits[0].grammar.text
    assert not any(delta.get("content") for delta in deltas(gateway, body))


@pytest.mark.parametrize("text", [CALL, f"Let me see. {CALL}", f"{CALL}\n{CALL}", f"{THOUGHT}{CALL}"])
@pytest.mark.parametrize("each", [1, 2, 1000])
def test_streamed_calls_equal_whole_ones(gateway: Any, text: str, each: int) -> None:
    """TC-01 TC-02 RE-07: ids and names once and complete, arguments in pieces, indexes contiguous."""
    gateway.says(text, each=each)
    found = message(gateway, TOOLS)
    pieces = deltas(gateway, TOOLS)
    calls: dict[int, dict[str, Any]] = {}
    for piece in (call for delta in pieces for call in delta.get("tool_calls", [])):
        if "id" in piece:
            assert piece["index"] == len(calls) and piece["type"] == "function" and len(piece["id"]) >= 9
            calls[piece["index"]] = {"name": piece["function"]["name"], "arguments": ""}
        else:
            assert "name" not in piece["function"]
        calls[piece["index"]]["arguments"] += piece["function"].get("arguments", "")
    assert list(calls.values()) == [call["function"] for call in found["tool_calls"]]
    assert len({call["id"] for call in found["tool_calls"]}) == len(calls)
    for name in ("content", "reasoning"):
        assert "".join(delta.get(name) or "" for delta in pieces) == (found[name] or "")
    assert found["content"] == ("Let me see. " if text.startswith("Let") else None)


@pytest.mark.parametrize("arguments", ['{"a": {"b": [1, {"c": "x\\n\\"y\\""}]}}', '{"s": "中文 \\u00e9"}', "{}"])
def test_arguments_are_the_models_own_json(gateway: Any, arguments: str) -> None:
    """TC-03"""
    found = message(gateway.says(CALL.replace('{"city": "Oslo"}', arguments)), TOOLS)
    assert json.loads(found["tool_calls"][0]["function"]["arguments"]) == json.loads(arguments)


def test_a_malformed_call_is_content(gateway: Any) -> None:
    """TC-05: complete replies show the text; a stream that has already sent the call does not change it."""
    text = '<tool_call>{"name": "get_weather", "arguments": {"city": }}</tool_call>'
    choice = whole(gateway.says(text), TOOLS)["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
    assert "tool_calls" not in choice["message"]
    assert "<tool_call>" not in json.dumps(deltas(gateway, TOOLS))


def test_a_bracket_is_sent_when_it_is_no_marker(gateway: Any) -> None:
    """TC-07"""
    found = deltas(gateway.says("1 < 2 <b", finish="length"), TOOLS)
    assert "".join(delta.get("content", "") for delta in found) == "1 < 2 <b"


def history(arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    return [
        *HELLO["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "tool", "tool_call_id": "other", "content": [{"type": "text", "text": "snow"}]},
    ]


def test_results_of_tools_reach_the_template(gateway: Any) -> None:
    """TC-08: several results, an id that matches none."""
    whole(gateway.says("x"), {**TOOLS, "messages": history('{"city": "Oslo"}')})
    assert "<|im_start|>tool\nrain" in prompt_text(gateway) and "<|im_start|>tool\nsnow" in prompt_text(gateway)


def test_arguments_in_the_history_may_be_text_or_an_object(gateway: Any) -> None:
    """TC-09"""
    gateway.says("x")
    for arguments in ('{"city": "Oslo"}', {"city": "Oslo"}):
        whole(gateway, {**TOOLS, "messages": history(arguments)})
    assert gateway.submits[0].prompt == gateway.submits[1].prompt
    assert '"arguments": {"city": "Oslo"}}' in prompt_text(gateway)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    "choice,text,finish,expected",
    [
        ("none", CALL, "stop", "stop"),
        ("auto", CALL, "stop", "tool_calls"),
        ("auto", "hello", "stop", "stop"),
        ("auto", CALL, "length", "length"),
        ("auto", CALL, "abort", "abort"),
        ("required", CALL, "stop", "tool_calls"),
        (NAMED, '{"city": "Oslo"}', "stop", "stop"),
        (NAMED, '{"ci', "length", "length"),
    ],
)
def test_finish_reasons(gateway: Any, choice: Any, text: str, finish: str, expected: str, streamed: bool) -> None:
    """TC-10"""
    body = {**TOOLS, "tool_choice": choice}
    gateway.says(text, finish=finish)
    if streamed:
        found = [record["choices"][0]["finish_reason"] for record in gateway.stream(PATH, body)]
        assert [reason for reason in found if reason] == [expected]
    else:
        assert whole(gateway, body)["choices"][0]["finish_reason"] == expected


@pytest.mark.parametrize(
    "body,param",
    [
        ({"tools": []}, "tools"),
        ({"tool_choice": "required"}, "tools"),
        ({"tool_choice": NAMED}, "tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name"),
        ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
    ],
)
def test_invalid_tool_choices_are_rejected(gateway: Any, body: dict[str, Any], param: str) -> None:
    """D.2"""
    assert error(gateway, body)["param"] == param


def test_a_template_that_shows_no_calls_takes_required_ones_only(
    make_gateway: Callable[..., Any], tmp_path: Any
) -> None:
    """The template cannot show the call syntax to the model, so automatic choice is refused; a forced call works."""
    template = tmp_path / "plain.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    plain = make_gateway(chat_template=str(template))
    assert "model.chat_template" in error(plain, TOOLS)["message"]
    choice = whole(plain.says(CALL), {**TOOLS, "tool_choice": "required"})["choices"][0]
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "get_weather"


def test_required_calls_bind_the_engine_and_automatic_ones_do_not(gateway: Any) -> None:
    gateway.says(CALL)
    for choice in ("required", "auto"):
        whole(gateway, {**TOOLS, "tool_choice": choice})
    assert "<tool_call>" in gateway.submits[0].grammar.text
    assert gateway.submits[1].grammar is None


def test_only_the_first_call_is_kept_if_asked(gateway: Any) -> None:
    found = message(gateway.says(f"{CALL}\n{CALL}"), {**TOOLS, "parallel_tool_calls": False})
    assert len(found["tool_calls"]) == 1


@pytest.mark.parametrize("each", [1, 1000])
def test_reasoning_has_its_own_field(gateway: Any, each: int) -> None:
    """RE-01 RE-02: markers are in no field; a thought that is cut leaves no content."""
    gateway.says(f"{THOUGHT}It rains.", each=each)
    found = message(gateway, {})
    assert (found["reasoning"], found["content"]) == ("user wants weather", "It rains.")
    streamed = deltas(gateway, {})
    assert "".join(delta.get("reasoning", "") for delta in streamed) == "user wants weather"
    assert "".join(delta.get("content", "") for delta in streamed) == "It rains."
    found = message(gateway.says("<think>\nuser wants", finish="length"), {})
    assert (found["reasoning"], found["content"]) == ("user wants", None)


def test_reasoning_is_hidden_but_counted_if_asked(gateway: Any) -> None:
    """RE-03: text, logprobs and ids do not reveal it."""
    gateway.says(f"{THOUGHT}It rains.")
    body = {"include_reasoning": False, "logprobs": True, "return_token_ids": True}
    reply = whole(gateway, body)
    assert "weather" not in json.dumps(reply["choices"])
    assert reply["usage"]["completion_tokens"] == len(gateway.ids(f"{THOUGHT}It rains.")) + 1
    assert "weather" not in json.dumps(gateway.stream(PATH, {**HELLO, **body}))


@pytest.mark.parametrize("body", [{"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}])
def test_thinking_is_switched_off_in_the_template(gateway: Any, body: dict[str, Any]) -> None:
    """RE-04"""
    found = message(gateway.says("hi"), body)
    assert prompt_text(gateway).endswith("<think>\n\n</think>\n\n") and found["reasoning"] is None
    whole(gateway, {"reasoning_effort": "high"})
    assert prompt_text(gateway).endswith("assistant\n")


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_earlier_reasoning_reaches_the_template(gateway: Any, name: str) -> None:
    """RE-06"""
    messages = [*HELLO["messages"], {"role": "assistant", "content": "x", name: "because"}, *HELLO["messages"]]
    whole(gateway.says("x"), {"messages": messages})
    assert "<think>\nbecause\n</think>" in prompt_text(gateway)


def test_a_model_without_a_template_says_what_to_set(
    checkpoint: Any, make_gateway: Callable[..., Any], tmp_path: Any
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((checkpoint / "tokenizer.json").read_bytes())
    fault = error(make_gateway(model=str(tmp_path)), {})
    assert "model.chat_template" in fault["message"]


def test_a_reply_has_the_fields_of_the_api(gateway: Any) -> None:
    reply = whole(gateway.says("x"), {"return_token_ids": True})
    assert reply["object"] == "chat.completion" and reply["prompt_token_ids"] == list(gateway.submits[0].prompt)
    choice = reply["choices"][0]
    assert set(choice["message"]) == {
        "role",
        "content",
        "refusal",
        "annotations",
        "audio",
        "function_call",
        "reasoning",
    }
    assert choice["token_ids"] == [*gateway.ids("x"), gateway.tokenizer.eos_id]


def test_the_official_stream_helper_accepts_everything(gateway: Any) -> None:
    """Section 0 items 1 and 2: several choices, calls and the last usage."""
    gateway.says(f"{THOUGHT}{CALL}", "hello")

    async def streamed(client: openai.AsyncOpenAI) -> Any:
        options: Any = {"include_usage": True}
        async with client.chat.completions.stream(
            model="qwen", n=2, temperature=1, stream_options=options, **TOOLS
        ) as stream:
            async for _ in stream:
                pass
            return await stream.get_final_completion()

    final = gateway.openai(streamed)
    calls = final.choices[0].message.tool_calls
    assert [call.function.parsed_arguments or json.loads(call.function.arguments) for call in calls] == [
        {"city": "Oslo"}
    ]
    assert (final.choices[0].finish_reason, final.choices[1].message.content) == ("tool_calls", "hello")
    assert final.usage.completion_tokens > 0


@pytest.mark.parametrize("path", [PATH, "/v1/completions"])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_goes_ends_all_its_choices(gateway: Any, path: str, streamed: bool) -> None:
    """ER-15 ER-16: n children are closed as soon as the connection is."""
    gateway.says("one", finish="stop")
    gateway.router.reply = lambda submit: []
    gateway.router.hold = True
    body = json.dumps({**HELLO, "prompt": "a", "n": 3, "temperature": 1, "stream": streamed}).encode()
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
        "scheme": "http",
        "root_path": "",
    }

    async def call() -> None:
        gone = asyncio.Event()
        sent = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> Any:
            for message in sent:
                return message
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            return None

        running = asyncio.ensure_future(gateway.app(scope, receive, send))
        while len(gateway.router.generations) < 3:
            await asyncio.sleep(0)
        assert not any(generation.closed for generation in gateway.router.generations)
        gone.set()
        await running

    asyncio.run(call())
    assert all(generation.closed for generation in gateway.router.generations)


def test_an_engine_error_before_the_first_token_is_one_error(gateway: Any) -> None:
    gateway.router.failure = RuntimeError("secret")
    gateway.router.reply = lambda submit: []
    status, reply = gateway.post(PATH, HELLO)
    assert (status, reply["error"]["type"]) == (500, "InternalServerError")


def test_allowed_tools_are_all_that_may_be_called(gateway):
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("one", "two")
    ]
    gateway.says("hello")
    for mode in ("auto", "required"):
        allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "two"}}]}
        choice = {"type": "allowed_tools", "allowed_tools": allowed}
        body = {"messages": [{"role": "user", "content": "hello"}], "tools": tools, "tool_choice": choice}
        assert gateway.post("/v1/chat/completions", body)[0] == 200
        grammar = gateway.submits[-1].grammar.text
        assert "two" in grammar and "one" not in grammar
        assert "one" in gateway.tokenizer.decode(list(gateway.submits[-1].prompt))
    for wrong in ({"mode": "none"}, {"tools": []}, {"tools": [{"type": "function", "function": {"name": "three"}}]}):
        choice = {"type": "allowed_tools", "allowed_tools": allowed | wrong}
        status, reply = gateway.post("/v1/chat/completions", body | {"tool_choice": choice})
        assert status == 400 and reply["error"]["param"] == "tool_choice"


@pytest.mark.parametrize("stream", [False, True])
def test_a_thinking_budget_reaches_the_engine(gateway: Any, stream: bool) -> None:
    """C.9: the request has the end marker of the reasoning, its token, and if the prompt opened the reasoning."""
    end = gateway.tokenizer.encode("</think>", add_special_tokens=False)
    gateway.says(f"{THOUGHT}hi")
    body = {"thinking_token_budget": 7}
    assert deltas(gateway, body) if stream else whole(gateway, body)
    limit = gateway.submits[-1].thinking
    assert (limit.budget, list(limit.close), limit.starts, limit.begun) == (7, end, ("<think>",), False)
    assert limit.ends == ("</think>",)
    whole(gateway.says(CALL), {**TOOLS, **body})
    assert "<tool_call>" in gateway.submits[-1].thinking.ends, "a call ends the reasoning for the reader too"
    whole(gateway.says("hi"), {"thinking_token_budget": 7, "chat_template_kwargs": {"enable_thinking": False}})
    assert gateway.submits[-1].thinking is None, "the prompt closed it"
    for unlimited in (None, -1):
        whole(gateway.says("hi"), {"thinking_token_budget": unlimited})
        assert gateway.submits[-1].thinking is None


def test_a_thinking_budget_that_cannot_be_kept_is_refused(gateway: Any) -> None:
    end = gateway.tokenizer.encode("</think>", add_special_tokens=False)
    for body in ({"allowed_token_ids": [1, 2]}, {"bad_words": ["</think>"]}):
        assert error(gateway, {"thinking_token_budget": 3, **body})["param"] == "thinking_token_budget"
    assert error(gateway, {"thinking_token_budget": -2})["param"] == "thinking_token_budget"
    whole(gateway.says("hi"), {"thinking_token_budget": 3, "allowed_token_ids": [1, 2, *end]})
    status, reply = gateway.post("/v1/completions", {"prompt": "a", "thinking_token_budget": 3})
    assert (status, reply["error"]["param"]) == (400, "thinking_token_budget")


def test_a_format_that_the_manifest_names_is_read(make_gateway: Callable[..., Any]) -> None:
    """model.format overrides the format detected from the template."""
    text = '[get_weather(city="Oslo")]'
    gateway = make_gateway(format="pythonic")
    call = message(gateway.says(text), TOOLS)["tool_calls"][0]["function"]
    assert (call["name"], json.loads(call["arguments"])) == ("get_weather", {"city": "Oslo"})
    assert (
        message(make_gateway(format="plain+identity").says("<think>a</think>b"), {})["content"] == "<think>a</think>b"
    )


@pytest.mark.parametrize(
    ("form", "text", "wanted"),
    [
        (
            "kimi_k2",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:4<|tool_call_argument_begin|>{}"
            "<|tool_call_end|><|tool_calls_section_end|>",
            r"functions\.get_weather:4",
        ),
        ("mistral", "[TOOL_CALLS]get_weather[ARGS]{}", r"[0-9A-Za-z]{9}"),
        ("hermes", CALL, r"chatcmpl-tool-[0-9a-f]{32}"),
    ],
)
def test_calls_have_ids_as_their_family_writes_them(
    make_gateway: Callable[..., Any], form: str, text: str, wanted: str
) -> None:
    gateway = make_gateway(format=form)
    call = message(gateway.says(text), TOOLS)["tool_calls"][0]
    assert re.fullmatch(wanted, call["id"])
