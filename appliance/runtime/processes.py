"""Process-tree functions for PID 1 on Linux: adopt orphans, reap ended children, and kill all descendants.

A program may change its process group or session, so a group kill misses its children. But an orphan is always adopted
by the nearest subreaper above it (prctl(2)). So the whole tree is found below this process, in /proc.
"""

import contextlib
import ctypes
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.005
_MAX_COMMAND = 100

_libc = ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> None:
    """Make every orphan below this process its child. Raise OSError on failure."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def exit_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Make the kernel send this signal to the process when its parent ends, even by SIGKILL. Call it between fork and
    exec."""
    _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def exit_like(status: int) -> None:
    """End this process like the one with this wait status: with its exit code, or by its signal, without a core file.
    Does not return."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # the limit alone has no effect if core dumps are piped to a program
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
        os._exit(128 + number)
    os._exit(os.WEXITSTATUS(status))


def reap() -> dict[int, int]:
    """Reap every child that has ended. Return wait statuses by process id."""
    ended = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended[pid] = status
    return ended


def descendants(root: int) -> list[int]:
    """Return the processes below `root`, parents before children, without zombies."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the process ended during the scan
            # The command's name is in parentheses and may itself contain parentheses: split after the last one.
            state, parent = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
            if state != "Z":
                children.setdefault(int(parent), []).append(int(entry.name))
    found: list[int] = []
    level = [root]
    while level:
        level = [child for parent in level for child in children.get(parent, [])]
        found += level
    return found


def parent(pid: int) -> int:
    """Return the parent of a running process; 0 if the process does not exist."""
    with contextlib.suppress(OSError, ValueError):
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    return 0


def processes_with_variable(word: str) -> Iterator[int]:
    """Yield the processes, except this one, that were started with `word`, as NAME=VALUE, in their environment."""
    wanted = word.encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):  # it ended, or belongs to another user
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    yield int(entry.name)


def command(pid: int) -> str:
    """Return a short description of a process: its id and the start of its command line, or its name."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        name = words or Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
        return f"{pid} {name[:_MAX_COMMAND]}"
    return str(pid)


def kill_all(find: Callable[[], list[int]], timeout_s: float) -> tuple[dict[int, str], list[int]]:
    """Send SIGKILL to the processes that `find` returns, until it returns none or `timeout_s` is over. Return the
    killed processes by id, and the ids of those that still exist (blocked in the kernel, where signals have no effect).
    Children are reaped."""
    killed: dict[int, str] = {}
    deadline = time.monotonic() + timeout_s
    while alive := find():
        for pid in alive:
            if pid not in killed:
                killed[pid] = command(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        reap()
        if time.monotonic() >= deadline:
            return killed, alive
        time.sleep(_POLL_S)
    return killed, []
