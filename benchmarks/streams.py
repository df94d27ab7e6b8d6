"""`python -m benchmarks.streams [--streams 256] [--rate 50] [--rounds 3] [--before TREE]`: CPU cost of streaming.

The real gateway process is pinned to one core, between an engine that computes nothing (stub_engine.py) and clients
that only count records, both on other cores. Each round reports the gateway's CPU time while all streams run: the share
of its core, and microseconds per token, with system calls listed separately. Routes alternate. With `--before`, the
gateways of two trees alternate too, so that both run under the same conditions.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec

from appliance.config.gateway import GatewayConfig, write_config
from appliance.config.sections.endpoints import Endpoints
from appliance.config.sections.limits import Limits
from appliance.config.sections.observability import Observability
from benchmarks.machine import facts

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "manifests" / "demo"
TIMEOUT_S = 60.0
MESSAGES = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}


@dataclass(frozen=True)
class Route:
    """Request of a route, and the output format (`format`) that the gateway parses."""

    path: str
    body: dict[str, Any]
    limit: str = "max_tokens"
    format: str = "auto"


ROUTES = {
    "chat": Route("/v1/chat/completions", {"messages": MESSAGES}),
    "tools": Route("/v1/chat/completions", {"messages": MESSAGES, "tools": [TOOL]}),
    "reasoning": Route("/v1/chat/completions", {"messages": MESSAGES}, format="deepseek_r1"),
    "completions": Route("/v1/completions", {"prompt": "hello"}),
    "responses": Route("/v1/responses", {"input": "hello", "store": False}, "max_output_tokens"),
    "messages": Route("/v1/messages", {"model": "demo", "messages": MESSAGES}),
}


@dataclass(frozen=True)
class CpuTime:
    """Processor time of a process so far, with all its threads, in seconds."""

    user_s: float
    system_s: float


def cpu_time(pid: int) -> CpuTime:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks = os.sysconf("SC_CLK_TCK")
    return CpuTime(int(fields[11]) / ticks, int(fields[12]) / ticks)


class Clients:
    """Run `streams` concurrent streams, each on its own connection. `records` counts records of all streams."""

    def __init__(self, port: int, route: Route, tokens: int) -> None:
        body = {**route.body, route.limit: tokens, "temperature": 0, "stream": True}
        data = json.dumps(body).encode()
        head = f"POST {route.path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
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
def gateway(tree: Path, route: Route, rate: float, core: int, others: set[int]) -> Iterator[tuple[int, int]]:
    """The gateway of a tree and its engine: the gateway's port and process."""
    vocab = json.loads((MODEL / "config.json").read_text())["vocab_size"]
    with tempfile.TemporaryDirectory(prefix="streams") as folder:
        socket = Path(folder) / "engine.sock"
        words = [sys.executable, "-m", "benchmarks.stub_engine", str(socket), str(rate), str(first_marker())]
        engine = subprocess.Popen(words, cwd=ROOT, preexec_fn=lambda: os.sched_setaffinity(0, others))
        port = free_port()
        config = GatewayConfig(
            endpoints=Endpoints(host="127.0.0.1", port=port), names=("demo",), model=str(MODEL), engines=(str(socket),),
            max_context=1 << 20, vocab_size=vocab, format=route.format,
            limits=Limits(max_waiting=100_000), observability=Observability(log_level="warning"),
        )  # fmt: skip
        path = Path(folder) / "gateway.json"
        write_config(config, path)
        words = [sys.executable, "-m", "appliance.server", str(path)]
        # Put the folder of that tree first on the path, unless the environment names another one.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        process = subprocess.Popen(words, cwd=tree, env=environment, preexec_fn=lambda: os.sched_setaffinity(0, {core}))
        try:
            wait_ready(port)
            yield port, process.pid
        finally:
            for each in (process, engine):
                each.kill()
                each.wait()


def first_marker() -> int:
    """The tokens below it are text: a reply of these stays in the one state that its route is about."""
    tokenizer = json.loads((MODEL / "tokenizer.json").read_text())
    return min(int(token["id"]) for token in tokenizer["added_tokens"])


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def wait_ready(port: int) -> None:
    ends_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < ends_s:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise SystemExit("the gateway was not ready within the time limit")


async def measure(port: int, pid: int, route: Route, streams: int, rate: float, seconds: float) -> dict[str, float]:
    """Results of one round: share of a core, microseconds per token, tokens per second that reached clients."""
    clients = Clients(port, route, int(rate * (seconds + 5)))
    running = [asyncio.create_task(clients.stream()) for _ in range(streams)]
    while clients.begun < streams:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.5)
    before, records, began_s = cpu_time(pid), clients.records, time.monotonic()
    await asyncio.sleep(seconds)
    took_s = time.monotonic() - began_s
    after, tokens = cpu_time(pid), clients.records - records
    user_s, system_s = after.user_s - before.user_s, after.system_s - before.system_s
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    return {
        "share": (user_s + system_s) / took_s,
        "us_per_token": 1e6 * (user_s + system_s) / tokens,
        "system_us_per_token": 1e6 * system_s / tokens,
        "tokens_per_second": tokens / took_s,
    }


def format_result(name: str, rounds: list[dict[str, float]], asked: float) -> str:
    def median(key: str) -> float:
        return statistics.median(each[key] for each in rounds)

    shares = [each["share"] for each in rounds]
    return (
        f"{name:18} {median('share'):6.1%} of a core ({min(shares):.1%} to {max(shares):.1%}), "
        f"{median('us_per_token'):5.1f} µs a token ({median('system_us_per_token'):.1f} in the system), "
        f"{median('tokens_per_second'):8,.0f} tokens/s arrived of {asked:,.0f}"
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.streams", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--streams", type=int, default=256, help="concurrent streams (256)")
    parser.add_argument("--rate", type=float, default=50.0, help="tokens per second of each stream (50)")
    parser.add_argument("--seconds", type=float, default=6.0, help="duration of a round (6)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each route (3)")
    parser.add_argument("--routes", nargs="+", choices=tuple(ROUTES), default=tuple(ROUTES), help="routes (all)")
    parser.add_argument("--before", type=Path, help="another source tree to compare with")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    given = parser.parse_args(arguments)
    cores = sorted(os.sched_getaffinity(0))
    core, others = cores[-1], set(cores[:-1]) or set(cores)
    os.sched_setaffinity(0, others)
    sides = {**({"before": given.before.resolve()} if given.before else {}), "now": ROOT}
    found: dict[str, list[dict[str, float]]] = {f"{route} {side}": [] for route in given.routes for side in sides}
    for _ in range(given.rounds):
        for name in given.routes:
            for side, tree in sides.items():
                with gateway(tree, ROUTES[name], given.rate, core, others) as (port, pid):
                    one = asyncio.run(measure(port, pid, ROUTES[name], given.streams, given.rate, given.seconds))
                found[f"{name} {side}"].append(one)
    for name, rounds in found.items():
        print(format_result(name, rounds, given.streams * given.rate))
    if given.out:
        settings = {"streams": given.streams, "rate": given.rate, "seconds": given.seconds}
        report = {"settings": settings, "machine": asdict(facts()), "rounds": found}
        given.out.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
