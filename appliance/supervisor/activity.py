"""Activity of processes, to distinguish slow from hung ones: time on a CPU or in a run queue, and page faults.

Source: the kernel's scheduler statistics, /proc/PID/task/TID/schedstat (nanoseconds on a CPU, nanoseconds in a run
queue, time slices), and field 12 of /proc/PID/stat (page faults that were read from a disk).
"""

import contextlib
import time
from collections.abc import Callable, Iterable
from pathlib import Path

MIN_FRACTION = 0.1
"""Fraction of one CPU; a process that uses less is inactive."""
_MAJOR_FAULTS = 9  # index of the field after the command name, which is field 2


class RunningClock:
    """Clock that counts the seconds in which this process was running. A gap of more than `longest_s` between two
    calls, for example in a paused container, counts as `longest_s`."""

    def __init__(self, longest_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._longest_s = longest_s
        self._clock = clock
        self._last_s = clock()
        self._now_s = 0.0

    def now_s(self) -> float:
        last_s, self._last_s = self._last_s, self._clock()
        self._now_s += min(self._last_s - last_s, self._longest_s)
        return self._now_s


def queued_s(pid: int) -> float:
    """Return the seconds in which the main thread of a process was ready to run and waited for a CPU; 0 if unknown."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    return 0.0


def busy_s(pids: Iterable[int]) -> float:
    """Return the seconds in which threads of the processes ran or waited for a CPU."""
    total = 0
    for pid in pids:
        for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError, ValueError):
                total += sum(map(int, file.read_text().split()[:2]))
    return total / 1e9


def major_faults(pids: Iterable[int]) -> int:
    """Return the number of page faults of the processes for which the kernel read a disk."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError):
            total += int(
                Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[_MAJOR_FAULTS]
            )
    return total


class Activity:
    """Activity of a program and its descendants, measured from the first `active` call after `reset`."""

    def __init__(self) -> None:
        self._first: tuple[float, float, int] | None = None

    def reset(self) -> None:
        self._first = None

    def active(self, pids: Iterable[int], now_s: float) -> bool:
        """Return whether the processes used CPU time or waited for it, or read pages from a disk, since the first call
        after `reset`."""
        pids = tuple(pids)
        now = (now_s, busy_s(pids), major_faults(pids))
        if self._first is None:
            self._first = now
            return False
        since_s, busy_before_s, faults_before = self._first
        return now[1] - busy_before_s > MIN_FRACTION * (now_s - since_s) or now[2] > faults_before
