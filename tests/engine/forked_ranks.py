"""Start the ranks of engines in tests as forks of one process that has imported torch.

The product starts each rank as a new process, which imports torch for two seconds of CPU time. Tests that compare what
ranks compute need no such start. tests/engine/test_ranks.py tests it.

    python -m tests.engine.forked_ranks FD     the process that forks; it exits when the socket FD is closed
"""

import atexit
import fcntl
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from engine.worker import ranks

ROOT = Path(__file__).resolve().parents[2]
COMMAND = ["-P", "-m", "engine.rank"]
FREE = 500  # file descriptors from here on are unused
POLL_S = 0.005


class ForkServer:
    """The process that forks, and the socket to it."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.engine.forked_ranks", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )

    def ask(self, request: dict[str, Any], files: Sequence[int] = ()) -> Any:
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], files)
            return json.loads(self._socket.recv(1 << 10))

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


@cache
def fork_server() -> ForkServer:
    made = ForkServer()
    atexit.register(made.close)
    return made


class ForkedRank:
    """The part of `subprocess.Popen` that `Ranks` uses."""

    def __init__(self, command: Sequence[str], pass_fds: Sequence[int], stdin: int) -> None:
        assert list(command[1:4]) == COMMAND and stdin == subprocess.DEVNULL
        request = {
            "arguments": list(command[4:]),
            "files": list(pass_fds),
            "environment": dict(os.environ),
            "folder": os.getcwd(),
        }
        self.pid: int = fork_server().ask(request, [1, 2, *pass_fds])
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = fork_server().ask({"wait": self.pid})
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        limit = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if limit is not None and time.monotonic() >= limit:
                raise subprocess.TimeoutExpired(COMMAND, timeout or 0.0)
            time.sleep(POLL_S)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)  # its number is not used again before `poll` reports its end


@contextmanager
def forked() -> Iterator[None]:
    """Start the ranks of engines inside the context as forks."""
    forking = SimpleNamespace(Popen=ForkedRank, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "subprocess", forking)
        yield


@pytest.fixture(scope="module", autouse=True)
def forked_ranks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Start ranks as forks, except in modules with `STARTS_RANKS = True`."""
    if getattr(request.module, "STARTS_RANKS", False):
        yield
        return
    with forked():
        yield


# -- the process that forks --------------------------------------------------------------------------------------------


def serve(control: socket.socket) -> None:
    ended: dict[int, int] = {}
    while True:
        message, files, _, _ = socket.recv_fds(control, 1 << 20, 16)
        if not message:
            return
        request = json.loads(message)
        if (pid := request.get("wait")) is not None:
            if pid not in ended:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    ended[pid] = os.waitstatus_to_exitcode(status)
            control.send(json.dumps(ended.get(pid)).encode())
            continue
        pid = os.fork()
        if pid == 0:
            run(request, control, files)
        for file in files:
            os.close(file)
        control.send(json.dumps(pid).encode())


def run(request: dict[str, Any], control: socket.socket, files: Sequence[int]) -> NoReturn:
    """Run a rank in this process, which was forked for it, with the open files under the numbers of its caller."""
    from engine.rank import main

    try:
        control.close()
        moved = [fcntl.fcntl(file, fcntl.F_DUPFD, FREE) for file in files]
        for file in files:
            os.close(file)
        for file, number in zip(moved, (1, 2, *request["files"]), strict=True):
            os.dup2(file, number)
            os.close(file)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        main(request["arguments"])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(1)


def main(arguments: Sequence[str]) -> None:
    import torch

    torch.set_num_threads(1)
    from kernels.jit import interpreted

    if interpreted():
        from tests.fast_interpreter import save_time
        from tests.interpreter import fix_dot_order

        fix_dot_order()
        save_time()
    import engine.worker.build  # noqa: F401

    gc.collect()
    gc.freeze()
    with suppress(ConnectionError):
        serve(socket.socket(fileno=int(arguments[0])))


if __name__ == "__main__":
    main(sys.argv[1:])
