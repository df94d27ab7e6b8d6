"""`python -m benchmarks.journal [--rounds 7] [--streams 8]`: measure the cost of durable replies.

One service has random weights in the shape of a model. Each round sends the same streams without and with an
Idempotency-Key. Replies with a key are written to the journal, and a second reader renders them. Prints tokens per
second over HTTP: medians, ranges and the ratio.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
import uuid
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx

from benchmarks.machine import facts
from benchmarks.service import running_service
from benchmarks.shapes import SHAPES, make

TIMEOUT_S = 600.0


async def stream(client: httpx.AsyncClient, number: int, tokens: int, *, durable: bool) -> int:
    """Records that one stream got."""
    headers = {"Idempotency-Key": uuid.uuid4().hex} if durable else {}
    body = {"prompt": [number + 10] * 32, "max_tokens": tokens, "ignore_eos": True, "stream": True, "temperature": 0}
    records = 0
    async with client.stream("POST", "/v1/completions", json=body, headers=headers) as reply:
        assert reply.status_code == 200, await reply.aread()
        async for line in reply.aiter_lines():
            records += line.startswith("data: {")
    return records


async def round_of(url: str, streams: int, tokens: int, *, durable: bool) -> float:
    """Tokens a second."""
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=httpx.Limits(max_connections=None)) as client:
        began_s = time.perf_counter()
        await asyncio.gather(*(stream(client, number, tokens, durable=durable) for number in range(streams)))
        return streams * tokens / (time.perf_counter() - began_s)


def measure(url: str, rounds: int, streams: int, tokens: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"without": [], "with": []}
    for number in range(-1, rounds):  # one round of each to warm up
        sides = ("without", "with") if number % 2 else ("with", "without")
        for side in sides:
            rate = asyncio.run(round_of(url, streams, tokens, durable=side == "with"))
            if number >= 0:
                found[side].append(rate)
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.journal", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen2.5-0.5b")
    parser.add_argument("--checkpoints", type=Path, default=Path(tempfile.gettempdir()) / "slipway-shapes")
    parser.add_argument("--rounds", type=int, default=7, help="rounds with and without a journal (7)")
    parser.add_argument("--streams", type=int, default=8, help="concurrent streams (8)")
    parser.add_argument("--tokens", type=int, default=150, help="tokens of each reply (150)")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        manifest = Path(folder) / "m.yaml"
        checkpoint = make(given.shape, given.checkpoints / given.shape)
        text = f"apiVersion: slipway/v2\nmodel: {{source: {{path: {checkpoint}}}}}\nquantization: {{weights: int8}}\n"
        manifest.write_text(text)
        with running_service("model.max_context=512", manifest=manifest) as service:
            found = measure(service.url, given.rounds, given.streams, given.tokens)
    medians = {side: statistics.median(rates) for side, rates in found.items()}
    report: dict[str, Any] = {
        "settings": {"shape": given.shape, "weights": "int8", "streams": given.streams, "tokens": given.tokens},
        "machine": asdict(facts()),
        "tokens_per_second": found,
        "medians": medians,
        "ratio": medians["with"] / medians["without"],
    }
    for side, rates in found.items():
        print(f"{side:8} a journal: {medians[side]:8.1f} tokens/s  ({min(rates):.1f} to {max(rates):.1f})")
    print(f"with / without: {report['ratio']:.4f}")
    if given.out:
        given.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
