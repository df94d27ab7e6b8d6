"""`python -m benchmarks.fault_injection [--kills 100] [--streams 32]`: kill the demo's engine repeatedly under load.

With `--gateway`, the gateway is killed too, and clients reconnect with Idempotency-Key and Last-Event-ID. Requests
cover all kinds of replies: chat and completions, streamed and not streamed, greedy and sampled, logprobs, several
choices, stop strings, JSON schemas, tool calls. Each reply is compared with the reply to the same request before the
first kill. The exit code is 1 if a request failed or a token differs.
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

from appliance.bench.summary import summarize_times as summarize
from appliance.chaos.client import TIMEOUT_S, send
from appliance.supervisor.programs import program
from benchmarks.machine import facts
from benchmarks.service import running_service

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
    """Return requests of every kind, each with and without streaming. Sampled requests have a seed."""
    sampled = {"temperature": 1.0, "seed": 7}
    requests = [
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
    return [(path, {**body, "stream": stream}) for path, body in requests for stream in (True, False)]


def _json_format() -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}


@dataclass
class Result:
    """Counts of requests and times."""

    kills: int = 0
    requests: int = 0
    reconnects: int = 0  # repeated requests of clients
    failed: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)  # replies that differ from the expected ones
    gaps_s: list[float] = field(default_factory=list)  # longest pause of each interrupted stream
    restarts_s: list[float] = field(default_factory=list)  # times from a kill until the service is ready again


async def kill_under_load(
    url: str,
    targets: Sequence["KillTarget"],
    *,
    kills: int,
    streams: int,
    tokens: int,
    seed: int = 0,
    durable: bool = False,
) -> Result:
    """Kill a random target `kills` times, at random moments, while `streams` clients send requests without a pause.

    With `durable`, each request has an idempotency key, and its client reconnects.
    """
    rng, result, requests = random.Random(seed), Result(), mix(tokens)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits) as client:
        expected = [await send(client, *each) for each in requests]
        for (path, body), reply in zip(requests, expected, strict=True):
            assert not reply.error, f"{path} {body}: {reply.error}"
        stopping = asyncio.Event()
        numbers, keys = itertools.count(), itertools.count()

        async def one_client() -> None:
            while not stopping.is_set():
                number = next(numbers) % len(requests)
                key = f"{seed}-{result.requests}-{next(keys)}" if durable else ""
                reply = await send(client, *requests[number], key)
                result.requests += 1
                result.reconnects += reply.reconnects
                if reply.error:
                    result.failed.append(f"{requests[number]}: {reply.error}")
                elif reply.choices != expected[number].choices:
                    result.differing.append(
                        f"{requests[number]}: {reply.choices} instead of {expected[number].choices}"
                    )
                if reply.token_gaps_s and max(reply.token_gaps_s) > 0.5:
                    result.gaps_s.append(max(reply.token_gaps_s))

        clients = [asyncio.create_task(one_client()) for _ in range(streams)]
        try:
            for _ in range(kills):
                await asyncio.sleep(rng.uniform(0.05, 1.5))
                began_s = time.perf_counter()
                target = rng.choice(targets)
                target.kill()
                result.kills += 1
                await target.wait_restarted(client)
                result.restarts_s.append(time.perf_counter() - began_s)
        finally:
            stopping.set()
        await asyncio.gather(*clients)
    return result


class KillTarget:
    """A process of a local appliance, `engine-0` or `gateway`."""

    def __init__(self, launcher: int, name: str = "engine-0") -> None:
        self._launcher = launcher
        self._name = name
        self._killed = 0

    def pid(self) -> int:
        """Return the id of the running process below the launcher, 0 if there is none."""
        return program(self._launcher, self._name)

    def kill(self) -> None:
        self._killed = self.pid()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._killed, signal.SIGKILL)

    async def wait_restarted(self, client: httpx.AsyncClient) -> None:
        """Wait until a new process serves."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while self.pid() in (0, self._killed):
            assert time.monotonic() < deadline_s, f"{self._name}: not restarted"
            await asyncio.sleep(0.05)
        while not await _is_ready(client):
            assert time.monotonic() < deadline_s, f"{self._name}: not ready after the restart"
            await asyncio.sleep(0.05)


async def _is_ready(client: httpx.AsyncClient) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return (await client.get("/ready")).status_code == 200
    return False


def main(arguments: list[str] | None = None) -> int:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fault_injection", description=summary)
    parser.add_argument("--kills", type=int, default=100, help="number of kills (100)")
    parser.add_argument("--streams", type=int, default=32, help="concurrent clients (32)")
    parser.add_argument("--tokens", type=int, default=150, help="maximum tokens of a reply (150)")
    parser.add_argument("--gateway", action="store_true", help="kill the gateway too; clients reconnect")
    parser.add_argument("--log", type=Path, help="file for the output of the service")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    given = parser.parse_args(arguments)
    wanted = {"kills": given.kills, "streams": given.streams, "tokens": given.tokens}
    names = ("engine-0", "gateway") if given.gateway else ("engine-0",)
    with running_service("lifecycle.restart.max=100000", "lifecycle.restart.backoff=0s", log=given.log) as demo:
        targets = [KillTarget(demo.launcher, name) for name in names]
        result = asyncio.run(kill_under_load(demo.url, targets, **wanted, durable=given.gateway))
    report = {
        "settings": wanted,
        "machine": asdict(facts()),
        "kills": result.kills,
        "requests": result.requests,
        "comebacks": result.reconnects,
        "failed": len(result.failed),
        "differing": len(result.differing),
        "gaps_ms": summarize(result.gaps_s),
        "restarts_ms": summarize(result.restarts_s),
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
