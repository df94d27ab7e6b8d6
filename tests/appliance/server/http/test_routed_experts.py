"""`return_routed_experts`: experts that each layer selected for each token, whole and streamed."""

from base64 import b64decode
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engine.api.messages import Delta, Submit

TOP_K = (2, 1)  # of two layers
PROMPT = [5, 6, 7]
REPLY = "hello"
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def experts(position: int) -> bytes:
    return np.array([position, position + 1, 300 + position], "<u2").tobytes()


def read(found: dict[str, Any]) -> list[list[int]]:
    assert found["top_k"] == [2, 1]
    numbers = np.frombuffer(b64decode(found["data"]), "<u2").reshape(found["tokens"], sum(TOP_K))
    return numbers.tolist()  # type: ignore[no-any-return]


def expected(first: int, last: int) -> list[list[int]]:
    return [[at, at + 1, 300 + at] for at in range(first, last)]


@pytest.fixture
def gateway(make_gateway: Callable[..., Any]) -> Any:
    """Replies "hello", letter by letter in deltas of one token, with the experts of each computed token."""
    made = make_gateway(routed_experts=TOP_K)

    def reply(submit: Submit) -> list[Delta]:
        ids = [token for letter in REPLY for token in made.ids(letter)]
        deltas, at = [], 0
        for number, token in enumerate(ids):
            end = len(submit.prompt) + number
            routes = tuple(experts(one) for one in range(at, end)) if submit.sampling.return_routed_experts else ()
            finish = "length" if number == len(ids) - 1 else None
            deltas.append(Delta(submit.id, (token,), routes=routes, finish=finish))  # type: ignore[arg-type]
            at = end
        return deltas

    made.router.reply = reply
    return made


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", {"prompt": PROMPT}), ("/v1/chat/completions", CHAT)])
def test_reply_has_the_experts_of_every_token_but_the_last(gateway: Any, path: str, body: dict[str, Any]) -> None:
    status, reply = gateway.post(path, {**body, "return_routed_experts": True})
    assert status == 200
    tokens = len(gateway.submits[0].prompt) + len(REPLY) - 1
    assert read(reply["choices"][0]["routed_experts"]) == expected(0, tokens)
    assert "routed_experts" not in gateway.post(path, body)[1]["choices"][0]


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", {"prompt": PROMPT}), ("/v1/chat/completions", CHAT)])
def test_stream_has_the_experts_of_new_tokens_in_each_chunk(gateway: Any, path: str, body: dict[str, Any]) -> None:
    chunks = gateway.stream(path, {**body, "return_routed_experts": True})
    found = [
        read(choice["routed_experts"]) for chunk in chunks for choice in chunk["choices"] if "routed_experts" in choice
    ]
    prompt = len(gateway.submits[0].prompt)
    assert found[0] == expected(0, prompt)
    assert found[1:] == [expected(prompt + at, prompt + at + 1) for at in range(len(REPLY) - 1)]


def test_experts_of_tokens_after_a_stop_string_are_dropped(gateway: Any) -> None:
    body = {"prompt": PROMPT, "stop": ["l"], "return_routed_experts": True}
    (choice,) = gateway.post("/v1/completions", body)[1]["choices"]
    assert choice["text"] == "he"
    assert read(choice["routed_experts"]) == expected(0, len(PROMPT) + 2)


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", {"prompt": PROMPT}), ("/v1/chat/completions", CHAT)])
def test_request_is_refused_if_engines_do_not_return_experts(
    make_gateway: Callable[..., Any], path: str, body: dict[str, Any]
) -> None:
    gateway = make_gateway()
    status, reply = gateway.post(path, {**body, "return_routed_experts": True})
    assert status == 400 and reply["error"]["param"] == "return_routed_experts"
    assert "engine.return_routed_experts: true" in reply["error"]["message"]
    assert gateway.says("x").post(path, {**body, "return_routed_experts": False})[0] == 200
