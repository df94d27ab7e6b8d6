"""`slipway chat` against a service at the HTTP border."""

import io
import json
from collections.abc import Callable

import httpx
import pytest

from appliance.cli.chat import ChatError, Conversation, Piece, command, first_model, service_url, show, talk


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def service(bodies: list[dict], *replies: str) -> httpx.Client:
    """Return a client that answers each request with the next reply, word by word, and records the requests."""
    answers = iter(replies)

    def answer(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        events = [{"choices": [{"delta": {"content": word}}]} for word in next(answers).split("|")]
        lines = [f"data: {json.dumps(event)}\n\n" for event in events] + ["data: [DONE]\n\n"]
        return httpx.Response(200, text="".join(lines))

    return client(answer)


def client(answer: Callable[[httpx.Request], httpx.Response]) -> httpx.Client:
    return httpx.Client(base_url="http://test:1", transport=httpx.MockTransport(answer))


def test_a_conversation_carries_all_turns_and_a_reset_forgets_them() -> None:
    bodies: list[dict] = []
    out = io.StringIO()
    lines = io.StringIO("hello\n\nand then?\n/reset\nanew\n/exit\nnever sent\n")
    talk(service(bodies, "Hi| there", "42", "ok"), Conversation("demo", "be brief"), lines, out)
    system = {"role": "system", "content": "be brief"}
    turns = [[message["content"] for message in body["messages"]] for body in bodies]
    assert turns == [["be brief", "hello"], ["be brief", "hello", "Hi there", "and then?"], ["be brief", "anew"]]
    assert bodies[0]["messages"][0] == system and all(body["stream"] for body in bodies)
    assert out.getvalue() == "Hi there\n42\n(new conversation)\nok\n"


def test_thinking_is_switched_for_the_template() -> None:
    bodies: list[dict] = []
    talk(
        service(bodies, "a", "b", "c"),
        Conversation("demo"),
        io.StringIO("1\n/think off\n2\n/think auto\n3\n"),
        io.StringIO(),
    )
    asked = [body.get("chat_template_kwargs") for body in bodies]
    assert asked == [None, {"enable_thinking": False}, None]


def test_an_unknown_command_is_not_sent() -> None:
    conversation = Conversation("demo")
    assert command(conversation, "/thnik on")[1].startswith("(/thnik on: unknown command")
    assert command(conversation, "/exit")[0] is None


def test_reasoning_is_dimmed_on_a_terminal_and_left_out_of_a_pipe() -> None:
    pieces = [Piece("hm", True), Piece("m", True), Piece("yes")]
    terminal, pipe = Terminal(), io.StringIO()
    assert show(iter(pieces), terminal) == show(iter(pieces), pipe) == "yes"
    assert terminal.getvalue() == "\x1b[2mhmm\x1b[0m\nyes\n" and pipe.getvalue() == "yes\n"


def failing(status: int, body: object) -> httpx.Client:
    return client(lambda request: httpx.Response(status, json=body))


@pytest.mark.parametrize(
    ("status", "words"),
    [(503, "not ready: loading 41 %; see http://test:1/ready"), (401, "--api-key-env"), (500, "loading 41 % (500)")],
)
def test_chat_explains_how_to_fix_an_error(status: int, words: str) -> None:
    with pytest.raises(ChatError) as caught:
        first_model(failing(status, {"error": {"message": "loading 41 %"}}))
    assert words in str(caught.value)


def test_chat_names_a_service_that_does_not_answer() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    with pytest.raises(ChatError, match="no service answers at http://test:1.*slipway serve"):
        first_model(client(refuse))


def test_a_failed_reply_does_not_change_the_conversation_and_ends_a_pipe() -> None:
    body = {"error": {"message": "no"}}
    out = io.StringIO()
    talk(failing(503, body), Conversation("demo"), Terminal("a\nb\n"), out)
    assert out.getvalue().count("not ready: no") == 2
    with pytest.raises(ChatError):
        talk(failing(503, body), Conversation("demo"), io.StringIO("a\nb\n"), io.StringIO())


def test_an_error_within_the_stream_is_reported() -> None:
    text = 'data: {"choices": [{"delta": {"content": "x"}}]}\n\ndata: {"error": {"message": "engine died"}}\n\n'
    broken = client(lambda request: httpx.Response(200, text=text))
    with pytest.raises(ChatError, match="engine died"):
        talk(broken, Conversation("demo"), io.StringIO("a\n"), io.StringIO())


@pytest.mark.parametrize("url", ["h:9", "http://h:9", "http://h:9/", "http://h:9/v1", "http://h:9/v1/"])
def test_a_url_may_be_short_or_name_the_api(url: str) -> None:
    assert service_url(url) == "http://h:9"
