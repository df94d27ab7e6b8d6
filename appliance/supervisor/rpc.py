"""Client of Supervisor's XML-RPC interface, for the restart monitor. The launcher imports none of its modules."""

import xmlrpc.client
from typing import Any, cast

from supervisor.xmlrpc import Faults, SupervisorTransport


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
