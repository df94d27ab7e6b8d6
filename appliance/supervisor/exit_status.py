"""Exit status of an engine as its reaper recorded it, with the kernel's memory counters for that run."""

import contextlib
import os
import signal
from collections.abc import Mapping
from pathlib import Path

import msgspec

_COUNTERS = ("memory.events", "memory.oom_control")  # of cgroup v2 and v1


class ExitStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename={"duration_s": "lived_s"}):
    """How one run of a program ended."""

    pid: int
    duration_s: float  # duration of the run
    code: int = 0  # exit code
    signal: str = ""  # name of the signal that killed it
    core: bool = False  # whether it dumped core
    peak_bytes: int = 0  # its own largest resident memory
    memory: dict[str, int] = {}
    """Increments of the kernel's memory counters (`oom_kill` and others) of its cgroup during the run; of the whole
    machine if there is no cgroup."""
    killed: tuple[str, ...] = ()  # commands of the processes that it left running and that were killed
    stuck: tuple[str, ...] = ()  # commands of the processes that could not be killed
    removed: tuple[str, ...] = ()  # paths of the shared memory that it left and that was removed

    def text(self) -> str:
        """Return a short description of the exit status."""
        return f"killed by {self.signal}" if self.signal else f"exit code {self.code}"

    def leftovers(self) -> str:
        """Return a short description of the processes and shared memory that it left behind, "" if there are none."""
        parts = []
        if self.killed:
            parts.append(f"remaining processes were killed: {'; '.join(self.killed)}")
        if self.removed:
            parts.append(f"remaining shared memory was removed: {', '.join(self.removed)}")
        if self.stuck:
            parts.append(f"processes that SIGKILL did not end: {'; '.join(self.stuck)}")
        return "; ".join(parts)


def signal_name(status: int) -> str:
    """Return the name of the signal of a wait status, "" if the process was not killed by a signal."""
    if not os.WIFSIGNALED(status):
        return ""
    try:
        return signal.Signals(os.WTERMSIG(status)).name
    except ValueError:  # a real-time signal
        return f"signal {os.WTERMSIG(status)}"


def memory_counters(folders: list[Path], machine: Path = Path("/proc/vmstat")) -> Path:
    """Return the file in which the kernel counts out-of-memory kills: of the first of these cgroups that has one, else
    of the whole machine."""
    return next((folder / name for folder in folders for name in _COUNTERS if (folder / name).exists()), machine)


def read_counters(path: Path) -> dict[str, int]:
    """Read lines of `name count`. From the file of the whole machine only `oom_kill` is used, because its other
    counters are not about memory shortage."""
    with contextlib.suppress(OSError, ValueError):
        pairs = (line.split() for line in path.read_text().splitlines())
        found = {name: int(count) for name, count in pairs}
        return {"oom_kill": found.get("oom_kill", 0)} if path.name == "vmstat" else found
    return {}


def increments(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """Return the counters that increased, with their increments."""
    return {name: count - before.get(name, 0) for name, count in after.items() if count > before.get(name, 0)}
