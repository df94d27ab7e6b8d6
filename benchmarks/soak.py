"""`python -m benchmarks.soak [--minutes 30] [--aborts 2000]`: saturate the demo with good and bad clients; find leaks.

Good clients send the requests of `benchmarks.fault_injection` without a pause. Bad clients abort at random tokens, read
a few bytes per second, send malformed requests, invalid JSON and oversized bodies, and break connections at any point.
When the service is idle again, its resource usage is compared with the usage after a short first part of the same load:
KV blocks, requests, memory, open files and threads of each process, files of the run directory. The exit code is 1 if a
resource leaked, a request failed, a malformed request got another status than 4xx, or an engine was reported as hung.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx

from benchmarks.leak_check import ResourceUsage, leaks, measure_usage
from benchmarks.machine import facts
from benchmarks.mixed_load import MixedLoad, Tally
from benchmarks.service import ROOT, Service, running_service
from engine.kv.layout import layout
from engine.models.checkpoint import read_checkpoint

SAMPLE_S = 5.0
REST_S = 60.0  # within which the service must become idle
FIRST_PART = 0.1
FIRST_S = (4.0, 120.0)  # at least, and at most
MAX_BODY = 2**20
# A small KV cache, so that a few prompts fill it: the first use of a page would look like a leak.
KV_BYTES = 32 * 2**20
PROMPT_TOKENS = 1500
MODEL = ROOT / "manifests" / "demo"
SETTINGS = (f"limits.max_body={MAX_BODY}B", f"hardware.kv_cache_memory={KV_BYTES}B", "model.max_context=2048")
CALM = ("open_requests", "held", "waiting", "running", "kv_used")


async def fill(client: httpx.AsyncClient, seed: int) -> None:
    """Send prompts without a common prefix until each block of the cache was used."""
    model = read_checkpoint(MODEL).model
    form = layout(model, block_tokens=1, element_bytes=2)
    rng = random.Random(seed)
    for _ in range(form.blocks(KV_BYTES) // PROMPT_TOKENS + 2):
        prompt = [rng.randrange(model.embed.vocab) for _ in range(PROMPT_TOKENS)]
        reply = await client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})
        reply.raise_for_status()


async def soak(service: Service, *, minutes: float, aborts: int, streams: int, seed: int = 0) -> Any:
    """Run both parts of the load and return the report."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    tally = Tally()
    async with httpx.AsyncClient(base_url=service.url, timeout=600.0, limits=limits) as client:
        load = MixedLoad(service.url, client, tally, streams=streams, seed=seed, max_body=MAX_BODY)
        await load.record_expected()
        await fill(client, seed)
        total_s = 60 * minutes
        first_s = min(FIRST_S[1], max(FIRST_S[0], FIRST_PART * total_s))
        samples: list[dict[str, Any]] = []
        began_s = time.monotonic()
        await _part(load, service, client, samples, first_s, aborts * first_s / total_s)
        before = await measure_at_rest(service, client)
        await _part(load, service, client, samples, total_s - first_s, aborts - tally.aborts)
        after = await measure_at_rest(service, client)
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
    load: MixedLoad,
    service: Service,
    client: httpx.AsyncClient,
    samples: list[dict[str, Any]],
    seconds: float,
    aborts: float,
) -> None:
    over = asyncio.create_task(load.run(seconds, aborts))
    began_s = time.monotonic()
    while not over.done():
        await asyncio.wait([over], timeout=SAMPLE_S)
        held = await measure_usage(service.launcher, client, service.directory)
        at_s = round(time.monotonic() - began_s, 1)
        samples.append({"at_s": at_s, "kv_used": held.gauges["kv_used"], "memory": held.memory, "files": held.files})
    await over


async def measure_at_rest(service: Service, client: httpx.AsyncClient) -> ResourceUsage:
    """Return the resource usage once the service is idle, or after `REST_S`."""
    deadline_s = time.monotonic() + REST_S
    while True:
        held = await measure_usage(service.launcher, client, service.directory)
        if not any(held.gauges[name] for name in CALM) or time.monotonic() > deadline_s:
            return held
        await asyncio.sleep(0.25)


def summary(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the minimum, median and maximum of each series of samples, by its name, such as `memory.gateway`."""
    series: dict[str, list[float]] = {}
    for sample in samples:
        series.setdefault("kv_used", []).append(sample["kv_used"])
        for what in ("memory", "files"):
            for program, value in sample[what].items():
                series.setdefault(f"{what}.{program}", []).append(value)
    ranges = {name: [min(values), statistics.median(values), max(values)] for name, values in series.items()}
    return {"count": len(samples), "min, median, max": ranges}


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
    parser.add_argument("--minutes", type=float, default=30.0, help="duration (30)")
    parser.add_argument("--aborts", type=int, default=2000, help="aborted requests (2000)")
    parser.add_argument("--streams", type=int, default=16, help="concurrent requests of good clients (16)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, help="file for the output of the service")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    given = parser.parse_args(arguments)
    wanted = {"minutes": given.minutes, "aborts": given.aborts, "streams": given.streams, "seed": given.seed}
    with (
        tempfile.TemporaryDirectory(prefix="soak-") as folder,
        running_service(*SETTINGS, f"lifecycle.crash_bundles.folder={folder}/crashes", log=given.log) as service,
    ):
        report = asyncio.run(soak(service, **wanted))
    print("\n".join(table(report)))
    if given.out:
        given.out.write_text(json.dumps(report | {"samples": summary(report["samples"])}, indent=1) + "\n")
    return 1 if report["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
