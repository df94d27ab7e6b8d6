"""How one life of an engine ended, as its keeper saw it, and what the kernel counted meanwhile."""

import contextlib
import os
import signal
from collections.abc import Mapping
from pathlib import Path

import msgspec

_COUNTERS = ("memory.events", "memory.oom_control")  # of cgroup v2 and v1


class Death(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`code` is the exit code, or `signal` the name of what killed it. `peak_bytes`: its own largest resident memory.
    `memory`: what the kernel counted of its cgroup's memory during its life, `oom_kill` first of all; where there is no
    cgroup, of the machine. `killed`: what it left running, and `stuck` what would not go; `removed`: the shared memory
    that it left."""

    pid: int
    lived_s: float
    code: int = 0
    signal: str = ""
    core: bool = False
    peak_bytes: int = 0
    memory: dict[str, int] = {}
    killed: tuple[str, ...] = ()
    stuck: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()

    def how(self) -> str:
        """In a few words."""
        return f"killed by {self.signal}" if self.signal else f"exit code {self.code}"

    def left(self) -> str:
        """What it left behind, in a few words; "" for nothing."""
        told = []
        if self.killed:
            told.append(f"what it left running was killed: {'; '.join(self.killed)}")
        if self.removed:
            told.append(f"shared memory that it left was removed: {', '.join(self.removed)}")
        if self.stuck:
            told.append(f"no signal ends what else it left: {'; '.join(self.stuck)}")
        return "; ".join(told)


def signal_name(status: int) -> str:
    """Of a wait status; "" where it is no signal's."""
    if not os.WIFSIGNALED(status):
        return ""
    try:
        return signal.Signals(os.WTERMSIG(status)).name
    except ValueError:  # a real-time signal
        return f"signal {os.WTERMSIG(status)}"


def memory_counters(folders: list[Path], machine: Path = Path("/proc/vmstat")) -> Path:
    """The file in which the kernel counts processes killed for memory: of the nearest of these cgroups that has one,
    else of the whole machine."""
    return next((folder / name for folder in folders for name in _COUNTERS if (folder / name).exists()), machine)


def read_counters(path: Path) -> dict[str, int]:
    """Lines of `name count`, but for those of a machine, of which only the kills are about memory that lacked."""
    with contextlib.suppress(OSError, ValueError):
        pairs = (line.split() for line in path.read_text().splitlines())
        found = {name: int(count) for name, count in pairs}
        return {"oom_kill": found.get("oom_kill", 0)} if path.name == "vmstat" else found
    return {}


def counted(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """What went up."""
    return {name: count - before.get(name, 0) for name, count in after.items() if count > before.get(name, 0)}
