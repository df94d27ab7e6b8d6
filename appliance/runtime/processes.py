"""What PID 1 owes its tree on Linux: adopt orphans, reap the dead, and leave nothing alive.

A program may change its process group or session, so a group kill misses its children; but whatever it does, an orphan
is handed to the nearest subreaper above it (prctl(2)). So all of the tree can be found below this process, in /proc.
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
_LONGEST_COMMAND = 100

_libc = ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> None:
    """Makes every orphan below this process its child. Raises OSError."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def end_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """For the child between fork and exec: the kernel sends it this signal when its parent dies, even by SIGKILL."""
    _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def end_as(status: int) -> None:
    """Ends this process as the one with this wait status ended: with its code, or by its signal, without a core file.
    Does not return."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # the limit alone does not count where cores go to a program
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # SIGKILL has no handler to be set
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
        os._exit(128 + number)
    os._exit(os.WEXITSTATUS(status))


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


def parent(pid: int) -> int:
    """Of a process that lives; 0 if there is none."""
    with contextlib.suppress(OSError, ValueError):
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    return 0


def marked(word: str) -> Iterator[int]:
    """Processes other than this one that were started with `word`, as NAME=VALUE, in their environment."""
    wanted = word.encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):  # it ended, or is another user's
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    yield int(entry.name)


def command(pid: int) -> str:
    """What a process is, in a few words: its id and the begin of its command line, or its name."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        name = words or Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
        return f"{pid} {name[:_LONGEST_COMMAND]}"
    return str(pid)


def kill_all(find: Callable[[], list[int]], patience_s: float) -> tuple[dict[int, str], list[int]]:
    """SIGKILL to all that `find` finds until it finds none, or `patience_s` is over: what was killed, by id, and which
    of them are still there (in the kernel, where no signal reaches them). Children are reaped."""
    killed: dict[int, str] = {}
    deadline = time.monotonic() + patience_s
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
