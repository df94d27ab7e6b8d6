"""Client of a service that may crash during a request.

It reads streamed and non-streamed replies. With an Idempotency-Key it reconnects and resumes at its last token until
the reply is complete.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx

TIMEOUT_S = 300.0


@dataclass
class Reply:
    """Received part of a reply, without fields that differ in each reply (IDs, times)."""

    # per choice: its text, calls, logprobs and finish reason
    choices: dict[int, dict[str, Any]] = field(default_factory=dict)
    error: str = ""
    token_gaps_s: list[float] = field(default_factory=list)  # times between the records of a stream
    reconnects: int = 0  # number of repeated requests
    status: int = 0  # of the last response
    retry_after: str = ""  # header of the last response
    first_response_s: float = 0.0  # monotonic time at which the first response began, 0 without one

    def on_response(self, answer: httpx.Response) -> None:
        self.first_response_s = self.first_response_s or time.monotonic()
        self.status, self.retry_after = answer.status_code, answer.headers.get("Retry-After", "")

    def choice(self, index: int) -> dict[str, Any]:
        return self.choices.setdefault(
            index, {"text": "", "reasoning": "", "calls": {}, "logprobs": [], "finish": None}
        )

    def add_choice(self, choice: dict[str, Any]) -> None:
        own = self.choice(choice["index"])
        message = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
        own["text"] += message.get("content") or ""
        own["reasoning"] += message.get("reasoning") or ""
        for index, call in enumerate(message.get("tool_calls") or []):
            known = own["calls"].setdefault(call.get("index", index), {"name": "", "arguments": ""})
            known["name"] += call["function"].get("name") or ""
            known["arguments"] += call["function"].get("arguments") or ""
        own["logprobs"] += _logprobs(choice.get("logprobs") or {})
        own["finish"] = choice.get("finish_reason") or own["finish"]


def _logprobs(given: dict[str, Any]) -> list[Any]:
    if "content" in given:
        return list(given["content"] or [])
    return list(zip(given.get("tokens") or [], given.get("token_logprobs") or [], strict=True))


async def send(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], key: str = "", timeout_s: float = TIMEOUT_S
) -> Reply:
    """Send one request. Errors are stored in the reply.

    With a `key`, repeat the request until the reply is complete or `timeout_s` has passed.
    """
    reply = Reply()
    headers = {"Idempotency-Key": key} if key else {}
    deadline_s = time.monotonic() + timeout_s
    while True:
        reply.error = ""
        try:
            await (_send_streamed if body["stream"] else _send_complete)(client, path, body, headers, reply)
        except httpx.HTTPError as error:
            reply.error = f"{type(error).__name__}: {error}"
        lost = reply.error.startswith("503") or "Error: " in reply.error
        if not key or not lost or time.monotonic() > deadline_s:
            return reply
        reply.reconnects += 1
        await asyncio.sleep(0.05)


async def _send_complete(
    client: httpx.AsyncClient, path: str, body: Any, headers: dict[str, str], reply: Reply
) -> None:
    answer = await client.post(path, json=body, headers=headers)
    reply.on_response(answer)
    if answer.status_code != 200:
        reply.error = f"{answer.status_code}: {answer.text[:200]}"
        return
    for choice in answer.json()["choices"]:
        reply.add_choice(choice)


async def _send_streamed(
    client: httpx.AsyncClient, path: str, body: Any, headers: dict[str, str], reply: Reply
) -> None:
    """Read a stream. `headers` is updated with the position at which the next attempt resumes."""
    async with client.stream("POST", path, json=body, headers=headers) as answer:
        reply.on_response(answer)
        if answer.status_code != 200:
            reply.error = f"{answer.status_code}: {(await answer.aread())[:200]!r}"
            return
        async for event, record in _records(answer, reply.token_gaps_s):
            if "error" in record:
                reply.error = f"{record['error']['code']}: {record['error']['message']}"
            for choice in record.get("choices", []):
                reply.add_choice(choice)
            if event:
                headers["Last-Event-ID"] = event


async def _records(answer: httpx.Response, token_gaps_s: list[float]) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    last, done, event = time.perf_counter(), False, ""
    async for line in answer.aiter_lines():
        if line.startswith("id: "):
            event = line[4:]
        if not line.startswith("data: "):
            continue
        now = time.perf_counter()
        token_gaps_s.append(now - last)
        last = now
        if line == "data: [DONE]":
            done = True
        else:
            yield event, json.loads(line[6:])
        event = ""
    if not done:
        raise httpx.RemoteProtocolError("the stream ended without [DONE]")
