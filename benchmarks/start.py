"""`python -m benchmarks.start [--rounds 5] [--cold]`: wall time and CPU seconds of the start of a service.

Each round starts `slipway serve` with the demo model and stops it when it is ready. Prints, as medians, the time until
the gateway answers and until the service is ready, the CPU seconds of each program until then, and those of the whole
process tree including its end. With `--cold`, each round first starts the service with an empty folder of caches
(quantized weights, kernels), then again with the folder that this start has filled. The JSON file has each value of
each start, as lists.
"""

import argparse
import contextlib
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from appliance.runtime import processes
from appliance.supervisor.programs import programs
from benchmarks.machine import facts
from benchmarks.service import DEMO, running_service

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
OTHERS = "others"


@dataclass(frozen=True)
class Start:
    """One start: times in seconds of the wall clock, `cpu_s` by program in seconds of CPU time until it was ready."""

    answers_s: float
    ready_s: float
    stop_s: float
    cpu_s: dict[str, float]
    total_cpu_s: float
    """CPU time of all processes from the start to the end."""


def cpu_seconds(launcher: int) -> dict[str, float]:
    """Return the CPU time of each program of an appliance. Processes that have ended count for their parents."""
    names = {pid: name for name, pids in programs(launcher).items() for pid in pids} | {launcher: "launcher"}
    found: dict[str, float] = {}
    for pid in (launcher, *processes.descendants(launcher)):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
            name = names.get(pid, OTHERS)
            found[name] = found.get(name, 0.0) + sum(map(int, fields[11:15])) / TICKS_PER_S
    return found


def measure(manifest: Path, cache: Path | None = None) -> Start:
    """Start a service, wait until it is ready, and stop it. cache: the folder of its caches, if not the usual one."""
    before, began_s = children_cpu_s(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with running_service(manifest=manifest, log=log, cache=cache) as service:
            ready_s = time.monotonic() - began_s
            cpu_s = cpu_seconds(service.launcher)
            answers_s = answer_time(log.read_text())
            stop_began_s = time.monotonic()
    stop_s = time.monotonic() - stop_began_s
    return Start(answers_s, ready_s, stop_s, cpu_s, children_cpu_s() - before)


def children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def answer_time(log: str) -> float:
    """Return the time until the gateway answered, as the launcher reports it."""
    (line,) = (line for line in log.splitlines() if line.startswith("gateway") and " up on " in line)
    return float(line.rpartition("after ")[2].removesuffix(" s"))


def values(starts: list[Start]) -> dict[str, list[float]]:
    """Return the values of all starts by their names, CPU seconds as `cpu of NAME`."""
    names = sorted({name for one in starts for name in one.cpu_s})
    return {
        "gateway answers": [one.answers_s for one in starts],
        "ready": [one.ready_s for one in starts],
        "stop": [one.stop_s for one in starts],
        **{f"cpu of {name}": [one.cpu_s.get(name, 0.0) for one in starts] for name in names},
        "cpu until ready": [sum(one.cpu_s.values()) for one in starts],
        "cpu in total": [one.total_cpu_s for one in starts],
    }


def medians(found: dict[str, list[float]]) -> dict[str, float]:
    """Return the median of each list. Raise TypeError for a value that is not a list."""
    if wrong := [name for name, each in found.items() if not isinstance(each, list)]:
        raise TypeError(f"{wrong[0]}: must be a list with a value for each start")
    return {name: statistics.median(each) for name, each in found.items()}


def rounds(manifest: Path, count: int, *, cold: bool) -> dict[str, list[Start]]:
    """Return the starts by kind: "cold" ones with empty caches, if wanted, and "warm" ones."""
    if not cold:
        return {"warm": [measure(manifest) for _ in range(count)]}
    found: dict[str, list[Start]] = {"cold": [], "warm": []}
    for _ in range(count):
        with tempfile.TemporaryDirectory() as folder:
            for kind in found:
                found[kind].append(measure(manifest, Path(folder)))
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.start", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="starts (5)")
    parser.add_argument("--manifest", type=Path, default=DEMO, help="manifest to serve (the demo)")
    parser.add_argument("--cold", action="store_true", help="also measure starts with empty caches")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    given = parser.parse_args(arguments)
    found = {kind: values(starts) for kind, starts in rounds(given.manifest, given.rounds, cold=given.cold).items()}
    middle = {kind: medians(each) for kind, each in found.items()}
    for kind, each in middle.items():
        for name, value in each.items():
            print(f"{kind:6}{name:24}{value:8.2f} s")
    if given.out:
        report = {"machine": asdict(facts()), "medians": middle, **found}
        given.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
