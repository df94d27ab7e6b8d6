"""What PID 1 owes its tree on Linux: adopt orphans, reap the dead, and leave nothing alive.

A program may change its process group or session, so a group kill misses its children; but whatever it does, an orphan
is handed to the nearest subreaper above it (prctl(2)). So all of the tree can be found below this process, in /proc.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
from collections.abc import Callable
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.02  # a grandchild's end sends no signal here, so the sweep has to look

_libc = ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> None:
    """Makes every orphan below this process its child. Raises OSError."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def end_with_parent() -> None:
    """For the child between fork and exec: the kernel sends it SIGTERM when its parent dies, even by SIGKILL."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def reap() -> dict[int, int]:
    """Collects every child that has ended. Wait status by process id."""
    ended = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended[pid] = status
    return ended


def descendants(root: int) -> list[int]:
    """Processes below `root`, parents before children; zombies are left out."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended while we looked
            # The command's name stands in parentheses and may itself hold parentheses: read after the last one.
            state, parent = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
            if state != "Z":
                children.setdefault(int(parent), []).append(int(entry.name))
    found: list[int] = []
    level = [root]
    while level:
        level = [child for parent in level for child in children.get(parent, [])]
        found += level
    return found


async def sweep(grace_s: float, reaped: Callable[[dict[int, int]], None]) -> int:
    """Ends all descendants of this process: SIGTERM to each, after `grace_s` SIGKILL until none is left.

    `reaped` gets what `reap` returns. Returns how many processes were told.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + grace_s
    told: set[int] = set()
    while True:
        reaped(reap())
        alive = descendants(os.getpid())
        if not alive:
            return len(told)
        hard = loop.time() >= deadline
        for pid in alive:
            if hard or pid not in told:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if hard else signal.SIGTERM)
        told.update(alive)
        await asyncio.sleep(_POLL_S)
