"""/tokenize and /detokenize against transformers and the chat route (docs/http.md)."""

from typing import Any

import pytest
from transformers import AutoTokenizer

CHAT = {"messages": [{"role": "user", "content": "hello 中文"}]}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
THINKING = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.mark.parametrize("extra", [{}, {"tools": TOOLS}, THINKING, {"add_special_tokens": True}])
def test_the_chat_form_gives_the_ids_that_chat_submits(gateway: Any, extra: dict[str, Any]) -> None:
    """TK-01: with tools and template variables too."""
    status, reply = gateway.post("/tokenize", {**CHAT, **extra})
    gateway.says("hi").post("/v1/chat/completions", {**CHAT, **extra})
    assert status == 200
    assert tuple(reply["tokens"]) == gateway.submits[0].prompt
    assert (reply["count"], reply["max_model_len"], reply["token_strs"]) == (len(reply["tokens"]), 256, None)


def test_ids_equal_transformers(gateway: Any) -> None:
    oracle = AutoTokenizer.from_pretrained(gateway.config.model)
    text = "What is 17 + 25? <|im_start|>"
    assert gateway.post("/tokenize", {"prompt": text})[1]["tokens"] == oracle.encode(text)
    rendered = oracle.apply_chat_template(CHAT["messages"], add_generation_prompt=True, return_dict=False)
    assert gateway.post("/tokenize", CHAT)[1]["tokens"] == rendered


@pytest.mark.parametrize("text", ["plain text", "中文和日本語", "👩‍👩‍👧 🎉", "<|im_start|>user", ""])
def test_detokenize_inverts_tokenize(gateway: Any, text: str) -> None:
    """TK-02: ASCII, CJK, emoji."""
    ids = gateway.post("/tokenize", {"prompt": text, "add_special_tokens": False})[1]["tokens"]
    assert gateway.post("/detokenize", {"tokens": ids}) == (200, {"prompt": text})


@pytest.mark.parametrize("token", [420, -1, 2**40, 2**80])
def test_ids_outside_the_vocabulary_are_refused(gateway: Any, token: int) -> None:
    """TK-03: also ids that exceed a machine integer."""
    status, reply = gateway.post("/detokenize", {"tokens": [1, token]})
    assert (status, reply["error"]["code"]) == (400, 400)


@pytest.mark.parametrize(
    "path,body", [("/tokenize", {"prompt": "a"}), ("/tokenize", CHAT), ("/detokenize", {"tokens": [1]})]
)
def test_an_unknown_model_is_not_found(gateway: Any, path: str, body: dict[str, Any]) -> None:
    """TK-04"""
    status, reply = gateway.post(path, {**body, "model": "other"})
    assert (status, reply["error"]["param"]) == (404, "model")
    assert gateway.post(path, {**body, "model": "alias"})[0] == 200


def test_continuing_and_beginning_a_message_exclude_each_other(gateway: Any) -> None:
    """TK-05"""
    body = {**CHAT, "continue_final_message": True, "add_generation_prompt": True}
    assert gateway.post("/tokenize", body)[0] == 400


def test_token_strings_are_the_vocabularys_own(gateway: Any) -> None:
    reply = gateway.post("/tokenize", {"prompt": " hello", "return_token_strs": True})[1]
    oracle = AutoTokenizer.from_pretrained(gateway.config.model)
    assert reply["token_strs"] == oracle.convert_ids_to_tokens(reply["tokens"])


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(gateway: Any) -> None:
    """ER-08"""
    status, reply = gateway.post("/tokenize", {"prompt": "a" * 10_000})
    assert (status, reply["error"]["param"]) == (400, "input_text")
