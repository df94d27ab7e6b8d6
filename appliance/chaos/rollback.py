"""Rollback of faults.

A step is data, and is sent to a guard process before its fault is injected. This process rolls back the steps or, if it
is killed, the guard does, which runs until this process exits. Each step is idempotent.

`python -m appliance.chaos.rollback` is the guard. It reads steps from standard input, one JSON line each. An empty line
means that all steps are rolled back. At the end of the input it rolls back the remaining steps.
"""

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from appliance.runtime import processes
from appliance.runtime.gateway_control import ThrottleJournal
from appliance.supervisor import programs

REPLY_TIMEOUT_S = 5.0
CGROUP_EXIT_S = 5.0  # time for a killed process to leave its cgroup


class ResumeProcess(msgspec.Struct, frozen=True, tag="resume_process"):
    """Resumes a stopped process. `start_ticks` distinguishes it from a later process with the same ID."""

    pid: int
    start_ticks: int

    def run(self) -> None:
        if programs.start_ticks(self.pid) == self.start_ticks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGCONT)


class RestoreFileLimit(msgspec.Struct, frozen=True, tag="restore_file_limit"):
    """Allows a process and its descendants to write files again, up to size `soft`."""

    pid: int
    start_ticks: int
    soft: int

    def run(self) -> None:
        if programs.start_ticks(self.pid) != self.start_ticks:
            return
        # Repeat until none is found: a parent that is not handled yet may start another process.
        while limited := [pid for pid in (self.pid, *processes.descendants(self.pid)) if _writes_nothing(pid)]:
            for pid in limited:
                with contextlib.suppress(ProcessLookupError):
                    hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
                    resource.prlimit(pid, resource.RLIMIT_FSIZE, (self.soft, hard))
            if self.soft == 0:  # it could not write before the fault either
                return


def _writes_nothing(pid: int) -> bool:
    """Return if the fault prevents a process from writing.

    A process with a hard limit of 0, such as a renderer of chat templates, has limited itself.
    """
    with contextlib.suppress(ProcessLookupError):
        soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        return soft == 0 and hard != 0
    return False


class RestoreFile(msgspec.Struct, frozen=True, tag="restore_file"):
    """Moves the original file from `original` back to `path`."""

    path: str
    original: str

    def run(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.replace(self.original, self.path)


class RemoveThrottle(msgspec.Struct, frozen=True, tag="remove_throttle"):
    """Removes the write delay of the journal in the gateway at this control socket."""

    control: str

    def run(self) -> None:
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX) as connection,
        ):  # without a gateway there is no delay
            connection.settimeout(REPLY_TIMEOUT_S)
            connection.connect(self.control)
            connection.sendall(msgspec.json.encode(ThrottleJournal(0.0, 0.0)) + b"\n")
            connection.makefile("rb").readline()


class RemoveCgroup(msgspec.Struct, frozen=True, tag="remove_cgroup"):
    """Removes a cgroup and moves its processes to the parent group."""

    folder: str

    def run(self) -> None:
        folder = Path(self.folder)
        deadline = time.monotonic() + CGROUP_EXIT_S
        while folder.is_dir():
            for pid in (folder / "cgroup.procs").read_text().split():
                with contextlib.suppress(OSError):
                    (folder.parent / "cgroup.procs").write_text(pid)
            try:
                folder.rmdir()
            except OSError:  # a killed process has not exited completely yet
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)


Step = ResumeProcess | RestoreFileLimit | RestoreFile | RemoveThrottle | RemoveCgroup


def roll_back(steps: Sequence[Step]) -> list[str]:
    """Roll back all steps, the last one first. Return the failures with their reasons."""
    failed = []
    for step in reversed(steps):
        try:
            step.run()
        except OSError as error:
            failed.append(f"{step}: {error.strerror}")
    return failed


class Rollback:
    """The rollback steps of one run, with their guard process. Must be closed."""

    def __init__(self) -> None:
        self._steps: list[Step] = []
        self._guard = subprocess.Popen(
            [sys.executable, "-P", "-m", "appliance.chaos.rollback"],
            stdin=subprocess.PIPE,
            start_new_session=True,  # so that Ctrl-C only reaches this process
        )

    def register(self, step: Step) -> None:
        """Register a step. Call this before injecting the fault that it rolls back."""
        self._send(msgspec.json.encode(step))
        self._steps.append(step)

    def run(self) -> list[str]:
        """Roll back all steps. Return the failures."""
        failed = roll_back(self._steps)
        self._steps.clear()
        self._send(b"")
        return failed

    def close(self) -> None:
        assert self._guard.stdin is not None, "standard input is a pipe"
        self._guard.stdin.close()
        self._guard.wait()

    def _send(self, line: bytes) -> None:
        assert self._guard.stdin is not None, "standard input is a pipe"
        self._guard.stdin.write(line + b"\n")
        self._guard.stdin.flush()


def main() -> int:
    steps: list[Step] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # exits when its standard input is closed
    for line in sys.stdin.buffer:
        if line.strip():
            steps.append(msgspec.json.decode(line, type=Step))
        else:
            steps.clear()
    for failure in roll_back(steps):
        print(f"slipway chaos: not rolled back: {failure}", file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
