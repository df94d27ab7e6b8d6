"""Slipway over HTTP: one streamed completion for each row of the batch; tokens are counted as they arrive.

The clients run in this process and share the machine with the service. They only read lines, to use little CPU.
"""

import asyncio
import atexit
import json
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.request import urlopen

from benchmarks.backends import STEPS, Job, Measure, prompts
from benchmarks.backends.slipway import overlap_tokens

START_S = 300.0


def load(checkpoint: Path, bits: str, variant: str, threads: int, most: list[int]) -> Measure:
    """Starts `slipway serve` and waits until it is ready."""
    rows, context, tokens = most
    port = _free_port()
    folder = tempfile.TemporaryDirectory(prefix="slipway-bench-")
    manifest = Path(folder.name) / "manifest.yaml"
    length = context + STEPS + overlap_tokens(rows, context) + 16
    manifest.write_text(
        json.dumps(
            {
                "apiVersion": "slipway/v2",
                "model": {"source": {"path": str(checkpoint.resolve())}, "names": ["bench"], "max_context": length},
                "quantization": {"weights": "auto" if bits == "stored" else bits},
                "hardware": {"device": "cpu", "threads": threads, "kernels": variant or "auto"},
                "engine": {"scheduling": {"max_running": max(1, rows)}},
                "endpoints": {"host": "127.0.0.1", "port": port},
            }
        )
    )
    log = (Path(folder.name) / "log").open("w+")
    service = subprocess.Popen(
        [sys.executable, "-m", "appliance", "serve", str(manifest)], stdout=log, stderr=log, cwd=folder.name
    )

    def stop() -> None:
        service.terminate()
        service.wait(timeout=60)
        folder.cleanup()

    atexit.register(stop)
    _await_ready(service, port, Path(folder.name) / "log")
    vocab = json.loads((checkpoint / "config.json").read_text())["vocab_size"]
    rounds = 0

    def measure(job: Job) -> float:
        nonlocal rounds
        rounds += 1
        if job.batch == 0:
            (ids,) = prompts(1, job.context, vocab, start=rounds)
            start = time.perf_counter()
            (times,) = asyncio.run(_streams(port, [ids], [1]))
            return job.context / (times[0] - start)
        ahead = overlap_tokens(job.batch, job.context)
        token_counts = [STEPS + ahead] * (job.batch - 1) + [STEPS]
        while True:
            last = asyncio.run(_streams(port, prompts(job.batch, job.context, vocab), token_counts))[-1]
            if last[-1] > last[0]:  # otherwise a tiny model's tokens arrived as one piece, without a time between them
                return job.batch * (STEPS - 1) / (last[-1] - last[0])

    return measure


async def _streams(port: int, rows: list[list[int]], token_counts: list[int]) -> list[list[float]]:
    """When each piece of each row arrived: one for a token, or for several that came together."""
    tasks = []
    for ids, tokens in zip(rows, token_counts, strict=True):
        tasks.append(asyncio.create_task(_stream(port, ids, tokens)))
        await asyncio.sleep(0.005)  # the last one comes last
    return await asyncio.gather(*tasks)


async def _stream(port: int, ids: list[int], tokens: int) -> list[float]:
    body = json.dumps(
        {
            "model": "bench",
            "prompt": ids,
            "max_tokens": tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        "POST /v1/completions HTTP/1.1",
        "Host: x",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    )
    writer.write("\r\n".join((*head, "", "")).encode() + body)
    times: list[float] = []
    while line := await reader.readline():
        if line.startswith(b"data: [DONE]"):
            break
        if line.startswith(b"data:"):
            if b'"error"' in line:
                raise SystemExit(f"the service answered {line!r}")
            times.append(time.perf_counter())
    writer.close()
    if not times:
        raise SystemExit(f"no text for {tokens} tokens")
    return times


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _await_ready(service: subprocess.Popen[bytes], port: int, log: Path) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end and service.poll() is None:
        try:
            with urlopen(f"http://127.0.0.1:{port}/ready", timeout=5) as reply:
                if reply.status == 200:
                    return
        except OSError:
            time.sleep(0.2)
    raise SystemExit(f"the service did not become ready:\n{log.read_text()[-2000:]}")
