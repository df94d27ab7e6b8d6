"""Rollback of faults.

A step is data, and is sent to a guard process before the fault is made. The steps are rolled back by this process or,
if it is killed, by the guard, which runs until this process ends. Each step is idempotent.

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
from appliance.runtime.gateway_control import Hamper
from appliance.supervisor import programs

ASK_S = 5.0
LEAVE_S = 5.0  # time for a killed process to leave its cgroup


class Continued(msgspec.Struct, frozen=True, tag="continued"):
    """Resumes a stopped process. `began` distinguishes it from a later process with the same ID."""

    pid: int
    began: int

    def undo(self) -> None:
        if programs.began(self.pid) == self.began:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGCONT)


class Limited(msgspec.Struct, frozen=True, tag="limited"):
    """Allows a process and its descendants to write files again, up to size `soft`."""

    pid: int
    began: int
    soft: int

    def undo(self) -> None:
        if programs.began(self.pid) != self.began:
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


class Replaced(msgspec.Struct, frozen=True, tag="replaced"):
    """Moves the original file from `kept` back to `path`."""

    path: str
    kept: str

    def undo(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.replace(self.kept, self.path)


class Hampered(msgspec.Struct, frozen=True, tag="hampered"):
    """Removes the write delay of the journal in the gateway at this control socket."""

    control: str

    def undo(self) -> None:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as line:  # without a gateway there is no delay
            line.settimeout(ASK_S)
            line.connect(self.control)
            line.sendall(msgspec.json.encode(Hamper(0.0, 0.0)) + b"\n")
            line.makefile("rb").readline()


class Confined(msgspec.Struct, frozen=True, tag="confined"):
    """Removes a cgroup and moves its processes to the parent group."""

    folder: str

    def undo(self) -> None:
        folder = Path(self.folder)
        deadline = time.monotonic() + LEAVE_S
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


Step = Continued | Limited | Replaced | Hampered | Confined


def take_back(steps: Sequence[Step]) -> list[str]:
    """Roll back all steps, the last one first. Return the failures with their reasons."""
    failed = []
    for step in reversed(steps):
        try:
            step.undo()
        except OSError as error:
            failed.append(f"{step}: {error.strerror}")
    return failed


class Undo:
    """The rollback steps of one run, with their guard process. Must be closed."""

    def __init__(self) -> None:
        self._steps: list[Step] = []
        self._guard = subprocess.Popen(
            [sys.executable, "-P", "-m", "appliance.chaos.rollback"],
            stdin=subprocess.PIPE,
            start_new_session=True,  # so that Ctrl-C only reaches this process
        )

    def will(self, step: Step) -> None:
        """Register a step. Call this before making the fault that it rolls back."""
        self._tell(msgspec.json.encode(step))
        self._steps.append(step)

    def all(self) -> list[str]:
        """Roll back all steps. Return the failures."""
        failed = take_back(self._steps)
        self._steps.clear()
        self._tell(b"")
        return failed

    def close(self) -> None:
        assert self._guard.stdin is not None, "it is a pipe"
        self._guard.stdin.close()
        self._guard.wait()

    def _tell(self, line: bytes) -> None:
        assert self._guard.stdin is not None, "it is a pipe"
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
    for failure in take_back(steps):
        print(f"slipway chaos: not taken back: {failure}", file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
