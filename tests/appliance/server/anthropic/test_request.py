"""Messages requests as chats (docs/http.md, Messages)."""

from typing import Any

import pytest

from appliance.server.anthropic.request import chat_request, conversation, renamed
from appliance.server.anthropic.signature import sign, thinking_of
from appliance.server.schema.messages import MessagesRequest
from engine.api.errors import RequestError

HELLO = {"role": "user", "content": "hello"}


def asked(**fields: Any) -> MessagesRequest:
    return MessagesRequest.model_validate({"model": "m", "max_tokens": 4096, "messages": [HELLO], **fields})


@pytest.mark.parametrize(
    ("thinking", "budget", "variables"),
    [
        (None, None, None),
        ({"type": "enabled", "budget_tokens": 2048}, 2048, {"enable_thinking": True}),
        ({"type": "adaptive"}, None, {"enable_thinking": True}),
        ({"type": "disabled"}, None, {"enable_thinking": False, "reasoning_effort": "none"}),
        ({"type": "between_tools"}, None, None),
    ],
)
def test_thinking_sets_template_variables_and_engine_budget(thinking: Any, budget: int | None, variables: Any) -> None:
    chat = chat_request(asked(thinking=thinking))
    assert (chat.thinking_token_budget, chat.chat_template_kwargs) == (budget, variables)


def test_effort_is_passed_through_and_request_variables_win() -> None:
    chat = chat_request(asked(output_config={"effort": "xhigh"}))
    assert chat.chat_template_kwargs == {"reasoning_effort": "xhigh"}
    own = {"enable_thinking": False, "x": 1}
    chat = chat_request(asked(thinking={"type": "adaptive"}, chat_template_kwargs=own))
    assert chat.chat_template_kwargs == own


def test_a_count_and_its_request_are_one_conversation() -> None:
    """AN-10"""
    body = asked(system="s", thinking={"type": "disabled"}, tools=[{"name": "f", "input_schema": {}}])
    chat = chat_request(body)
    for name, value in conversation(body):
        assert getattr(chat, name) == value


def test_blocks_of_the_assistant_are_one_message() -> None:
    """RE-06"""
    turns = [
        HELLO,
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "a", "signature": "theirs"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "redacted_thinking", "data": "secret"},
                {"type": "thinking", "thinking": "", "signature": "theirs"},
                {"type": "thinking", "thinking": "", "signature": sign("b\u00e9", shown=False)},
                {"type": "text", "text": "one"},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}},
                {"type": "text", "text": "two"},
            ],
        },
        {"role": "user", "content": [{"type": "text", "text": "so"}, {"type": "tool_result", "tool_use_id": "t1"}]},
        {"role": "system", "content": "be quick"},
    ]
    messages = chat_request(asked(messages=turns)).messages
    call = {"id": "t1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    assert messages == [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "one\ntwo", "reasoning": "a\nb\u00e9", "tool_calls": [call]},
        {"role": "user", "content": "so"},
        {"role": "tool", "tool_call_id": "t1", "name": "f", "content": ""},
        {"role": "system", "content": "be quick"},
    ]


def test_only_a_last_message_of_the_assistant_is_gone_on_with() -> None:
    chat = chat_request(asked(messages=[HELLO, {"role": "assistant", "content": "Well"}]))
    assert chat.continue_final_message and chat.add_generation_prompt is False
    chat = chat_request(asked(messages=[HELLO, {"role": "assistant", "content": "Well"}, HELLO]))
    assert not chat.continue_final_message and chat.add_generation_prompt


@pytest.mark.parametrize("text", ["", "a", "thought \u4e2d\n" * 500])
def test_a_signature_keeps_the_thinking_only_where_it_is_not_shown(text: str) -> None:
    kept = sign(text, shown=False)
    assert thinking_of(kept, "x") == text and sign(text, shown=False) == kept
    shown = sign(text, shown=True)
    assert thinking_of(shown, "x") == "" and len(shown) < 64 and shown == sign(text, shown=True)
    with pytest.raises(RequestError):
        thinking_of(kept[:-8], "x")


def test_a_signature_does_not_unfold_without_end() -> None:
    bomb = sign("a" * (2**22 + 1), shown=False)
    assert len(bomb) < 10_000
    with pytest.raises(RequestError):
        thinking_of(bomb, "messages.1.content.0")


def test_chat_errors_use_the_field_names_of_messages() -> None:
    """ER-10"""
    error = renamed(RequestError("stop has 20 strings; the server's limits.max_stop allows 16.", "stop"))
    assert str(error) == "stop_sequences has 20 strings; the server's limits.max_stop allows 16."
    assert error.param == "stop_sequences"
    error = renamed(RequestError("response_format: no schema. A response_formatter stops.", "response_format"))
    assert str(error) == "output_config.format: no schema. A response_formatter stops."
    other = renamed(RequestError("stop and temperature", "temperature"))
    assert (str(other), other.param) == ("stop and temperature", "temperature")
