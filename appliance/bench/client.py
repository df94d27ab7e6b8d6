"""One streamed request to an OpenAI-compatible endpoint, with the times of its tokens."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from appliance.bench.workload import Message, Turn

_TEXT_KEYS = ("content", "reasoning", "reasoning_content", "tool_calls")
PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "transcriptions": "/v1/audio/transcriptions",
}


@dataclass
class Outcome:
    """Outcome of one request. Times are in seconds: `sent_s` since the run began, the others since it was sent."""

    round: int
    session: int
    turn: int
    sent_s: float
    first_s: float = 0.0
    """Time of the first chunk with a token; 0 without one."""
    last_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    """Intervals between chunks with tokens."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that the server took from its prefix cache, if it reports them."""
    output_tokens: int = 0
    finish: str = ""
    error: str = ""
    """Empty for a complete reply."""
    audio_s: float = 0.0
    """Duration of the recording, of a complete reply to one."""
    text: str = field(default="", repr=False)
    """Text of the reply, for the next turn of the session."""


@dataclass(frozen=True)
class Endpoint:
    """An endpoint of the run and how requests are written for it."""

    url: str
    model: str
    api: str
    """A key of PATHS."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Fields that are added to each body."""


def body(endpoint: Endpoint, messages: Sequence[Message], turn: Turn) -> dict[str, Any]:
    """Return the body of a request. `ignore_eos` keeps the lengths of the workload if the server knows it."""
    chat = endpoint.api == "chat"
    content = {"messages": list(messages)} if chat else {"prompt": messages[-1]["content"]}
    return {
        **content,
        "model": endpoint.model,
        "max_tokens": turn.max_tokens,
        "temperature": 0.0,
        "seed": turn.seed,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **endpoint.extra,
    }


async def send(
    client: httpx.AsyncClient, endpoint: Endpoint, messages: Sequence[Message], turn: Turn, outcome: Outcome
) -> Outcome:
    """Send one request and read its stream to the end. Errors of server and network are in the outcome."""
    start_s = time.perf_counter()
    try:
        async with client.stream("POST", PATHS[endpoint.api], **_content(endpoint, messages, turn)) as reply:
            if reply.status_code == 200:
                await (_read if turn.audio is None else _read_transcript)(reply, outcome, start_s)
                if turn.audio is not None and not outcome.error:
                    outcome.audio_s = turn.audio.seconds
            else:
                await reply.aread()
                outcome.error = f"HTTP {reply.status_code}: {reply.text[:200]}"
    except httpx.HTTPError as error:
        outcome.error = f"{type(error).__name__}: {error}"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        outcome.error = f"not an OpenAI stream: {type(error).__name__}: {error}"
    return outcome


def _content(endpoint: Endpoint, messages: Sequence[Message], turn: Turn) -> dict[str, Any]:
    """Return the content of a request: JSON, or a form with a recording."""
    if turn.audio is None:
        return {"json": body(endpoint, messages, turn)}
    fields = {"model": endpoint.model, "stream": "true", "response_format": "json", **endpoint.extra}
    return {
        "data": {name: str(value) for name, value in fields.items()},
        "files": {"file": (turn.audio.name, turn.audio.data, "audio/wav")},
    }


async def _read_transcript(reply: httpx.Response, outcome: Outcome, start_s: float) -> None:
    """Read the events of a transcription, or the complete text of a server that does not stream."""
    if not reply.headers.get("content-type", "").startswith("text/event-stream"):
        value = json.loads(await reply.aread())
        _time_token(outcome, time.perf_counter() - start_s)
        outcome.text, outcome.finish = value["text"], "stop"
        _count_transcript(value.get("usage"), outcome)
        return
    async for line in reply.aiter_lines():
        record = json.loads(line.removeprefix("data:")) if line.startswith("data: {") else {}
        if "error" in record:
            outcome.error = f"mid-stream: {record['error'].get('message', record['error'])}"
            return
        if record.get("type") == "transcript.text.delta":
            outcome.output_tokens += 1
            _time_token(outcome, time.perf_counter() - start_s)
        if record.get("type") == "transcript.text.done":
            outcome.text, outcome.finish = record["text"], "stop"
            outcome.last_s = time.perf_counter() - start_s
            _count_transcript(record.get("usage"), outcome)
    if not outcome.finish:
        outcome.error = "the stream ended before its transcript was complete"


def _count_transcript(usage: dict[str, Any] | None, outcome: Outcome) -> None:
    if usage and usage.get("type") == "tokens":
        outcome.prompt_tokens, outcome.output_tokens = usage["input_tokens"], usage["output_tokens"]


async def _read(reply: httpx.Response, outcome: Outcome, start_s: float) -> None:
    chunks, done, texts = 0, False, list[str]()
    async for line in reply.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            done = True
            break
        record = json.loads(data)
        if "error" in record:
            outcome.error = f"mid-stream: {record['error'].get('message', record['error'])}"
            return
        if usage := record.get("usage"):
            _count(usage, outcome)
        for choice in record.get("choices", ()):
            outcome.finish = choice.get("finish_reason") or outcome.finish
            if has_token(choice):
                chunks += 1
                _time_token(outcome, time.perf_counter() - start_s)
                texts.append(choice.get("delta", {}).get("content") or choice.get("text") or "")
    outcome.output_tokens = outcome.output_tokens or chunks
    outcome.text = "".join(texts)
    if not done or not outcome.finish:
        outcome.error = "the stream ended before its reply was complete"


def _count(usage: dict[str, Any], outcome: Outcome) -> None:
    outcome.prompt_tokens, outcome.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def has_token(choice: dict[str, Any]) -> bool:
    """Return true for a chunk with a token. Its text may be empty (part of a character). Role chunks have no token."""
    if "text" in choice:
        return bool(choice["text"]) or not choice.get("finish_reason")
    delta = choice.get("delta", {})
    return "role" not in delta and any(key in delta for key in _TEXT_KEYS)


def _time_token(outcome: Outcome, now_s: float) -> None:
    if outcome.first_s:
        outcome.gaps_s.append(now_s - outcome.last_s)
    else:
        outcome.first_s = now_s
    outcome.last_s = now_s
