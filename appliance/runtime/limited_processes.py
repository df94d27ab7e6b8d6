"""Pool of processes with limits on memory and time, for work on hostile input: `ProcessPool` in the parent, `serve` in
the child.

A child may use a number of bytes of address space beyond those of an idle process, and a number of seconds of CPU time
per job. The kernel ends it after that time, even within one operation of C code. Children start on demand and are
reused; one that exceeds a limit is replaced. Frames have a four-byte length.
"""

import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Final

LENGTH: Final = struct.Struct("!I")
WALL_S: Final = 60.0  # in addition to the limit of CPU time, for a stopped or starved process
_EXIT_S: Final = 5.0  # from closing the connection to the exit of the process
_ENVIRONMENT: Final = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ")
"""Variables that a process inherits; none can contain a secret."""


class LimitExceeded(Exception):
    """Raised for a job that exceeds a limit. The message is a sentence without its end: "it takes too much memory"."""


class _Killed(Exception):
    """Raised if a process was killed from outside."""


def received(connection: socket.socket, size: int) -> bytes:
    """Read `size` bytes. Raise EOFError if the connection ends before, TimeoutError if it has a timeout."""
    data = bytearray()
    while len(data) < size:
        piece = connection.recv(min(size - len(data), 1 << 20))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


def limit_resources(memory: int) -> None:
    """Limit the address space of this process to its present size and `memory` bytes. Forbid files."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    memory += pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)


def serve(connection: socket.socket, cpu_s: float, work: Callable[[bytes], bytes]) -> None:
    """Process jobs in a child until the parent closes the connection."""
    while True:
        try:
            job = received(connection, *LENGTH.unpack(received(connection, LENGTH.size)))
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        reply = work(job)
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.sendall(LENGTH.pack(len(reply)) + reply)


class _Process:
    """One child."""

    def __init__(self, command: tuple[str, ...]) -> None:
        self._connection, theirs = socket.socketpair()
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        with theirs:
            self._child: subprocess.Popen[bytes] = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, env=environment, start_new_session=True
            )

    @property
    def alive(self) -> bool:
        return self._child.poll() is None

    def ask(self, job: bytes, wall_s: float) -> bytes:
        """Return the reply. Raise EOFError or OSError if the process ended, TimeoutError if it does not reply."""
        until = monotonic() + wall_s
        self._connection.settimeout(wall_s)
        self._connection.sendall(LENGTH.pack(len(job)) + job)
        self._connection.settimeout(max(0.001, until - monotonic()))
        (size,) = LENGTH.unpack(received(self._connection, LENGTH.size))
        return received(self._connection, size)

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


class ProcessPool:
    """Up to `size` children, which run `python -m MODULE MEMORY CPU_S ARGUMENT …` with a socket at descriptor 0.

    Methods may be called from any thread.
    """

    def __init__(self, module: str, *arguments: str, size: int, memory: int, cpu_s: float) -> None:
        self._command = (sys.executable, "-P", "-m", module, str(memory), str(cpu_s), *arguments)
        self._cpu_s = cpu_s
        self._free = threading.BoundedSemaphore(size)
        self._idle: list[_Process] = []  # appended and popped in one operation
        self.close = weakref.finalize(self, _end_all, self._idle)

    def ask(self, job: bytes, *, is_last: Callable[[bytes], bool] = lambda reply: False) -> bytes:
        """Return the reply to a job. Raise LimitExceeded. The process ends after a reply with `is_last`."""
        with self._free:
            try:
                return self._ask(job, is_last)
            except _Killed:  # possibly while it was idle
                try:
                    return self._ask(job, is_last)
                except _Killed:
                    raise LimitExceeded("its process was killed") from None

    def _ask(self, job: bytes, is_last: Callable[[bytes], bool]) -> bytes:
        process, wall_s = self._process(), self._cpu_s + WALL_S
        try:
            reply = process.ask(job, wall_s)
        except TimeoutError:
            process.end()
            raise LimitExceeded(f"it does not end within {wall_s:g} s") from None
        except (EOFError, OSError):
            raise LimitExceeded(self._cause(process.end(patience_s=_EXIT_S))) from None
        except BaseException:
            process.end()
            raise
        if is_last(reply):
            process.end()
        else:
            self._idle.append(process)
        return reply

    def _process(self) -> _Process:
        while self._idle:
            process = self._idle.pop()
            if process.alive:
                return process
            process.end()
        return _Process(self._command)

    def _cause(self, status: int) -> str:
        if status == -signal.SIGKILL:
            raise _Killed
        if status == -signal.SIGPROF:
            return f"it computes for more than {self._cpu_s:g} s"
        return f"its process ended with status {status}"
