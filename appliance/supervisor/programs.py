"""Find the processes of a running appliance from outside, by the command lines of the launcher's descendants."""

import contextlib
import re
from pathlib import Path

from appliance.runtime import processes

_CONFIG_FILE = re.compile(rb"/(gateway|engine-\d+|monitor)\.json$")
_REAPER = re.compile(rb"/(engine-\d+)\.reaper$")


def programs(launcher: int) -> dict[str, list[int]]:
    """Return process ids by name: supervisord, gateway, monitor, engine-0 …, engine-0-reaper …, ranks. A program that
    is being started is missing."""
    found: dict[str, list[int]] = {}
    for pid in processes.descendants(launcher):
        name = _name(pid)
        if name:
            found.setdefault(name, []).append(pid)
    return found


def program(launcher: int, name: str) -> int:
    """Return the process id of a program, 0 if it is not running."""
    return next(iter(programs(launcher).get(name, ())), 0)


def _name(pid: int) -> str:
    words: list[bytes] = []
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    if b"engine.rank" in words:
        return "ranks"
    if b"supervisor.supervisord" in words:
        return "supervisord"
    last = words[-1] if words else b""
    if reaper := _REAPER.search(last):
        return f"{reaper[1].decode()}-reaper"
    configured = _CONFIG_FILE.search(last)
    return configured[1].decode() if configured and b"/bin/sh" not in words[:1] else ""


def start_ticks(pid: int) -> int:
    """Return the start time of a process in ticks since boot, 0 if it has ended. Together with the id it identifies the
    process uniquely."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19])
    return 0
