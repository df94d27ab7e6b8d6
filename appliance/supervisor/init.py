"""Init process of the running appliance, above Supervisor: handles signals, orphans, log lines, readiness and shutdown.

It can run as PID 1 of a container. The restart monitor decides which programs are restarted, and reports its decisions
to this process through a pipe.
"""

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from appliance.config import exits
from appliance.config.exits import Exit
from appliance.runtime import halted, processes
from appliance.runtime import listener as listen
from appliance.supervisor import rundir, signals, supervise
from appliance.supervisor.activity import RunningClock
from appliance.supervisor.causes import DEVICE, DRIFT, OOM_KILL, Cause, classify
from appliance.supervisor.console import Console
from appliance.supervisor.crashes import Crashes
from appliance.supervisor.kill_tree import sweep
from appliance.supervisor.monitor import Notice, Policy
from appliance.supervisor.monitor_watch import MonitorWatch
from appliance.supervisor.programs import program
from appliance.supervisor.startup import Startup
from appliance.supervisor.supervise import Service
from appliance.supervisor.supervisord import wake_supervisor

_STOP_EXTRA_S = 2.0  # for Supervisor and the engines, in addition to the gateway's drain time
_AGAIN_S = 1.0
_WAKE_S = 0.05
_LOOK_S = 1.0  # interval between checks of the restart monitor
_SWEEP_S = 0.8
_BUNDLE_S = 1.0
_LAST_LINES = 5
_BUNDLED_LINES = 200
_LONGEST_LINE = 2**16
# Reply to clients whose connections wait for a gateway when the appliance stops.
_STOPPED_BODY = (
    b'{"error":{"message":"The service is shutting down. Please retry on another instance.",'
    b'"type":"ServiceUnavailableError","param":null,"code":503}}'
)
STOPPED = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 5\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(_STOPPED_BODY), _STOPPED_BODY)
)
# The last line of a program that ends with a permanent error: EngineError.code and the message.
_LAST_WORDS = re.compile(r"(?:slipway \w+: )?((\w+): .*|.*)")
_PERMANENT = {"checkpoint": exits.CHECKPOINT, "architecture": exits.CHECKPOINT, "memory": exits.MEMORY}
_PERMANENT |= {"source": exits.SOURCE, "self_test": exits.SELF_TEST, "drift": exits.SELF_TEST}


@dataclass(frozen=True)
class Outcome:
    """How the appliance ended, with a message. `cause` and `bundle` belong to the crash that ended it."""

    exit: Exit
    message: str = ""
    program: str = ""
    last_lines: tuple[str, ...] = ()
    cause: Cause | None = None
    bundle: str = ""

    @property
    def cure(self) -> str:
        """Return the remedy: the one of the cause if the exit itself only says to look for the cause."""
        return self.cause.cure if self.exit is exits.RESTARTS and self.cause is not None else self.exit.cure


class Lines:
    """Splits the output of a pipe into lines and keeps the most recent ones."""

    def __init__(self, descriptor: int, take: Callable[[bytes], None]) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self.recent: deque[bytes] = deque(maxlen=_BUNDLED_LINES)
        self._take = take
        self._rest = b""

    @property
    def last(self) -> list[bytes]:
        return list(self.recent)[-_LAST_LINES:]

    def read(self) -> bool:
        """Read everything that is available. Return False at the end of the file."""
        while True:
            try:
                data = os.read(self.descriptor, 2**16)
            except BlockingIOError:
                return True
            *lines, self._rest = (self._rest + data).split(b"\n")
            if self._rest and (not data or len(self._rest) > _LONGEST_LINE):
                lines, self._rest = [*lines, self._rest], b""
            for line in lines:
                self.recent.append(line)
                self._take(line)
            if not data:
                return False


