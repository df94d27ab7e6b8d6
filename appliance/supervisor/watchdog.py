"""Detection of hung programs for the restart monitor: engines by their heartbeats, the gateway by requests on its
control socket. A hung program is killed; its exit is then handled like any other.

All times count only while the monitor itself was running, so a pause of the whole container is not a hang. For the
gateway, time in which it was ready to run and got no CPU does not count either.
"""

import contextlib
import os
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from appliance.runtime import processes
from appliance.supervisor.activity import Activity, RunningClock, queued_s
from appliance.supervisor.hangs import Budgets, HangDetector
from engine.api.heartbeat import Heartbeat, read_heartbeat

GATEWAY = "gateway"
CHECK_INTERVAL_S = 0.5  # interval between checks of heartbeats and gateway
PROBE_INTERVAL_S = 2.0  # time between a reply of the gateway and the next request
PING = b'{"type":"ping"}\n'
ACTIVITY_FRACTION = 0.25  # fraction of a budget after which the CPU activity of a silent engine is measured


@dataclass
class _Gateway:
    """State of one gateway process. Times are of the RunningClock."""

    pid: int
    queued_s: float
    last_s: float
    silent_s: float = 0.0  # without an answer
    next_s: float = 0.0  # when the next request is due
    answered: bool = False  # it has answered once
    connection: socket.socket | None = None


class GatewayProbe:
    """Sends requests to the gateway's control socket at `path`. A gateway that has never replied is starting."""

    def __init__(self, path: str, budgets: Budgets) -> None:
        self._path = path
        self._budgets = budgets
        self._gateway: _Gateway | None = None

    @property
    def pid(self) -> int:
        return self._gateway.pid if self._gateway else 0

    def started(self, pid: int, now_s: float) -> None:
        self.ended()
        self._gateway = _Gateway(pid, queued_s(pid), now_s, next_s=now_s)

    def ended(self) -> None:
        if self._gateway is not None and self._gateway.connection is not None:
            self._gateway.connection.close()
        self._gateway = None

    def check(self, now_s: float) -> str:
        """Return why the gateway counts as hung, or ""."""
        gateway = self._gateway
        if gateway is None or not self._path:
            return ""
        queued = queued_s(gateway.pid)
        waited_s = now_s - (gateway.last_s if gateway.connection else max(gateway.last_s, gateway.next_s))
        gateway.silent_s += max(0.0, waited_s - (queued - gateway.queued_s))
        gateway.last_s, gateway.queued_s = now_s, queued
        if gateway.connection is not None and self._has_reply(gateway.connection):
            gateway.connection.close()
            gateway.connection, gateway.answered = None, True
            gateway.silent_s, gateway.next_s = 0.0, now_s + PROBE_INTERVAL_S
        elif gateway.connection is None and now_s >= gateway.next_s:
            gateway.connection = self._send_ping()
            gateway.silent_s = 0.0 if gateway.connection else gateway.silent_s
        starting = not gateway.answered
        budget_s = self._budgets.loading_s if starting else self._budgets.gateway_s
        if not budget_s or gateway.silent_s < budget_s:
            return ""
        text, key = ("its start made no progress", "loading") if starting else ("it sent no reply", "gateway")
        return f"hung: {text} for {gateway.silent_s:.0f} s (health.stalled_{key})"

    def _send_ping(self) -> socket.socket | None:
        """Send a request and return the connection. Return None if nothing listens yet, or if the queue is full."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.setblocking(False)
            connection.connect(self._path)
            connection.sendall(PING)
        except OSError:
            connection.close()
            return None
        return connection

    def _has_reply(self, connection: socket.socket) -> bool:
        """Return whether a reply has arrived. A connection that ended without a reply is replaced by the next
        request."""
        try:
            if connection.recv(4096):
                return True
        except BlockingIOError:
            return False
        except OSError:
            pass
        if self._gateway is not None:
            self._gateway.connection = None
        connection.close()
        return False


class Watchdog:
    """Watches the running programs. `hung` is called with a program and the reason before the program is killed."""

    def __init__(
        self, budgets: Budgets, heartbeats: Mapping[str, str], control: str, hung: Callable[[str, str], None]
    ) -> None:
        self._budgets = budgets
        self._heartbeats = {program: Path(file) for program, file in heartbeats.items()}
        self._hung = hung
        self._clock = RunningClock(2 * CHECK_INTERVAL_S)
        self._hangs = HangDetector(budgets)
        self._activity = {program: Activity() for program in heartbeats}
        self._probe = GatewayProbe(control, budgets)

    def started(self, program: str, pid: int) -> None:
        """Watch a process. A monitor that starts gets it twice: from its own query and from a late event."""
        now_s = self._clock.now_s()
        if program == GATEWAY and pid != self._probe.pid:
            self._probe.started(pid, now_s)
        elif program in self._heartbeats and pid != self._hangs.pid(program):
            self._hangs.started(program, pid, now_s)
            self._activity[program].reset()

    def ended(self, program: str) -> None:
        if program == GATEWAY:
            self._probe.ended()
        self._hangs.ended(program)

    def check(self) -> None:
        """Kill hung programs with SIGKILL, because a stopped process does not react to SIGTERM."""
        now_s = self._clock.now_s()
        for program, file in self._heartbeats.items():
            reaper = self._hangs.pid(program)
            if reaper and (reason := self._hang_reason(program, file, reaper, now_s)):
                self._kill(program, reason, processes.descendants(reaper))
        if reason := self._probe.check(now_s):
            pid = self._probe.pid
            self._kill(GATEWAY, reason, [pid, *processes.descendants(pid)])

    def _hang_reason(self, program: str, file: Path, reaper: int, now_s: float) -> str:
        """Return why an engine counts as hung, or "". An engine that cannot write a heartbeat file has removed it."""
        if not file.exists():
            return ""
        activity, active = self._activity[program], False
        if self._hangs.silent_s(program, now_s) < ACTIVITY_FRACTION * self._budgets.busy_s:
            activity.reset()
        else:
            active = activity.active(processes.descendants(reaper), now_s)
        return self._hangs.check(program, _heartbeat(file, reaper), now_s, active=active)

    def _kill(self, program: str, reason: str, pids: list[int]) -> None:
        self.ended(program)
        self._hung(program, reason)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _heartbeat(file: Path, reaper: int) -> Heartbeat | None:
    """Return the engine's heartbeat with the process id of its reaper, the only one that Supervisor knows."""
    beat = read_heartbeat(file)
    return replace(beat, pid=reaper) if beat is not None and processes.parent(beat.pid) == reaper else None
