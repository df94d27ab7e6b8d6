"""`python -m benchmarks.kills [--kills 100] [--streams 32]`: the demo's engine is killed again and again under load;
with `--gateway` so is its gateway, under clients that come back with Idempotency-Key and Last-Event-ID.

Clients ask a mix of everything that a reply can be made of: chat and completions, streamed and whole, greedy and
sampled, logprobs, several choices, stop strings, JSON schemas, tool calls. Each reply is compared with the one that the
same request got before any kill. Exit code 1 when a request failed or one token differs.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from appliance.chaos.client import PATIENCE_S, ask
from appliance.supervisor.programs import program
from benchmarks.machine import facts
from benchmarks.serve import spread
from benchmarks.service import serving

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "ages": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["name", "ages"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def chat(text: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **fields}


def completion(text: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"prompt": text, "ignore_eos": True, **fields}


def mix(tokens: int) -> list[tuple[str, dict[str, Any]]]:
    """Requests of every kind, each streamed and whole; sampled ones have their seed."""
    sampled = {"temperature": 1.0, "seed": 7}
    asks = [
        completion("Once upon a time", max_tokens=tokens, temperature=0),
        completion("Tell me more", max_tokens=tokens, **sampled),
        completion("a b c", max_tokens=tokens, logprobs=3, **sampled),
        completion("The sun", max_tokens=tokens, n=3, top_p=0.9, **sampled),
        completion("One two", max_tokens=tokens, stop=[" the", "zq"], min_tokens=8, **sampled),
        completion("Repeat", max_tokens=tokens, presence_penalty=0.5, frequency_penalty=0.3, **sampled),
        chat("What is 17 + 25?", max_tokens=tokens, temperature=0, logprobs=True, top_logprobs=2),
        chat("Give me a person", max_tokens=tokens, response_format=_json_format(), **sampled),
        chat("What is the weather in Oslo?", max_tokens=tokens, tools=[TOOL], tool_choice="required", temperature=0),
    ]
    return [(path, {**body, "stream": stream}) for path, body in asks for stream in (True, False)]


def _json_format() -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}


@dataclass
class Result:
    """Counts of requests; `differing` holds the first few that were not the same, `gaps_s` the longest pause of each
    stream that a kill interrupted, `restarts_s` the times from a kill until the service was ready again."""

    kills: int = 0
    requests: int = 0
    comebacks: int = 0
    failed: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    restarts_s: list[float] = field(default_factory=list)


async def torment(
    url: str,
    victims: Sequence["Victim"],
    *,
    kills: int,
    streams: int,
    tokens: int,
    seed: int = 0,
    durable: bool = False,
) -> Result:
    """Kills one of the victims `kills` times, at random moments while `streams` clients ask without a pause; with
    `durable` each request has a key, and its client comes back."""
    rng, result, asks = random.Random(seed), Result(), mix(tokens)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=limits) as client:
        expected = [await ask(client, *each) for each in asks]
        for (path, body), reply in zip(asks, expected, strict=True):
            assert not reply.error, f"{path} {body}: {reply.error}"
        over = asyncio.Event()
        numbers, keys = itertools.count(), itertools.count()

        async def one_client() -> None:
            while not over.is_set():
                number = next(numbers) % len(asks)
                key = f"{seed}-{result.requests}-{next(keys)}" if durable else ""
                reply = await ask(client, *asks[number], key)
                result.requests += 1
                result.comebacks += reply.comebacks
                if reply.error:
                    result.failed.append(f"{asks[number]}: {reply.error}")
                elif reply.choices != expected[number].choices:
                    result.differing.append(f"{asks[number]}: {reply.choices} instead of {expected[number].choices}")
                if reply.pauses_s and max(reply.pauses_s) > 0.5:
                    result.gaps_s.append(max(reply.pauses_s))

        clients = [asyncio.create_task(one_client()) for _ in range(streams)]
        try:
            for _ in range(kills):
                await asyncio.sleep(rng.uniform(0.05, 1.5))
                began_s = time.perf_counter()
                victim = rng.choice(victims)
                victim.kill()
                result.kills += 1
                await victim.back(client)
                result.restarts_s.append(time.perf_counter() - began_s)
        finally:
            over.set()
        await asyncio.gather(*clients)
    return result


class Victim:
    """A process of an appliance on this machine, `engine-0` or `gateway`."""

    def __init__(self, launcher: int, name: str = "engine-0") -> None:
        self._launcher = launcher
        self._name = name
        self._killed = 0

    def pid(self) -> int:
        """The living one below the launcher, 0 if there is none."""
        return program(self._launcher, self._name)

    def kill(self) -> None:
        self._killed = self.pid()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._killed, signal.SIGKILL)

    async def back(self, client: httpx.AsyncClient) -> None:
        """Waits until another process serves."""
        deadline_s = time.monotonic() + PATIENCE_S
        while self.pid() in (0, self._killed):
            assert time.monotonic() < deadline_s, f"{self._name}: it was not started again"
            await asyncio.sleep(0.05)
        while not await _is_ready(client):
            assert time.monotonic() < deadline_s, f"{self._name}: it did not come back"
            await asyncio.sleep(0.05)


async def _is_ready(client: httpx.AsyncClient) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return (await client.get("/ready")).status_code == 200
    return False


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kills", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100, help="how often (100)")
    parser.add_argument("--streams", type=int, default=32, help="clients that ask at once (32)")
    parser.add_argument("--tokens", type=int, default=150, help="longest reply (150)")
    parser.add_argument("--gateway", action="store_true", help="kill the gateway too; clients come back to it")
    parser.add_argument("--log", type=Path, help="file for what the service prints")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    given = parser.parse_args(arguments)
    wanted = {"kills": given.kills, "streams": given.streams, "tokens": given.tokens}
    names = ("engine-0", "gateway") if given.gateway else ("engine-0",)
    with serving("lifecycle.restart.max=100000", "lifecycle.restart.backoff=0s", log=given.log) as demo:
        victims = [Victim(demo.launcher, name) for name in names]
        result = asyncio.run(torment(demo.url, victims, **wanted, durable=given.gateway))
    report = {
        "settings": wanted,
        "machine": asdict(facts()),
        "kills": result.kills,
        "requests": result.requests,
        "comebacks": result.comebacks,
        "failed": len(result.failed),
        "differing": len(result.differing),
        "gaps_ms": spread(result.gaps_s),
        "restarts_ms": spread(result.restarts_s),
    }
    for name in ("kills", "requests", "comebacks", "failed", "differing"):
        print(f"{name:12}{report[name]}")
    for name in ("restarts_ms", "gaps_ms"):
        print(f"{name:12}" + "  ".join(f"{key} {value:.0f}" for key, value in report[name].items()))
    for line in (*result.failed[:3], *result.differing[:3]):
        print(line)
    if given.out:
        given.out.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if result.failed or result.differing else 0


if __name__ == "__main__":
    sys.exit(main())
