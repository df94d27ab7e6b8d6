"""`python -m benchmarks.serve --url http://127.0.0.1:8000 [--rate R | --concurrency C]`: load any OpenAI endpoint.

Open loop (`--rate`): Poisson arrivals that do not wait for replies. Closed loop (`--concurrency`): C clients, each of
which sends its next request after its reply. Replies are streamed, to measure the first token and the pauses between
tokens. The exit code is 1 if a request failed.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx

from benchmarks.client import Outcome, send
from benchmarks.load import LoadRequest, Shape, make_load
from benchmarks.machine import facts

PERCENTILES = (50, 90, 95, 99)


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(
        prog="python -m benchmarks.serve", description=(__doc__ or "").partition("\n")[0]
    )
    arguments.add_argument("--url", required=True, help="server, such as http://127.0.0.1:8000")
    arguments.add_argument("--model", help="model name; default: the first one of /v1/models")
    arguments.add_argument("--api-key", help="API key, sent as a bearer token")
    arguments.add_argument("--chat", action="store_true", help="use chat completions instead of completions")
    loop = arguments.add_mutually_exclusive_group()
    loop.add_argument("--rate", type=float, help="open loop: requests per second")
    loop.add_argument("--concurrency", type=int, default=8, help="closed loop: concurrent clients (8)")
    arguments.add_argument("--requests", type=int, default=100, help="number of requests (100)")
    arguments.add_argument("--seed", type=int, default=0, help="seed of lengths, words and arrivals (0)")
    arguments.add_argument("--prompt-tokens", type=float, default=100.0, help="median prompt length (100)")
    arguments.add_argument("--output-tokens", type=float, default=180.0, help="median reply length (180)")
    arguments.add_argument("--most-tokens", type=int, default=1024, help="longest prompt, and longest reply (1024)")
    arguments.add_argument("--timeout", type=float, default=600.0, help="read timeout of a request in seconds (600)")
    arguments.add_argument("--out", type=Path, help="JSON file for the result")
    return arguments


async def closed_loop(
    client: httpx.AsyncClient, load: Sequence[LoadRequest], model: str, clients: int, chat: bool
) -> list[Outcome]:
    began_s, pending, outcomes = time.perf_counter(), iter(load), list[Outcome]()

    async def one_client() -> None:
        for request in pending:
            outcomes.append(await send(client, request, model, chat=chat, began_s=began_s))

    await asyncio.gather(*(one_client() for _ in range(clients)))
    return outcomes


async def open_loop(client: httpx.AsyncClient, load: Sequence[LoadRequest], model: str, chat: bool) -> list[Outcome]:
    began_s = time.perf_counter()

    async def send_on_schedule(request: LoadRequest) -> Outcome:
        await asyncio.sleep(began_s + request.start_s - time.perf_counter())
        return await send(client, request, model, chat=chat, began_s=began_s)

    return list(await asyncio.gather(*(send_on_schedule(request) for request in load)))


def summarize(values_s: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles (nearest rank) in milliseconds; empty without values."""
    if not values_s:
        return {}
    ordered = sorted(values_s)
    ranks = {f"p{share}": ordered[max(0, -(-share * len(ordered) // 100) - 1)] for share in PERCENTILES}
    return {name: round(1000 * value, 3) for name, value in ({"mean": statistics.fmean(ordered)} | ranks).items()}


def summary(outcomes: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    """The numbers of one run; latencies are of complete replies only."""
    good = [outcome for outcome in outcomes if not outcome.error]
    output = sum(outcome.output_tokens for outcome in good)
    decoded = [outcome for outcome in good if outcome.output_tokens > 1]
    return {
        "seconds": round(seconds, 3),
        "requests": len(outcomes),
        "failures": len(outcomes) - len(good),
        "errors": dict(Counter(outcome.error for outcome in outcomes if outcome.error).most_common(10)),
        "prompt_tokens": sum(outcome.prompt_tokens for outcome in good),
        "output_tokens": output,
        "requests_per_second": round(len(good) / seconds, 3),
        "output_tokens_per_second": round(output / seconds, 3),
        "time_to_first_token_ms": summarize([outcome.first_s for outcome in good if outcome.first_s]),
        "inter_token_latency_ms": summarize([pause for outcome in good for pause in outcome.token_gaps_s]),
        "time_per_output_token_ms": summarize(
            [(each.last_s - each.first_s) / (each.output_tokens - 1) for each in decoded]
        ),
        "request_ms": summarize([outcome.last_s for outcome in good]),
    }


def table(result: dict[str, Any]) -> str:
    numbers = result["result"]
    lines = [f"{name:<28}{numbers[name]:>12}" for name in numbers if not isinstance(numbers[name], dict)]
    columns = ["mean", *(f"p{share}" for share in PERCENTILES)]
    lines.append(f"{'':<28}" + "".join(f"{column:>12}" for column in columns))
    for name, values in numbers.items():
        if name.endswith("_ms"):
            lines.append(f"{name:<28}" + "".join(f"{values.get(column, '-'):>12}" for column in columns))
    lines += [f"failed {count} times: {error}" for error, count in numbers["errors"].items()]
    return "\n".join(lines)


async def first_model(client: httpx.AsyncClient) -> str:
    reply = await client.get("/v1/models")
    reply.raise_for_status()
    return str(reply.json()["data"][0]["id"])


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """One run: load, results, machine."""
    shapes = {
        "prompt": Shape(arguments.prompt_tokens, 1.2, arguments.most_tokens),
        "output": Shape(arguments.output_tokens, 0.9, arguments.most_tokens),
    }
    load = list(make_load(requests=arguments.requests, seed=arguments.seed, rate=arguments.rate, **shapes))
    headers = {"Authorization": f"Bearer {arguments.api_key}"} if arguments.api_key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(
        base_url=arguments.url, headers=headers, timeout=arguments.timeout, limits=limits
    ) as client:
        model = arguments.model or await first_model(client)
        began_s = time.perf_counter()
        if arguments.rate is not None:
            outcomes = await open_loop(client, load, model, arguments.chat)
        else:
            outcomes = await closed_loop(client, load, model, arguments.concurrency, arguments.chat)
        seconds = time.perf_counter() - began_s
    settings = {name: value for name, value in vars(arguments).items() if name not in ("api_key", "out")}
    return {
        "benchmark": "serve",
        "settings": settings | {"model": model, "concurrency": None if arguments.rate else arguments.concurrency},
        "asked": {
            "max_tokens": sum(request.max_tokens for request in load),
            "prompt_characters": sum(len(request.prompt) for request in load),
        },
        "machine": asdict(facts()),
        "result": summary(outcomes, seconds),
    }


def main(given: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(given)
    if arguments.requests < 1 or arguments.concurrency < 1 or (arguments.rate is not None and arguments.rate <= 0):
        print("--requests, --concurrency and --rate must be positive", file=sys.stderr)
        return 2
    try:
        result = asyncio.run(run(arguments))
    except httpx.HTTPError as error:
        print(f"{arguments.url}: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    print(table(result))
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if result["result"]["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
