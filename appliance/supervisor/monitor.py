"""Restart monitor, an event listener of Supervisor: receives each program's exit and decides whether to restart it.

A program that exits with the permanent code ends the appliance. So does an engine whose outputs drifted twice within
the window, because a restart did not correct them. Any other exit is a crash. Each restart within the window is delayed
according to the policy; more than `max` crashes within `window_s` end the appliance. The monitor restarts programs
through Supervisor; to end the appliance it sends a notice to the launcher. Crashes that the gateway attributes to a
request do not count (crash_exemption.py). With `exhausted: halt` the engines are stopped and not restarted, and the
gateway keeps running. If the gateway itself exits with the permanent code, for example because the checkpoint cannot
answer requests, it is started once more after the launcher has recorded the halted state.

Protocol of Supervisor's listeners: the listener prints READY, reads a header line of key:value tokens with `len` and as
many bytes of payload, and prints RESULT. Nothing else may be written to standard output.
"""

import os
import select
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from appliance.runtime.crash_exemption import CrashKind, read_exemptions
from appliance.runtime.halted import is_halted
from appliance.supervisor.exit_status import ExitStatus
from appliance.supervisor.hangs import Budgets
from appliance.supervisor.reaper import take_exit_status
from appliance.supervisor.supervisord import ExitWatcher, take_event, wake_supervisor
from appliance.supervisor.watchdog import CHECK_INTERVAL_S, GATEWAY, Watchdog
from engine.api.errors import EXIT_DRIFT, EXIT_PERMANENT

if TYPE_CHECKING:
    from appliance.supervisor.rpc import Supervisor

ALIVE_INTERVAL_S = 5.0  # interval between the messages to the launcher that the monitor is alive
ENGINES = "engines:"  # prefix of the Supervisor names of programs that can be halted


class Policy(msgspec.Struct, frozen=True):
    """Limit and delays of the restarts of one program."""

    max: int  # allowed restarts within the window
    window_s: float
    backoff_s: float = 1.0  # delay before the second restart; the first has none, and each further one doubles it
    max_backoff_s: float = 30.0  # largest delay
    exhausted: Literal["exit", "halt"] = "exit"
    """Action beyond the limit: the appliance exits, or it is halted, with the gateway up and never ready."""

    def delay(self, crashes: list[float], now: float) -> float | None:
        """Return the seconds until the restart after the last of `crashes` (times, in order), or None if the limit is
        exceeded."""
        recent = sum(1 for crash in crashes if now - crash < self.window_s)
        if recent > self.max:
            return None
        return 0.0 if recent <= 1 else min(self.backoff_s * 2.0 ** (recent - 2), self.max_backoff_s)


class Config(msgspec.Struct, frozen=True, kw_only=True):
    supervisor: str
    """Path of Supervisor's Unix socket."""
    password: str
    notices: str
    """Path of the pipe to the launcher."""
    exemptions: str
    """Path of the pipe from the gateway."""
    policy: Policy
    budgets: Budgets
    heartbeats: dict[str, str]
    """Heartbeat files of the engines, by program."""
    control: str
    """Path of the gateway's control socket; empty if it has none."""
    directory: str
    """The run directory, where reapers write how programs ended."""


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """Message of the monitor to the launcher, one JSON line each."""

    kind: Literal["restart", "permanent", "exhausted", "unstartable", "started", "alive"]
    """restart: the program ended and is started again. permanent, exhausted, unstartable: the appliance ends or is
    halted. started, alive: the monitor itself was started, or is running."""
    program: str
    how: str = ""
    restart: int = 0
    delay_s: float = 0.0
    hung: str = ""
    """Why the monitor killed the program; empty if it did not."""
    exit_status: ExitStatus | None = None
    """How the program ended, if it has a reaper that could report it."""
    halt: bool = False


