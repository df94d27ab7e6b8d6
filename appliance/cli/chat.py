"""`slipway chat`: a conversation with a running service, streamed to the terminal. Input may also come from a pipe.

Lines that start with a slash are commands; everything else is a message. Reasoning is shown dimmed.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import IO, Any

import httpx
import msgspec

from engine.api.printable import printable

CONNECT_TIMEOUT_S = 5.0
HELP = "/reset clears the conversation, /think on|off|auto switches reasoning, /exit or Ctrl-D exits"
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


class ChatError(Exception):
    """Raised if the service cannot reply. The message says why and what to do."""


@dataclass(frozen=True)
class Piece:
    """A piece of a streamed reply: text or reasoning."""

    text: str
    reasoning: bool = False


@dataclass(frozen=True)
class Conversation:
    """Content of a request. With `think` None the model's template decides about reasoning."""

    model: str
    system: str | None = None
    think: bool | None = None
    turns: tuple[dict[str, str], ...] = field(default=())

    def said(self, role: str, text: str) -> "Conversation":
        return replace(self, turns=(*self.turns, {"role": role, "content": text}))

    def body(self) -> dict[str, Any]:
        first = ({"role": "system", "content": self.system},) if self.system else ()
        body: dict[str, Any] = {"model": self.model, "messages": [*first, *self.turns], "stream": True}
        if self.think is not None:
            body["chat_template_kwargs"] = {"enable_thinking": self.think}
        return body


def chat(url: str, *, model: str | None = None, system: str | None = None, api_key: str | None = None) -> int:
    """Run the conversation until the input ends. Return 0, or 1 if the service could not reply."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    # No limit for pauses within a reply: a long prompt may take minutes on a CPU.
    timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
    with httpx.Client(base_url=service_url(url), headers=headers, timeout=timeout) as client:
        try:
            conversation = Conversation(model or first_model(client), system)
            talk(client, conversation, sys.stdin, sys.stdout)
        except ChatError as error:
            print(f"slipway chat: {error}", file=sys.stderr)
            return 1
    return 0


def service_url(url: str) -> str:
    """Return the URL with a scheme and without the API's path: `localhost:9000` → `http://localhost:9000`."""
    full = url if "://" in url else f"http://{url}"
    return full.rstrip("/").removesuffix("/v1")


def talk(client: httpx.Client, conversation: Conversation, lines: IO[str], out: IO[str]) -> None:
    """Read messages and commands and print replies. A failed or interrupted reply leaves the conversation unchanged. If
    the input is a pipe, a failure ends the conversation, because nobody can correct the message."""
    asking = lines.isatty()
    if asking:
        print(f"{conversation.model} at {client.base_url}. {HELP}", file=out)
    while True:
        line = _ask(lines, out, asking)
        if line is None:
            return
        if not line.strip():
            continue
        if line.startswith("/"):
            changed, answer = command(conversation, line.strip())
            if changed is None:
                return
            conversation = changed
            print(answer, file=out)
            continue
        try:
            reply = show(stream(client, conversation.said("user", line)), out)
        except KeyboardInterrupt:
            print("\n(stopped; the reply was removed from the conversation)", file=out)
            continue
        except ChatError as error:
            if not asking:
                raise
            print(f"({error})", file=out)
            continue
        conversation = conversation.said("user", line).said("assistant", reply)


def _ask(lines: IO[str], out: IO[str], asking: bool) -> str | None:
    if asking:
        print("> ", end="", file=out, flush=True)
    try:
        line = lines.readline()
    except KeyboardInterrupt:
        return None
    return line.rstrip("\r\n") if line else None


def command(conversation: Conversation, line: str) -> tuple[Conversation | None, str]:
    """Run a command. Return the new conversation (None to end it) and the text to print."""
    match line.split():
        case ["/exit" | "/quit"]:
            return None, ""
        case ["/reset"]:
            return replace(conversation, turns=()), "(new conversation)"
        case ["/think", ("on" | "off" | "auto") as word]:
            think = {"on": True, "off": False, "auto": None}[word]
            return replace(conversation, think=think), f"(reasoning {word})"
        case ["/help"]:
            return conversation, HELP
        case _:
            return conversation, f"({line}: unknown command; {HELP})"


def show(pieces: Iterator[Piece], out: IO[str]) -> str:
    """Print a reply while it is streamed; reasoning is dimmed on a terminal and omitted in a pipe. Return its text."""
    text, dim, coloured = "", False, out.isatty()
    for piece in pieces:
        if piece.reasoning and not coloured:
            continue
        if coloured and piece.reasoning != dim:
            out.write(_DIM if piece.reasoning else f"{_PLAIN}\n")
            dim = piece.reasoning
        out.write(printable(piece.text, keep="\n\t"))
        out.flush()
        text += "" if piece.reasoning else piece.text
    out.write((_PLAIN if dim else "") + "\n")
    out.flush()
    return text


def first_model(client: httpx.Client) -> str:
    """Return the first model name that the service lists."""
    try:
        response = client.get("/v1/models", timeout=CONNECT_TIMEOUT_S)
    except httpx.HTTPError as error:
        raise ChatError(_unreachable(client, error)) from error
    if response.status_code != 200:
        raise ChatError(refusal(response))
    return str(response.json()["data"][0]["id"])


def stream(client: httpx.Client, conversation: Conversation) -> Iterator[Piece]:
    """Yield the pieces of one reply. Raise ChatError with the service's message."""
    try:
        with client.stream("POST", "/v1/chat/completions", json=conversation.body()) as response:
            if response.status_code != 200:
                response.read()
                raise ChatError(refusal(response))
            for line in response.iter_lines():
                if line.startswith("data:") and (data := line[5:].strip()) != "[DONE]":
                    yield from pieces(data)
    except httpx.HTTPError as error:
        raise ChatError(_unreachable(client, error)) from error


def pieces(data: str) -> Iterator[Piece]:
    """Yield the pieces of one server-sent event."""
    event = msgspec.json.decode(data)
    if "error" in event:
        raise ChatError(event["error"]["message"])
    for choice in event.get("choices", ()):
        delta = choice.get("delta", {})
        for name in ("reasoning", "reasoning_content"):
            if delta.get(name):
                yield Piece(delta[name], reasoning=True)
                break
        if delta.get("content"):
            yield Piece(delta["content"])


def refusal(response: httpx.Response) -> str:
    """Return the error message of a response, with advice for common cases."""
    try:
        body = response.json()
        message = str(body["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = response.text.strip()[:200] or response.reason_phrase
    if response.status_code == 503:
        return f"the service is not ready: {message}; see {response.url.copy_with(path='/ready')}"
    if response.status_code == 401:
        return f"{message}; set --api-key-env to the name of the environment variable with the key"
    return f"{message} ({response.status_code})"


def _unreachable(client: httpx.Client, error: httpx.HTTPError) -> str:
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return f"no service answers at {client.base_url}; start it with `slipway serve MANIFEST`, or pass its URL"
    return f"the connection to {client.base_url} failed: {error or type(error).__name__}"
