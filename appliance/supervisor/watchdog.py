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
from appliance.supervisor.hangs import Budgets, Hangs
from engine.api.heartbeat import Heartbeat, read_heartbeat

GATEWAY = "gateway"
LOOK_S = 0.5  # interval between checks of heartbeats and gateway
PROBE_S = 2.0  # time between a reply of the gateway and the next request
PING = b'{"type":"ping"}\n'
MEASURED = 0.25  # fraction of a budget after which the CPU activity of a silent engine is measured


@dataclass
class _Gateway:
    """State of one gateway process. Times are of the RunningClock."""

    pid: int
    queued_s: float
    last_s: float
    silent_s: float = 0.0  # without an answer
    next_s: float = 0.0  # when the next request is due
    answered: bool = False  # it has answered once
    asking: socket.socket | None = None


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
        if self._gateway is not None and self._gateway.asking is not None:
            self._gateway.asking.close()
        self._gateway = None

    def look(self, now_s: float) -> str:
        """Return why the gateway counts as hung, or ""."""
        gateway = self._gateway
        if gateway is None or not self._path:
            return ""
        queued = queued_s(gateway.pid)
        waited_s = now_s - (gateway.last_s if gateway.asking else max(gateway.last_s, gateway.next_s))
        gateway.silent_s += max(0.0, waited_s - (queued - gateway.queued_s))
        gateway.last_s, gateway.queued_s = now_s, queued
        if gateway.asking is not None and self._has_answered(gateway.asking):
            gateway.asking.close()
            gateway.asking, gateway.answered = None, True
            gateway.silent_s, gateway.next_s = 0.0, now_s + PROBE_S
        elif gateway.asking is None and now_s >= gateway.next_s:
            gateway.asking = self._ask()
            gateway.silent_s = 0.0 if gateway.asking else gateway.silent_s
        starting = not gateway.answered
        budget_s = self._budgets.loading_s if starting else self._budgets.gateway_s
        if not budget_s or gateway.silent_s < budget_s:
            return ""
        text, key = ("its start made no progress", "loading") if starting else ("it did not answer", "gateway")
        return f"hung: {text} for {gateway.silent_s:.0f} s (health.stalled_{key})"

    def _ask(self) -> socket.socket | None:
        """Send a request and return the connection. Return None if nothing listens yet, or if the queue is full."""
        asking = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            asking.setblocking(False)
            asking.connect(self._path)
            asking.sendall(PING)
        except OSError:
            asking.close()
            return None
        return asking

    def _has_answered(self, asking: socket.socket) -> bool:
        """Return whether a reply has arrived. A connection that ended without a reply is replaced by the next
        request."""
        try:
            if asking.recv(4096):
                return True
        except BlockingIOError:
            return False
        except OSError:
            pass
        if self._gateway is not None:
            self._gateway.asking = None
        asking.close()
        return False


class Watchdog:
    """Watches the running programs. `hung` is called with a program and the reason before the program is killed."""

    def __init__(
        self, budgets: Budgets, pulses: Mapping[str, str], control: str, hung: Callable[[str, str], None]
    ) -> None:
        self._budgets = budgets
        self._pulses = {program: Path(file) for program, file in pulses.items()}
        self._hung = hung
        self._clock = RunningClock(2 * LOOK_S)
        self._hangs = Hangs(budgets)
        self._activity = {program: Activity() for program in pulses}
        self._probe = GatewayProbe(control, budgets)

    def started(self, program: str, pid: int) -> None:
        """Watch a process. A monitor that starts gets it twice: from its own query and from a late event."""
        now_s = self._clock.now_s()
        if program == GATEWAY and pid != self._probe.pid:
            self._probe.started(pid, now_s)
        elif program in self._pulses and pid != self._hangs.pid(program):
            self._hangs.started(program, pid, now_s)
            self._activity[program].reset()

    def ended(self, program: str) -> None:
        if program == GATEWAY:
            self._probe.ended()
        self._hangs.ended(program)

    def look(self) -> None:
        """Kill hung programs with SIGKILL, because a stopped process does not react to SIGTERM."""
        now_s = self._clock.now_s()
        for program, file in self._pulses.items():
            keeper = self._hangs.pid(program)
            if keeper and (why := self._why(program, file, keeper, now_s)):
                self._kill(program, why, processes.descendants(keeper))
        if why := self._probe.look(now_s):
            pid = self._probe.pid
            self._kill(GATEWAY, why, [pid, *processes.descendants(pid)])

    def _why(self, program: str, file: Path, keeper: int, now_s: float) -> str:
        """Return why an engine counts as hung, or "". An engine that cannot write a heartbeat file has removed it."""
        if not file.exists():
            return ""
        activity, active = self._activity[program], False
        if self._hangs.silent_s(program, now_s) < MEASURED * self._budgets.busy_s:
            activity.reset()
        else:
            active = activity.active(processes.descendants(keeper), now_s)
        return self._hangs.look(program, _beat(file, keeper), now_s, active=active)

    def _kill(self, program: str, why: str, pids: list[int]) -> None:
        self.ended(program)
        self._hung(program, why)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _beat(file: Path, keeper: int) -> Heartbeat | None:
    """Return the engine's heartbeat with the process id of its reaper, the only one that Supervisor knows."""
    beat = read_heartbeat(file)
    return replace(beat, pid=keeper) if beat is not None and processes.parent(beat.pid) == keeper else None