class RestartMonitor:
    """Restart logic, independent of Supervisor. `start` starts a program by its Supervisor name. `status` returns its
    exit status, -1 after a signal, None if it is running or if Supervisor is shutting down. `exit_status` returns the
    record of its reaper. `halt` stops all engines.

    Each exit that counts is followed by exactly one start, even if its event arrives late: a new monitor first checks
    all programs and receives the earlier events afterwards.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        notify: Callable[[Notice], None],
        start: Callable[[str], None],
        status: Callable[[str], int | None],
        exit_status: Callable[[str], ExitStatus | None] = lambda program: None,
        halt: Callable[[], None] = lambda: None,
        halted: bool = False,
        is_halt_written: Callable[[], bool] = lambda: True,
    ) -> None:
        """`halted` says that an earlier monitor halted the appliance, so no engine may be started. `is_halt_written`
        returns whether a gateway that starts now would see the halted state."""
        self._policy = policy
        self._notify = notify
        self._start = start
        self._status = status
        self._exit_status = exit_status
        self._halt = halt
        self._halted = halted
        self._is_halt_written = is_halt_written
        self._pending_gateway = ""  # the gateway, to be started once `is_halt_written` returns True
        self._not_restarted: set[str] = set()
        self._crashes: dict[str, list[float]] = {}
        self._expected: set[str] = set()  # programs whose next crash belongs to a test of requests
        self._exempt: dict[str, list[float]] = {}  # times of the crashes that belong to such tests, by program
        self._drifted: dict[str, float] = {}
        self._hung: dict[str, str] = {}
        self._due: dict[str, float] = {}

    def alive(self) -> None:
        """Report to the launcher that the monitor is running."""
        self._notify(Notice(kind="alive", program="monitor"))

    def next_due(self) -> float | None:
        return min(self._due.values(), default=None)

    def start_due(self, now: float) -> None:
        for name in [name for name, due in self._due.items() if due <= now]:
            del self._due[name]
            self._start(name)
        if self._pending_gateway and self._is_halt_written():
            name, self._pending_gateway = self._pending_gateway, ""
            self._start(name)

    def event(self, kind: str, payload: Mapping[str, str], now: float) -> None:
        name = f"{payload['groupname']}:{payload['processname']}"
        if kind == "PROCESS_STATE_FATAL":
            self._notify(Notice(kind="unstartable", program=payload["processname"]))
        elif kind == "PROCESS_STATE_EXITED" and name not in self._due:
            self.exited(name, now)

    def exempt(self, program: str, crashes: int, kind: CrashKind = "attributed") -> None:
        """Apply a message of the gateway about which crashes count (crash_exemption.py)."""
        if kind == "expected":
            self._expected.add(program)
        elif kind == "cancelled":
            self._expected.discard(program)
        elif kind == "restored":
            exempt = self._exempt.get(program, [])
            for name, known in self._crashes.items():
                if name.rpartition(":")[2] == program and crashes > 0:
                    known += exempt[-crashes:]
                    known.sort()
                    del exempt[-crashes:]
        else:
            for name, known in self._crashes.items():
                if name.rpartition(":")[2] == program and crashes > 0:
                    del known[-crashes:]

    def mark_hung(self, program: str, reason: str) -> None:
        """Record that the program was killed because it hung. Its next exit gets this reason."""
        self._hung[program] = reason

    def exited(self, name: str, now: float) -> None:
        """Schedule the restart, or report that a restart cannot help or that there were too many."""
        program = name.rpartition(":")[2]
        if name in self._not_restarted or (self._halted and name.startswith(ENGINES)):
            return
        status = self._status(name)
        if status is None:
            return
        hung, exit_status = self._hung.pop(program, ""), self._exit_status(program)
        how = "killed by a signal" if status < 0 else f"exit code {status}"
        notice = Notice(
            kind="permanent",
            program=program,
            how=hung or (exit_status.text() if exit_status else how),
            hung=hung,
            exit_status=exit_status,
        )
        if status == EXIT_PERMANENT or (status == EXIT_DRIFT and self._drifts_again(name, now)):
            self._stop_restarting(name, notice)
            return
        crashes = [crash for crash in self._crashes.get(name, []) if now - crash < self._policy.window_s]
        if program == GATEWAY:
            self._expected.clear()
        if program in self._expected:
            self._expected.discard(program)
            recent = [crash for crash in self._exempt.get(program, []) if now - crash < self._policy.window_s]
            self._exempt[program] = [*recent, now]
        else:
            crashes.append(now)
        self._crashes[name] = crashes
        delay = self._policy.delay(crashes, now)
        if delay is None:
            self._stop_restarting(name, msgspec.structs.replace(notice, kind="exhausted", restart=len(crashes) - 1))
            return
        self._due[name] = now + delay
        self._notify(msgspec.structs.replace(notice, kind="restart", restart=len(crashes), delay_s=delay))

    def _drifts_again(self, name: str, now: float) -> bool:
        before = self._drifted.get(name)
        self._drifted[name] = now
        return before is not None and now - before < self._policy.window_s

    def _stop_restarting(self, name: str, notice: Notice) -> None:
        engine = name.startswith(ENGINES)
        halt = self._policy.exhausted == "halt" and (engine or (notice.kind == "permanent" and not self._halted))
        if engine or not halt:
            self._not_restarted.add(name)
        else:
            self._pending_gateway = name
        self._notify(msgspec.structs.replace(notice, halt=halt))
        if halt:
            self._halted = True
            self._due = {other: due for other, due in self._due.items() if not other.startswith(ENGINES)}
            self._halt()


def main(path: Path) -> int:
    from appliance.supervisor.rpc import Supervisor  # the launcher imports this module without it

    config = msgspec.json.decode(path.read_bytes(), type=Config)
    # opened for both: opening it for writing alone would block if the launcher is gone
    pipe = os.open(config.notices, os.O_RDWR)
    # both ends: no end of file when the gateway exits
    exemptions = os.open(config.exemptions, os.O_RDWR | os.O_NONBLOCK)
    supervisor = Supervisor(config.supervisor, config.password)
    monitor = RestartMonitor(
        config.policy,
        notify=lambda notice: _write(pipe, msgspec.json.encode(notice) + b"\n"),
        start=supervisor.start,
        status=supervisor.status,
        exit_status=lambda program: take_exit_status(Path(config.directory), program),
        halt=lambda: supervisor.stop_group(ENGINES.rstrip(":")),
        halted=is_halted(Path(config.directory)),
        is_halt_written=lambda: is_halted(Path(config.directory)),
    )
    watchdog = Watchdog(config.budgets, config.heartbeats, config.control, monitor.mark_hung)
    ends = ExitWatcher()
    for program in supervisor.all():
        if program["statename"] == "EXITED":  # it ended while no monitor was running
            monitor.exited(f"{program['group']}:{program['name']}", time.monotonic())
        elif program["pid"] and program["name"] != "monitor":
            ends.watch(program["pid"])
            watchdog.started(program["name"], program["pid"])
    _listen(monitor, supervisor, ends, exemptions, watchdog)
    return 0


def _listen(
    monitor: RestartMonitor, supervisor: "Supervisor", ends: ExitWatcher, exemptions: int, watchdog: Watchdog
) -> None:
    """Handle events until Supervisor closes the pipe."""
    buffer, alive_at = bytearray(), 0.0
    _write(1, b"READY\n")
    while True:
        due = monitor.next_due()
        timeout = CHECK_INTERVAL_S if due is None else max(0.0, min(CHECK_INTERVAL_S, due - time.monotonic()))
        readable = select.select([0, exemptions, *ends.descriptors], [], [], timeout)[0]
        if ends.take(readable):
            wake_supervisor(supervisor.path)
        if exemptions in readable:
            for exemption in read_exemptions(os.read(exemptions, 65536)):
                monitor.exempt(exemption.program, exemption.crashes, exemption.kind)
        watchdog.check()
        if time.monotonic() >= alive_at:
            monitor.alive()
            alive_at = time.monotonic() + ALIVE_INTERVAL_S
        monitor.start_due(time.monotonic())
        if 0 not in readable:
            continue
        data = os.read(0, 65536)
        if not data:
            return
        buffer += data
        while (event := take_event(buffer)) is not None:
            kind, payload = event
            if kind == "PROCESS_STATE_RUNNING":
                ends.watch(int(payload["pid"]))
                watchdog.started(payload["processname"], int(payload["pid"]))
            elif kind == "PROCESS_STATE_EXITED":
                watchdog.ended(payload["processname"])
            monitor.event(kind, payload, time.monotonic())
            monitor.start_due(time.monotonic())
            _write(1, b"RESULT 2\nOKREADY\n")


def _write(descriptor: int, data: bytes) -> None:
    """Write all of `data`. It is shorter than PIPE_BUF, so the write is atomic."""
    os.write(descriptor, data)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
