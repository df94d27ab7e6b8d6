"""Pool of processes that render chat templates, with limits on memory and time.

A template is code from a checkpoint or a client. The Jinja sandbox blocks files and attributes but does not limit
memory and time, so templates run in processes that the kernel can end. Processes start on demand and are reused; one
that exceeds a limit is replaced.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from time import monotonic
from typing import Any, Final

from appliance.chat_templates.render_process import LENGTH, received
from appliance.chat_templates.rendering import KINDS, Outcome

PROCESSES: Final = 4  # maximum number of concurrent renders
MEMORY: Final = 512 << 20
CPU_S: Final = 5.0
WALL_S: Final = 60.0  # for a stopped or starved process; templates reach CPU_S first
_EXIT_S: Final = 5.0  # from closing the connection to the exit of the process
_ENVIRONMENT: Final = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ")
"""Variables that a process inherits; none can contain a secret."""


class _Killed(Exception):
    """Raised if a renderer was killed from outside."""


class _Process:
    """One renderer process."""

    def __init__(self, memory: int, cpu_s: float) -> None:
        self._connection, theirs = socket.socketpair()
        command = (sys.executable, "-P", "-m", "appliance.chat_templates.render_process", str(memory), str(cpu_s))
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        with theirs:
            self._child: subprocess.Popen[bytes] = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, env=environment, start_new_session=True
            )

    @property
    def alive(self) -> bool:
        return self._child.poll() is None

    def render(self, job: bytes) -> Outcome:
        """Render a job. Raise EOFError or OSError if the process ended, TimeoutError if it does not reply."""
        until = monotonic() + WALL_S
        self._connection.settimeout(WALL_S)
        self._connection.sendall(LENGTH.pack(len(job)) + job)
        self._connection.settimeout(max(0.001, until - monotonic()))
        (size,) = LENGTH.unpack(received(self._connection, LENGTH.size))
        reply = received(self._connection, size)
        place, _, text = reply[1:].partition(b"\0")
        return Outcome(KINDS[reply[0]], text.decode("utf-8", "surrogatepass"), place.decode())

    def end(self, *, patience_s: float = 0.0) -> int:
        """Close the connection and return the exit status of the process, which is killed after `patience_s`."""
        self._connection.close()
        try:
            return self._child.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._child.kill()
            return self._child.wait()


def _end_all(processes: list[_Process]) -> None:
    while processes:
        processes.pop().end()


class Renderers:
    """Renders templates in up to `PROCESSES` processes. Methods may be called from any thread."""

    def __init__(self, *, memory: int = MEMORY, cpu_s: float = CPU_S) -> None:
        self._memory, self._cpu_s = memory, cpu_s
        self._free = threading.BoundedSemaphore(PROCESSES)
        self._idle: list[_Process] = []  # appended and popped in one operation
        self.close = weakref.finalize(self, _end_all, self._idle)

    def render(self, source: str, scope: Mapping[str, Any]) -> Outcome:
        """Return the rendered text, or the reason why there is none. Raise ValueError if JSON cannot represent the
        scope."""
        job = json.dumps([source, scope]).encode()
        with self._free:
            try:
                return self._render(job)
            except _Killed:  # possibly while it was idle
                try:
                    return self._render(job)
                except _Killed:
                    return Outcome("limit", "its process was killed")

    def _render(self, job: bytes) -> Outcome:
        process = self._process()
        try:
            found = process.render(job)
        except TimeoutError:
            process.end()
            return Outcome("limit", f"it does not end within {WALL_S:g} s")
        except (EOFError, OSError):
            return Outcome("limit", self._cause(process.end(patience_s=_EXIT_S)))
        except BaseException:
            process.end()
            raise
        if found.kind == "limit":  # its memory is fragmented
            process.end()
        else:
            self._idle.append(process)
        return found

    def _process(self) -> _Process:
        while self._idle:
            process = self._idle.pop()
            if process.alive:
                return process
            process.end()
        return _Process(self._memory, self._cpu_s)

    def _cause(self, status: int) -> str:
        if status == -signal.SIGKILL:
            raise _Killed
        if status == -signal.SIGPROF:
            return f"it computes for more than {self._cpu_s:g} s"
        return f"its process ended with status {status}"