class Tree:
    """One run of supervisord and its descendants. Create it inside the event loop and call `run` once; `run` returns
    how the appliance ended. `report` is called when the appliance is halted and keeps running."""

    def __init__(
        self,
        service: Service,
        directory: Path,
        environment: Mapping[str, str],
        console: Console,
        listener: socket.socket,
        *,
        crashes: Crashes,
        report: Callable[[Outcome], None],
    ) -> None:
        self._service = service
        self._directory = directory
        self._environment = environment
        self._console = console
        self._door = listen.Door(listener, directory / listen.DOOR)
        self._crashes = crashes
        self._report = report
        self._parked: Outcome | None = None
        self._told: set[asyncio.Task[None]] = set()
        self._startup = Startup(service, console)
        self._loop = asyncio.get_running_loop()
        self._outcome: asyncio.Future[Outcome] = self._loop.create_future()
        self._supervisor_gone = asyncio.Event()
        self._hurry = asyncio.Event()
        self._ended = 0.0
        self._monitor, self._clock = MonitorWatch(), RunningClock(2 * _LOOK_S)
        self._lines: dict[str, Lines] = {}
        self.manifest = ""
        self.hung_up: Callable[[], None] | None = None  # handler of SIGHUP; without one, SIGHUP stops the appliance

    async def run(self) -> Outcome:
        """Start all programs, wait for the end, and leave no process behind."""
        processes.become_subreaper()
        for number in signals.stop_signals():
            self._loop.add_signal_handler(number, self._signalled, number)
        for stray in signals.stray_signals():
            self._loop.add_signal_handler(stray, self._ignored, stray)
        self._loop.add_signal_handler(signal.SIGCHLD, self._reap)
        signals.unblock()
        self._open_pipes()
        self._supervisor = self._start_supervisor()
        self._console.start()
        self._announce()
        watch = self._watching = self._loop.create_task(self._watch())
        wake = self._loop.create_task(self._wake_until_up())
        monitor = self._loop.create_task(self._watch_monitor())
        try:
            outcome = await self._outcome
            if outcome.exit is exits.OK or outcome is self._parked:
                await self._stop()
        finally:
            for task in (watch, wake, monitor, *self._told):
                task.cancel()
            await sweep(_SWEEP_S, self._reaped)
            self._drain()
            self._close()
        return outcome

    def _close(self) -> None:
        self._door.close()
        self._loop.remove_signal_handler(signal.SIGCHLD)
        for number in (*signals.stop_signals(), *signals.stray_signals()):
            self._loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)  # only the run directory is still to be removed
        for lines in self._lines.values():
            self._loop.remove_reader(lines.descriptor)
            os.close(lines.descriptor)

    def _open_pipes(self) -> None:
        """Open the log pipes for reading and writing, so that neither end waits for the other or sees an end of
        file."""
        for name in ("gateway", *supervise.engine_names(self._service), "sentinel"):
            descriptor = os.open(self._directory / f"{name}.log", os.O_RDWR)
            self._follow(name, Lines(descriptor, lambda line, name=name: self._console.log(name, line)))  # type: ignore[misc]
        self._follow("notices", Lines(os.open(self._directory / "notices", os.O_RDWR), self._noticed))

    def _follow(self, name: str, lines: Lines) -> None:
        self._lines[name] = lines

        def readable() -> None:
            if not lines.read():
                self._loop.remove_reader(lines.descriptor)

        self._loop.add_reader(lines.descriptor, readable)

    def _start_supervisor(self) -> subprocess.Popen[bytes]:
        # A plain pipe is not used: if the launcher were killed, the next log line would fail and end Supervisor.
        # Supervisor holds both ends of this one.
        path = self._directory / "supervisor.log"
        os.mkfifo(path, 0o600)
        reading, writing = (os.open(path, os.O_RDWR) for _ in range(2))
        with rundir.lock_to_pass(self._directory) as lock:
            supervisor = subprocess.Popen(
                [sys.executable, "-P", "-m", "supervisor.supervisord", "-n", "-c", "supervisord.conf"],
                cwd=self._directory,
                env={**self._environment, "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                # the run directory stays in use until Supervisor ends, also if the launcher is killed
                pass_fds=(lock,),
                process_group=0,  # a terminal's Ctrl-C reaches only the launcher, which stops the programs in order
                preexec_fn=processes.end_with_parent,  # no thread runs yet
            )
        os.close(writing)
        self._follow("supervisor", Lines(reading, lambda line: self._console.log("supervisor", line)))
        return supervisor

    def _announce(self) -> None:
        gateway = self._service.gateway
        host, tls = listen.local_host(gateway.host), gateway.tls is not None
        crashes = tuple(map(str, self._crashes.places))
        address = rundir.Address(os.getpid(), host, gateway.port, self.manifest, tls, crashes)
        rundir.write_address(self._directory, address)
        engines = len(self._service.engines)
        self._console.say(
            "slipway",
            f"starting {gateway.names[0]} with {engines} engine{'s' * (engines != 1)}; run directory {self._directory}",
        )

    async def _watch(self) -> None:
        try:
            self._settle(Outcome(exits.STARTUP, await self._startup.watch()))
        except Exception as error:
            if not self._outcome.done():
                self._outcome.set_exception(error)

    async def _wake_until_up(self) -> None:
        """Wake Supervisor repeatedly until the gateway is up: otherwise it starts its programs only after its first
        poll, a second later."""
        while not self._startup.gateway_up:
            wake_supervisor(str(self._directory / "supervisor.sock"))
            await asyncio.sleep(_WAKE_S)

    def _settle(self, outcome: Outcome) -> None:
        """Set the outcome. Only the first reason to end counts."""
        if not self._outcome.done():
            self._console.end_progress()
            self._door.close(b"" if self._service.gateway.tls else STOPPED)
            self._ended = self._loop.time()
            self._outcome.set_result(outcome)

    def _signalled(self, number: int) -> None:
        name = signal.Signals(number).name
        if number == signal.SIGHUP and self.hung_up is not None and not self._outcome.done():
            self.hung_up()
            return
        if self._outcome.done():
            # Some tools signal a process and its group: a second signal at the same time does not mean "stop at once".
            if self._loop.time() - self._ended > _AGAIN_S and not self._hurry.is_set():
                self._console.say("slipway", f"{name} again: not waiting any longer")
                self._hurry.set()
            return
        self._console.say("slipway", f"{name}: stopping; open requests have {self._service.gateway.drain_s:g} s")
        self._settle(self._parked or Outcome(exits.OK))

    def _ignored(self, number: int) -> None:
        self._console.say("slipway", f"{signals.name_of(number)} is ignored: it has no meaning for slipway")

    def _noticed(self, line: bytes) -> None:
        notice = msgspec.json.decode(line, type=Notice)
        if self._outcome.done():  # it ended because of the shutdown
            return
        if notice.kind in ("started", "alive"):
            self._monitor_heard(notice)
            return
        self._drain()  # its last lines were written before the notice
        lines = self._lines[notice.program]
        last, all_lines = tuple(_text(lines.last)), _text(lines.recent)
        lines.recent.clear()  # later lines belong to the next run
        if notice.kind == "unstartable":
            message = f"Supervisor could not start {notice.program}"
            self._settle(Outcome(exits.SUPERVISOR, message, notice.program, last))
            return
        cause = classify(notice.death, hung=bool(notice.hung), permanent=notice.kind == "permanent", last_lines=last)
        if notice.kind == "restart":
            self._console.say(notice.program, _restarts(notice, cause, self._service.restarts))
            self._startup.restarted()
            then = None
        else:
            then = _conclusion(notice, cause, self._service.restarts, last)
        task = self._loop.create_task(self._bundled(notice, cause, all_lines, then))
        self._told.add(task)
        task.add_done_callback(self._told.discard)

    async def _bundled(self, notice: Notice, cause: Cause, lines: list[str], then: Outcome | None) -> None:
        """Write the crash bundle of an engine, then apply the outcome, if the crash has one."""
        bundle = None
        if notice.program != "gateway":
            try:
                async with asyncio.timeout(_BUNDLE_S):
                    bundle = await self._crashes.write(notice, cause, lines)
                trouble = self._crashes.trouble if bundle is None else ""
            except Exception as error:  # an error in a report must not prevent the shutdown
                trouble = f"{type(error).__name__}: {error}".rstrip(": ")
            if bundle is not None:
                self._console.say(notice.program, f"crash bundle {bundle}; slipway explain {cause.name}")
            elif trouble:
                self._console.say(notice.program, f"no crash bundle can be written: {trouble}")
        if notice.death is not None and notice.death.stuck:
            self._console.say(notice.program, notice.death.left())
        if then is None:
            return
        then = replace(then, bundle=str(bundle or ""))
        if notice.park:
            self._park(then)
        else:
            self._settle(then)

    def _park(self, outcome: Outcome) -> None:
        """Halt the appliance: no engine is restarted, and the gateway reports that until the appliance is stopped."""
        if self._outcome.done() or self._parked is not None:
            return
        self._parked = outcome
        self._watching.cancel()
        self._console.end_progress()
        exit, cause = outcome.exit, outcome.cause.name if outcome.cause else ""
        told = halted.Parked(outcome.message, exit.name, exit.number, cause, outcome.cure)
        try:
            halted.park(self._directory, told)
        except OSError as error:  # a full disk: the gateway would not see the halted state, so it must not continue
            self._console.say("slipway", f"cannot be parked: {self._directory}: {error.strerror}")
            self._settle(outcome)
            return
        self._console.say("slipway", f"parked: {outcome.message}; /ready says so; a SIGTERM ends it with {exit.number}")
        self._report(outcome)

    def _monitor_heard(self, notice: Notice) -> None:
        now_s = self._clock.now_s()
        if notice.kind == "alive":
            self._monitor.alive(now_s)
        elif why := self._monitor.started(now_s):
            self._monitor_fails(why)

    async def _watch_monitor(self) -> None:
        """Restart a restart monitor that hangs; end the appliance if that does not help."""
        while True:
            await asyncio.sleep(_LOOK_S)
            now_s = self._clock.now_s()
            if why := self._monitor.lost(now_s):
                self._monitor_fails(why)
                return
            if self._monitor.silent(now_s):
                self._console.say("sentinel", "gave no sign of life; it is killed and started again")
                with contextlib.suppress(ProcessLookupError):
                    pid = await asyncio.to_thread(program, os.getpid(), "sentinel")
                    if pid:
                        os.kill(pid, signal.SIGKILL)

    def _monitor_fails(self, why: str) -> None:
        self._drain()
        self._settle(Outcome(exits.SUPERVISOR, why, "sentinel", tuple(_text(self._lines["sentinel"].last))))

    def _drain(self) -> None:
        for name, lines in self._lines.items():
            if name != "notices":
                lines.read()

    def _reap(self) -> None:
        self._reaped(processes.reap())

    def _reaped(self, ended: dict[int, int]) -> None:
        status = ended.get(self._supervisor.pid)
        if status is None:
            return
        code = os.waitstatus_to_exitcode(status)
        self._supervisor.returncode = code  # reaped here instead of by subprocess
        self._supervisor_gone.set()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        lines = self._lines["supervisor"]
        lines.read()
        last = tuple(line.decode(errors="replace") for line in lines.last)
        self._settle(Outcome(exits.SUPERVISOR, f"supervisord {how} without having been asked", "supervisor", last))

    async def _stop(self) -> None:
        """Let Supervisor stop gateway, engines and monitor in this order, until the deadline or a second signal."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._supervisor.pid, signal.SIGTERM)
        deadline = self._loop.time() + self._service.gateway.drain_s + _STOP_EXTRA_S
        while not self._supervisor_gone.is_set() and not self._hurry.is_set() and self._loop.time() < deadline:
            wake_supervisor(str(self._directory / "supervisor.sock"))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._supervisor_gone.wait(), _WAKE_S)


def _text(lines: Iterable[bytes]) -> list[str]:
    return [line.decode(errors="replace") for line in lines]


def _restarts(notice: Notice, cause: Cause, policy: Policy) -> str:
    later = f" in {notice.delay_s:g} s" if notice.delay_s else ""
    count = f"{notice.restart} of {policy.max} within {policy.window_s:g} s"
    return f"died ({_how(notice, cause)}); restart {count}{later}"


def _how(notice: Notice, cause: Cause) -> str:
    return f"{notice.how}, {cause.name}" if cause in (OOM_KILL, DEVICE, DRIFT) else notice.how


def _conclusion(notice: Notice, cause: Cause, policy: Policy, last: tuple[str, ...]) -> Outcome:
    """Return how the appliance ends after an exit that is not followed by a restart."""
    if notice.kind == "permanent":
        words = _LAST_WORDS.fullmatch(last[-1] if last else "it did not say why")
        assert words is not None, "the expression takes every line"
        exit = _PERMANENT.get(words[2], exits.ENGINE)
        return Outcome(exit, f"{notice.program} ended for good: {words[1]}", notice.program, last, cause)
    limit = f"lifecycle.restart.max is {policy.max} within {policy.window_s:g} s"
    message = f"{notice.program} died once too often ({_how(notice, cause)}); {limit}"
    return Outcome(exits.RESTARTS, message, notice.program, last, cause)
