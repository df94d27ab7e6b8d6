"""Measure the resource usage of a running service, and compare two measurements to find leaks."""

import os
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec

from appliance.chaos.monitor import metrics
from appliance.chaos.target import Target
from appliance.supervisor.causes import HANG
from appliance.supervisor.programs import programs
from appliance.supervisor.rundir import Address

GAUGES = {
    "kv_used": "slipway_kv_cache_usage_ratio",
    "open_requests": "slipway_open_requests",
    "held": "slipway_requests_held",
    "running": "slipway_requests_running",
    "waiting": "slipway_requests_waiting",
    "preemptions": "slipway_preemptions_total",
    "restarts": "slipway_engine_restarts_total",
    "quarantined": "slipway_requests_quarantined_total",
}
COUNTS = ("preemptions",)  # may increase
MEMORY_SHARE = 0.10  # permitted growth of a process after the first part: allocators keep their peak memory
MEMORY_BYTES = 16 * 2**20
FEW_FILES = 2
FEW_THREADS = (os.cpu_count() or 1) + 4  # limit of asyncio's thread pool


@dataclass(frozen=True)
class ResourceUsage:
    """Resource usage of a service.

    memory: resident bytes without mapped files, by program. files, threads: counts by program. entries: names in the
    run directory.
    """

    gauges: dict[str, float]
    memory: dict[str, int]
    files: dict[str, int]
    threads: dict[str, int]
    entries: list[str]


async def measure_usage(launcher: int, client: httpx.AsyncClient, directory: Path) -> ResourceUsage:
    values = await metrics(client)
    running = {"launcher": [launcher], **programs(launcher)}
    pids = {f"{name}{index or ''}": pid for name, found in running.items() for index, pid in enumerate(found)}
    return ResourceUsage(
        {name: values[metric] for name, metric in GAUGES.items()} | {"hang_alarms": _hang_alarms(launcher, directory)},
        {name: _own_bytes(pid) for name, pid in pids.items()},
        {name: len(list(Path(f"/proc/{pid}/fd").iterdir())) for name, pid in pids.items()},
        {name: len(list(Path(f"/proc/{pid}/task").iterdir())) for name, pid in pids.items()},
        sorted(path.name for path in directory.iterdir()),
    )


def _hang_alarms(launcher: int, directory: Path) -> float:
    """Count the crash bundles of engines that were reported as hung."""
    address = msgspec.json.decode((directory / "address.json").read_bytes(), type=Address)
    return sum(1.0 for bundle in Target(directory, address).bundles() if bundle.cause == HANG.name)


def _own_bytes(pid: int) -> int:
    """Return resident memory without mapped files."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem") if name in fields)


def leaks(before: ResourceUsage, after: ResourceUsage) -> list[str]:
    """Return descriptions of resources whose usage grew beyond its tolerance."""
    found = [
        f"{name}: {before.gauges[name]:g} before, {value:g} after"
        for name, value in after.gauges.items()
        if value > before.gauges[name] and name not in COUNTS
    ]
    for name, value in after.memory.items():
        was = before.memory.get(name, 0)
        if value > was * (1 + MEMORY_SHARE) + MEMORY_BYTES:
            found.append(f"memory of {name}: {was / 2**20:.0f} MiB before, {value / 2**20:.0f} MiB after")
    for what, one, other, few in (
        ("open files", before.files, after.files, FEW_FILES),
        ("threads", before.threads, after.threads, FEW_THREADS),
    ):
        found += [
            f"{what} of {name}: {one.get(name, 0)} before, {count} after"
            for name, count in other.items()
            if count > one.get(name, 0) + few
        ]
    if gone := before.memory.keys() - after.memory.keys():
        found.append(f"missing files: {', '.join(sorted(gone))}")
    if new := set(after.entries) - set(before.entries):
        found.append(f"new files in the run directory: {', '.join(sorted(new))}")
    return found
