"""`python -m benchmarks.streams [--streams 256] [--rate 50] [--rounds 3]`: what streaming costs the gateway.

The real gateway process, held to one core, before an engine that computes nothing (paced.py) and clients that only
count records, both on other cores. Of each round the gateway's processor time over the time, once all streams run: the
share of its core, and microseconds a token. Routes alternate.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import msgspec

from appliance.gateway.config import GatewayConfig, write_config
from benchmarks.machine import facts

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "manifests" / "demo"
PATIENCE_S = 60.0
MESSAGES = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "chat": {"messages": MESSAGES},
    "completions": {"prompt": "hello"},
}
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


def cpu_s(pid: int) -> float:
    """Processor time of a process so far, with all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Clients:
    """So many streams at once, each on a connection of its own. `records`: of all together so far."""

    def __init__(self, port: int, route: str, tokens: int) -> None:
        body = {**BODIES[route], "max_tokens": tokens, "stream": True, "temperature": 0, "ignore_eos": True}
        data = json.dumps(body).encode()
        head = f"POST {PATHS[route]} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
        self._request = f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data
        self._port = port
        self.records = 0
        self.begun = 0

    async def stream(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 20)
        writer.write(self._request)
        first = True
        while data := await reader.read(1 << 16):
            self.records += data.count(b"data: {")
            if first and b"data: {" in data:
                first = False
                self.begun += 1
        writer.close()


@contextmanager
def gateway(rate: float, core: int, others: set[int]) -> Iterator[tuple[int, int]]:
    """A gateway and its engine: the gateway's port and process."""
    vocab = json.loads((MODEL / "config.json").read_text())["vocab_size"]
    with tempfile.TemporaryDirectory(prefix="streams") as folder:
        socket = Path(folder) / "engine.sock"
        words = [sys.executable, "-m", "benchmarks.paced", str(socket), str(rate), str(vocab)]
        engine = subprocess.Popen(words, cwd=ROOT, preexec_fn=lambda: os.sched_setaffinity(0, others))
        port = free_port()
        config = GatewayConfig(
            host="127.0.0.1", port=port, names=("demo",), model=str(MODEL), engines=(str(socket),),
            max_context=1 << 20, vocab_size=vocab, log_level="warning", max_waiting=100_000,
        )  # fmt: skip
        path = Path(folder) / "gateway.json"
        write_config(config, path)
        words = [sys.executable, "-m", "appliance.gateway", str(path)]
        process = subprocess.Popen(words, cwd=ROOT, preexec_fn=lambda: os.sched_setaffinity(0, {core}))
        try:
            wait_ready(port)
            yield port, process.pid
        finally:
            for each in (process, engine):
                each.kill()
                each.wait()


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def wait_ready(port: int) -> None:
    ends_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < ends_s:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise SystemExit("the gateway was not ready in time")


async def measure(port: int, pid: int, route: str, streams: int, rate: float, seconds: float) -> dict[str, float]:
    """Of one round: the share of a core, microseconds a token, tokens a second that reached clients."""
    clients = Clients(port, route, int(rate * (seconds + 5)))
    running = [asyncio.create_task(clients.stream()) for _ in range(streams)]
    while clients.begun < streams:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.5)
    cpu, records, began_s = cpu_s(pid), clients.records, time.monotonic()
    await asyncio.sleep(seconds)
    took_s = time.monotonic() - began_s
    used_s, tokens = cpu_s(pid) - cpu, clients.records - records
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    return {"share": used_s / took_s, "us_per_token": 1e6 * used_s / tokens, "tokens_per_second": tokens / took_s}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.streams", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--streams", type=int, default=256, help="at once (256)")
    parser.add_argument("--rate", type=float, default=50.0, help="tokens a second of each (50)")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each round (6)")
    parser.add_argument("--rounds", type=int, default=3, help="of each route (3)")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    given = parser.parse_args(arguments)
    cores = sorted(os.sched_getaffinity(0))
    core, others = cores[-1], set(cores[:-1]) or set(cores)
    os.sched_setaffinity(0, others)
    found: dict[str, list[dict[str, float]]] = {route: [] for route in PATHS}
    for _ in range(given.rounds):
        for route in PATHS:
            with gateway(given.rate, core, others) as (port, pid):
                one = asyncio.run(measure(port, pid, route, given.streams, given.rate, given.seconds))
            found[route].append(one)
    for route, rounds in found.items():
        shares = [each["share"] for each in rounds]
        costs = [each["us_per_token"] for each in rounds]
        rates = [each["tokens_per_second"] for each in rounds]
        print(
            f"{route:12} {statistics.median(shares):6.1%} of a core ({min(shares):.1%} to {max(shares):.1%}), "
            f"{statistics.median(costs):5.1f} µs a token, {statistics.median(rates):8,.0f} tokens/s arrived of "
            f"{given.streams * given.rate:,.0f}"
        )
    if given.out:
        settings = {"streams": given.streams, "rate": given.rate, "seconds": given.seconds}
        report = {"settings": settings, "machine": asdict(facts()), "rounds": found}
        given.out.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
