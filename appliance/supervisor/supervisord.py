"""Interface to Supervisor for the restart monitor: event protocol, XML-RPC, and exits of its programs."""

import contextlib
import os
import socket
import xmlrpc.client
from collections.abc import Container
from typing import Any, cast

from supervisor.xmlrpc import Faults, SupervisorTransport


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


class Supervisor:
    """Client of Supervisor's XML-RPC interface on its Unix socket."""

    def __init__(self, path: str, password: str) -> None:
        self.path = path
        transport = SupervisorTransport("slipway", password, f"unix://{path}")
        self._proxy = xmlrpc.client.ServerProxy("http://127.0.0.1", transport=transport)

    def start(self, name: str) -> None:
        try:
            self._proxy.supervisor.startProcess(name, False)
        except xmlrpc.client.Fault as fault:
            # Shutting down: nothing may be started. Already started: a user was faster. Fork failed: Supervisor
            # retries.
            if fault.faultCode not in (Faults.SHUTDOWN_STATE, Faults.ALREADY_STARTED, Faults.SPAWN_ERROR):
                raise

    def stop_group(self, group: str) -> None:
        try:
            self._proxy.supervisor.stopProcessGroup(group, False)
        except xmlrpc.client.Fault as fault:
            if fault.faultCode != Faults.SHUTDOWN_STATE:
                raise

    def status(self, name: str) -> int | None:
        try:
            info = cast(dict[str, Any], self._proxy.supervisor.getProcessInfo(name))
        except xmlrpc.client.Fault as fault:
            if fault.faultCode != Faults.SHUTDOWN_STATE:
                raise
            return None
        return int(info["exitstatus"]) if info["statename"] == "EXITED" else None

    def all(self) -> list[dict[str, Any]]:
        """Return group, name, statename, pid and more of every program; empty if Supervisor is shutting down."""
        try:
            return cast(list[dict[str, Any]], self._proxy.supervisor.getAllProcessInfo())
        except xmlrpc.client.Fault as fault:
            if fault.faultCode != Faults.SHUTDOWN_STATE:
                raise
            return []


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
