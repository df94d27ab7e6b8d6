"""A request that crashes the engine after a few tokens, together with other requests."""

import asyncio
import json
from typing import Any

import httpx

MARKER = [11, 12, 13, 11, 12, 13, 12, 12]
TOKENS_BEFORE = 12

FAULT = f"""
import os
import sys

class Fault:
    def find_spec(self, name, path, target=None):
        if name != "engine.core.loop":
            return None
        sys.meta_path.remove(self)
        from engine.core.scheduler import Scheduler
        plan = Scheduler.plan
        def crash(self, now):
            planned = plan(self, now)
            for sequence in planned.sequences if planned is not None else ():
                submit = sequence.submit
                gained = len(sequence.ids) - len(submit.prompt) - len(submit.emitted)
                if submit.prompt == {tuple(MARKER)} and gained >= {TOKENS_BEFORE}:
                    os.kill(os.getpid(), 9)
            return planned
        Scheduler.plan = crash

sys.meta_path.insert(0, Fault())
"""


def other(number: int) -> dict[str, Any]:
    prompt = f"Number {number} of many"
    return {"prompt": prompt, "max_tokens": 80, "ignore_eos": True, "temperature": 1.0, "seed": number}


async def stream(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[str, str]:
    """The text of a streamed reply and how it finished."""
    text, finish = "", ""
    async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as reply:
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "choices" in event, event
                text += event["choices"][0]["text"]
                finish = event["choices"][0]["finish_reason"] or finish
    return text, finish


async def attack(
    url: str, others: int, poison: int, more_tokens: int
) -> tuple[list[tuple[str, str]], list[tuple[str, str]], list[httpx.Response]]:
    """Return the other requests' replies without and with copies of the poison request, and the copies' replies.

    A service rejects an isolated request for an hour; one with another max_tokens is another request."""
    bad = {"prompt": MARKER, "max_tokens": 300 + more_tokens, "ignore_eos": True, "temperature": 0}
    async with httpx.AsyncClient(base_url=url, timeout=300.0) as client:
        before = await asyncio.gather(*(stream(client, other(number)) for number in range(others)))
        copies = asyncio.gather(*(client.post("/v1/completions", json=bad) for _ in range(poison)))
        beside = await asyncio.gather(*(stream(client, other(number)) for number in range(others)))
        return before, beside, [*await copies, await client.post("/v1/completions", json=bad)]
