"""What a running service holds: blocks, requests, memory, files and threads of each process; and what of it leaked."""

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
COUNTS = ("preemptions",)  # may go up
MEMORY_SHARE = 0.10  # that a process may grow after the first part: allocators keep what they had at their height
MEMORY_BYTES = 16 * 2**20
FEW_FILES = 2
FEW_THREADS = (os.cpu_count() or 1) + 4  # to which asyncio's pool grows


@dataclass(frozen=True)
class Holdings:
    """`memory` in bytes (resident, of the process's own), `files` and `threads` by program; `entries` of the run
    directory and of shared memory by name."""

    gauges: dict[str, float]
    memory: dict[str, int]
    files: dict[str, int]
    threads: dict[str, int]
    entries: list[str]


async def look(launcher: int, client: httpx.AsyncClient, directory: Path) -> Holdings:
    told = await metrics(client)
    running = {"launcher": [launcher], **programs(launcher)}
    pids = {f"{name}{index or ''}": pid for name, found in running.items() for index, pid in enumerate(found)}
    return Holdings(
        {name: told[metric] for name, metric in GAUGES.items()} | {"hang_alarms": _hang_alarms(launcher, directory)},
        {name: _own_bytes(pid) for name, pid in pids.items()},
        {name: len(list(Path(f"/proc/{pid}/fd").iterdir())) for name, pid in pids.items()},
        {name: len(list(Path(f"/proc/{pid}/task").iterdir())) for name, pid in pids.items()},
        sorted(path.name for path in directory.iterdir()),
    )


def _hang_alarms(launcher: int, directory: Path) -> float:
    """Crash bundles of engines that were taken for hung."""
    address = msgspec.json.decode((directory / "address.json").read_bytes(), type=Address)
    return sum(1.0 for bundle in Target(directory, address).bundles() if bundle.cause == HANG.name)


def _own_bytes(pid: int) -> int:
    """Resident memory that is no file's."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem") if name in fields)


def leaks(before: Holdings, after: Holdings) -> list[str]:
    """What is more than it was, beyond what may be."""
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
        found.append(f"no longer there: {', '.join(sorted(gone))}")
    if new := set(after.entries) - set(before.entries):
        found.append(f"new in the run directory: {', '.join(sorted(new))}")
    return found
