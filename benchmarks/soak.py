"""`python -m benchmarks.soak [--minutes 30] [--aborts 2000]`: the demo at saturation, with clients of every bad kind.

Beside requests of all kinds without a pause (those of `benchmarks.kills`): aborts at random tokens, readers of a few
bytes a second, malformed requests, invalid JSON, bodies that are too large, connections that break anywhere. What is
held when nothing is asked any more is compared with what was held after a first part of the same: KV blocks, requests,
memory, open files and threads of each process, files of the run directory. Exit code 1 when something leaked, a request
failed, a malformed one got anything but a 4xx, or an engine was taken for hung.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx

from benchmarks.crowd import Crowd, Tally
from benchmarks.holdings import Holdings, leaks, look
from benchmarks.machine import facts
from benchmarks.service import ROOT, Running, serving
from engine.kv.layout import layout
from engine.models.checkpoint import read_checkpoint

SAMPLE_S = 5.0
REST_S = 60.0  # in which nothing is held any more
FIRST_PART = 0.1
FIRST_S = (4.0, 120.0)  # at least, and at most
MAX_BODY = 2**20
# A small KV cache, so that a few prompts fill it: pages that are touched for the first time would look like a leak.
KV_BYTES = 32 * 2**20
PROMPT_TOKENS = 1500
MODEL = ROOT / "manifests" / "demo"
SETTINGS = (f"limits.max_body={MAX_BODY}B", f"hardware.kv_cache_memory={KV_BYTES}B", "model.max_context=2048")
CALM = ("open_requests", "held", "waiting", "running", "kv_used")


async def fill(client: httpx.AsyncClient, seed: int) -> None:
    """Prompts that have nothing in common, until each block of the cache was used."""
    model = read_checkpoint(MODEL).model
    form = layout(model, block_tokens=1, element_bytes=2)
    rng = random.Random(seed)
    for _ in range(form.blocks(KV_BYTES) // PROMPT_TOKENS + 2):
        prompt = [rng.randrange(model.embed.vocab) for _ in range(PROMPT_TOKENS)]
        reply = await client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})
        reply.raise_for_status()


async def soak(service: Running, *, minutes: float, aborts: int, streams: int, seed: int = 0) -> Any:
    """The report."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    tally = Tally()
    async with httpx.AsyncClient(base_url=service.url, timeout=600.0, limits=limits) as client:
        crowd = Crowd(service.url, client, tally, streams=streams, seed=seed, max_body=MAX_BODY)
        await crowd.learn()
        await fill(client, seed)
        total_s = 60 * minutes
        first_s = min(FIRST_S[1], max(FIRST_S[0], FIRST_PART * total_s))
        samples: list[dict[str, Any]] = []
        began_s = time.monotonic()
        await _part(crowd, service, client, samples, first_s, aborts * first_s / total_s)
        before = await rested(service, client)
        await _part(crowd, service, client, samples, total_s - first_s, aborts - tally.aborts)
        after = await rested(service, client)
    return {
        "settings": {"minutes": minutes, "aborts": aborts, "streams": streams, "seed": seed},
        "machine": asdict(facts()),
        "seconds": round(time.monotonic() - began_s, 1),
        "tally": asdict(tally),
        "before": asdict(before),
        "after": asdict(after),
        "samples": samples,
        "wrong": [*tally.wrong(aborts), *leaks(before, after)],
    }


async def _part(
    crowd: Crowd,
    service: Running,
    client: httpx.AsyncClient,
    samples: list[dict[str, Any]],
    seconds: float,
    aborts: float,
) -> None:
    over = asyncio.create_task(crowd.run(seconds, aborts))
    began_s = time.monotonic()
    while not over.done():
        await asyncio.wait([over], timeout=SAMPLE_S)
        held = await look(service.launcher, client, service.directory)
        at_s = round(time.monotonic() - began_s, 1)
        samples.append({"at_s": at_s, "kv_used": held.gauges["kv_used"], "memory": held.memory, "files": held.files})
    await over


async def rested(service: Running, client: httpx.AsyncClient) -> Holdings:
    """What is held when all is done, or after a while."""
    deadline_s = time.monotonic() + REST_S
    while True:
        held = await look(service.launcher, client, service.directory)
        if not any(held.gauges[name] for name in CALM) or time.monotonic() > deadline_s:
            return held
        await asyncio.sleep(0.25)


def table(report: dict[str, Any]) -> list[str]:
    before, after, tally = report["before"], report["after"], report["tally"]
    lines = [f"{name:24}{value}" for name, value in tally.items() if not isinstance(value, list | dict)]
    lines += [f"{'malformed, by answer':24}{tally['answers']}"]
    for name in after["gauges"]:
        lines.append(f"{name:24}{before['gauges'][name]:g} → {after['gauges'][name]:g}")
    for what, unit in (("memory", 2**20), ("files", 1), ("threads", 1)):
        for name, value in after[what].items():
            was = before[what].get(name, 0)
            lines.append(f"{what + ' ' + name:24}{was / unit:.0f} → {value / unit:.0f}{' MiB' * (unit > 1)}")
    return [*lines, *(f"WRONG: {text}" for text in report["wrong"])]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="how long (30)")
    parser.add_argument("--aborts", type=int, default=2000, help="requests whose client leaves (2000)")
    parser.add_argument("--streams", type=int, default=16, help="requests of good clients at once (16)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, help="file for what the service prints")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    given = parser.parse_args(arguments)
    wanted = {"minutes": given.minutes, "aborts": given.aborts, "streams": given.streams, "seed": given.seed}
    with (
        tempfile.TemporaryDirectory(prefix="soak-") as folder,
        serving(*SETTINGS, f"lifecycle.crash_bundles.folder={folder}/crashes", log=given.log) as service,
    ):
        report = asyncio.run(soak(service, **wanted))
    print("\n".join(table(report)))
    if given.out:
        given.out.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if report["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
