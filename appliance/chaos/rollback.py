"""What takes a fault back. A step is data and is told to a guard before the fault is made: it is taken back by us, or,
where we are killed, by the guard, a process of its own that ends with us. Each may be done twice.

`python -m appliance.chaos.rollback` is the guard: it reads steps from standard input, one JSON line each, an empty line
for "all is done", and takes back what is left at the end of the file.
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
LEAVE_S = 5.0  # in which a killed process has left its cgroup


class Continued(msgspec.Struct, frozen=True, tag="continued"):
    """A stopped process runs again. `began` tells it from another one of this id."""

    pid: int
    began: int

    def undo(self) -> None:
        if programs.began(self.pid) == self.began:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGCONT)


class Limited(msgspec.Struct, frozen=True, tag="limited"):
    """A process, and all that it has started since, may write files again, as large as `soft`."""

    pid: int
    began: int
    soft: int

    def undo(self) -> None:
        if programs.began(self.pid) != self.began:
            return
        # Again until none is found: one may be started by a parent whose turn is still to come.
        while limited := [pid for pid in (self.pid, *processes.descendants(self.pid)) if _writes_nothing(pid)]:
            for pid in limited:
                with contextlib.suppress(ProcessLookupError):
                    hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
                    resource.prlimit(pid, resource.RLIMIT_FSIZE, (self.soft, hard))
            if self.soft == 0:  # it could write nothing before
                return


def _writes_nothing(pid: int) -> bool:
    """Return whether the fault keeps a process from writing. One whose hard limit is 0, as a renderer of chat templates
    has it, limits itself."""
    with contextlib.suppress(ProcessLookupError):
        soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        return soft == 0 and hard != 0
    return False


class Replaced(msgspec.Struct, frozen=True, tag="replaced"):
    """The file that lay at `path` lies at `kept`, and comes back."""

    path: str
    kept: str

    def undo(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.replace(self.kept, self.path)


class Hampered(msgspec.Struct, frozen=True, tag="hampered"):
    """The gateway at this control socket writes its journal as fast as it can."""

    control: str

    def undo(self) -> None:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as line:  # without a gateway nothing is slow
            line.settimeout(ASK_S)
            line.connect(self.control)
            line.sendall(msgspec.json.encode(Hamper(0.0, 0.0)) + b"\n")
            line.makefile("rb").readline()


class Confined(msgspec.Struct, frozen=True, tag="confined"):
    """A cgroup is removed, and its processes go back to the one above it."""

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
            except OSError:  # one that was killed is still on its way out
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)


Step = Continued | Limited | Replaced | Hampered | Confined


def take_back(steps: Sequence[Step]) -> list[str]:
    """Undoes all of them, the last first. What could not be, and why."""
    failed = []
    for step in reversed(steps):
        try:
            step.undo()
        except OSError as error:
            failed.append(f"{step}: {error.strerror}")
    return failed


class Undo:
    """The steps of one run, with its guard. To be closed."""

    def __init__(self) -> None:
        self._steps: list[Step] = []
        self._guard = subprocess.Popen(
            [sys.executable, "-P", "-m", "appliance.chaos.rollback"],
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is ours to hear
        )

    def will(self, step: Step) -> None:
        """To be called before the fault that it takes back."""
        self._tell(msgspec.json.encode(step))
        self._steps.append(step)

    def all(self) -> list[str]:
        """Takes everything back. What could not be."""
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
        signal.signal(number, signal.SIG_IGN)  # it ends when its standard input does
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
