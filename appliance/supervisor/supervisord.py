"""Interface to Supervisor for launcher and restart monitor: event protocol, and exits of its programs."""

import contextlib
import os
import socket
from collections.abc import Container


def wake_supervisor(path: str) -> None:
    """Make Supervisor handle signals and ended children now. Otherwise it does so once a second, or when a client
    connects."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.setblocking(False)
        connection.connect(path)


def take_event(buffer: bytearray) -> tuple[str, dict[str, str]] | None:
    """Remove the first complete event from `buffer` and return its name and tokens. Return None if there is none
    yet."""
    end = buffer.find(b"\n")
    if end < 0:
        return None
    header = _tokens(buffer[:end].decode())
    size = int(header["len"])
    if len(buffer) < end + 1 + size:
        return None
    payload = _tokens(buffer[end + 1 : end + 1 + size].decode())
    del buffer[: end + 1 + size]
    return header["eventname"], payload


def _tokens(text: str) -> dict[str, str]:
    pairs = (token.partition(":") for token in text.split())
    return {key: value for key, _, value in pairs}


class ExitWatcher:
    """Pidfds of processes, which become readable when the processes end."""

    def __init__(self) -> None:
        self.descriptors: list[int] = []

    def watch(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # too late: Supervisor has already reaped it
            self.descriptors.append(os.pidfd_open(pid))

    def take(self, readable: Container[int]) -> bool:
        """Drop the processes that ended. Return whether there was one."""
        ended = [descriptor for descriptor in self.descriptors if descriptor in readable]
        for descriptor in ended:
            self.descriptors.remove(descriptor)
            os.close(descriptor)
        return bool(ended)
