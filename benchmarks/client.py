"""One streamed request against any OpenAI endpoint, with the times that matter."""

import json
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.load import LoadRequest

_TEXT_KEYS = frozenset({"content", "reasoning", "reasoning_content", "tool_calls"})


@dataclass
class Outcome:
    """Outcome of one request. Times are seconds since it was sent.

    `token_gaps_s` are the intervals between chunks with tokens. `error` is empty for a complete reply.
    """

    index: int
    sent_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    token_gaps_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    finish: str = ""
    error: str = ""


def body_of(request: LoadRequest, model: str, *, chat: bool) -> dict[str, Any]:
    """The request's body. `ignore_eos` keeps lengths as drawn where the server knows it."""
    content = {"messages": [{"role": "user", "content": request.prompt}]} if chat else {"prompt": request.prompt}
    return content | {
        "model": model,
        "max_tokens": request.max_tokens,
        "temperature": 0.0,
        "seed": request.seed,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def has_token(choice: dict[str, Any]) -> bool:
    """Return true for a chunk with a token. Its text may be empty (part of a character). Role chunks have no token."""
    if "text" in choice:
        return True
    delta = choice.get("delta", {})
    return "role" not in delta and any(
        key in delta for key in ("content", "reasoning", "reasoning_content", "tool_calls")
    )


async def send(client: httpx.AsyncClient, request: LoadRequest, model: str, *, chat: bool, began_s: float) -> Outcome:
    """Send one request and read its stream to the end. Errors of server and network are returned, not raised."""
    start = time.perf_counter()
    outcome = Outcome(request.index, start - began_s)
    path = "/v1/chat/completions" if chat else "/v1/completions"
    try:
        async with client.stream("POST", path, json=body_of(request, model, chat=chat)) as reply:
            if reply.status_code != 200:
                await reply.aread()
                outcome.error = f"HTTP {reply.status_code}: {reply.text[:200]}"
                return outcome
            await _read(reply, outcome, start)
    except httpx.HTTPError as error:
        outcome.error = f"{type(error).__name__}: {error}"
    except (ValueError, KeyError, TypeError) as error:
        outcome.error = f"not an OpenAI stream: {type(error).__name__}: {error}"
    return outcome


async def _read(reply: httpx.Response, outcome: Outcome, start: float) -> None:
    chunks, done = 0, False
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
            outcome.prompt_tokens, outcome.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        for choice in record.get("choices", ()):
            outcome.finish = choice.get("finish_reason") or outcome.finish
            if has_token(choice):
                chunks += 1
                _record_token(outcome, time.perf_counter() - start)
    outcome.output_tokens = outcome.output_tokens or chunks
    if not done or not outcome.finish:
        outcome.error = "the stream ended before its reply was complete"


def _record_token(outcome: Outcome, now_s: float) -> None:
    if outcome.first_s:
        outcome.token_gaps_s.append(now_s - outcome.last_s)
    else:
        outcome.first_s = now_s
    outcome.last_s = now_s
