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
from appliance.supervisor.crash_bundles import CrashBundleWriter
from appliance.supervisor.kill_tree import kill_tree
from appliance.supervisor.monitor import Notice, Policy
from appliance.supervisor.monitor_watch import SILENT_S, MonitorWatchdog
from appliance.supervisor.programs import program
from appliance.supervisor.startup import Startup
from appliance.supervisor.supervise import Service
from appliance.supervisor.supervisord import wake_supervisor

_STOP_EXTRA_S = 2.0  # for Supervisor and the engines, in addition to the gateway's drain time
_SECOND_SIGNAL_S = 1.0
_WAKE_S = 0.05
_CHECK_INTERVAL_S = 1.0  # interval between checks of the restart monitor
_KILL_GRACE_S = 0.8
_BUNDLE_S = 1.0
_LAST_LINES = 5
_BUNDLED_LINES = 200
_MAX_LINE = 2**16
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
_LAST_LINE = re.compile(r"(?:slipway \w+: )?((\w+): .*|.*)")
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


class LineReader:
    """Splits the output of a pipe into lines and keeps the most recent ones."""

    def __init__(self, descriptor: int, handle: Callable[[bytes], None]) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self.recent: deque[bytes] = deque(maxlen=_BUNDLED_LINES)
        self._handle = handle
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
            if self._rest and (not data or len(self._rest) > _MAX_LINE):
                lines, self._rest = [*lines, self._rest], b""
            for line in lines:
                self.recent.append(line)
                self._handle(line)
            if not data:
                return False


class InitProcess:
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
        crashes: CrashBundleWriter,
        report: Callable[[Outcome], None],
    ) -> None:
        self._service = service
        self._directory = directory
        self._environment = environment
        self._console = console
        self._listener = listen.SharedListener(listener, directory / listen.LISTENER_SOCKET)
        self._crashes = crashes
        self._report = report
        self._halted: Outcome | None = None
        self._bundle_tasks: set[asyncio.Task[None]] = set()
        self._startup = Startup(service, console)
        self._loop = asyncio.get_running_loop()
        self._outcome: asyncio.Future[Outcome] = self._loop.create_future()
        self._supervisor_gone = asyncio.Event()
        self._stop_now = asyncio.Event()
        self._ended_s = 0.0
        self._monitor, self._clock = MonitorWatchdog(), RunningClock(2 * _CHECK_INTERVAL_S)
        self._lines: dict[str, LineReader] = {}
        self.manifest = ""
        self.on_sighup: Callable[[], None] | None = None  # handler of SIGHUP; without one, SIGHUP stops the appliance

    async def run(self) -> Outcome:
        """Start all programs, wait for the end, and kill all remaining processes."""
        processes.become_subreaper()
        for number in signals.stop_signals():
            self._loop.add_signal_handler(number, self._on_stop_signal, number)
        for stray in signals.stray_signals():
            self._loop.add_signal_handler(stray, self._on_ignored_signal, stray)
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
            if outcome.exit is exits.OK or outcome is self._halted:
                await self._stop()
        finally:
            for task in (watch, wake, monitor, *self._bundle_tasks):
                task.cancel()
            await kill_tree(_KILL_GRACE_S, self._on_reaped)
            self._drain()
            self._close()
        return outcome

    def _close(self) -> None:
        self._listener.close()
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
        for name in ("gateway", *supervise.engine_names(self._service), "monitor"):
            descriptor = os.open(self._directory / f"{name}.log", os.O_RDWR)
            self._follow(name, LineReader(descriptor, lambda line, name=name: self._console.log(name, line)))  # type: ignore[misc]
        self._follow("notices", LineReader(os.open(self._directory / "notices", os.O_RDWR), self._on_notice))

    def _follow(self, name: str, lines: LineReader) -> None:
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
                preexec_fn=processes.exit_with_parent,  # no thread runs yet
            )
        os.close(writing)
        self._follow("supervisor", LineReader(reading, lambda line: self._console.log("supervisor", line)))
        return supervisor

    def _announce(self) -> None:
        gateway = self._service.gateway
        host, tls = listen.local_host(gateway.endpoints.host), gateway.tls is not None
        crashes = tuple(map(str, self._crashes.folders))
        address = rundir.Address(os.getpid(), host, gateway.endpoints.port, self.manifest, tls, crashes)
        rundir.write_address(self._directory, address)
        engines = len(self._service.engines)
        self._console.message(
            "slipway",
            f"starting {gateway.names[0]} with {engines} engine{'s' * (engines != 1)}; run directory {self._directory}",
        )

    async def _watch(self) -> None:
        try:
            self._finish(Outcome(exits.STARTUP, await self._startup.watch()))
        except Exception as error:
            if not self._outcome.done():
                self._outcome.set_exception(error)

    async def _wake_until_up(self) -> None:
        """Wake Supervisor repeatedly until the gateway is up: otherwise it starts its programs only after its first
        poll, a second later."""
        while not self._startup.gateway_up:
            wake_supervisor(str(self._directory / "supervisor.sock"))
            await asyncio.sleep(_WAKE_S)

    def _finish(self, outcome: Outcome) -> None:
        """Set the outcome. Only the first reason to end counts."""
        if not self._outcome.done():
            self._console.end_progress()
            self._listener.close(b"" if self._service.gateway.tls else STOPPED)
            self._ended_s = self._loop.time()
            self._outcome.set_result(outcome)

    def _on_stop_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if number == signal.SIGHUP and self.on_sighup is not None and not self._outcome.done():
            self.on_sighup()
            return
        if self._outcome.done():
            # Some tools signal a process and its group: a second signal at the same time does not mean "stop at once".
            if self._loop.time() - self._ended_s > _SECOND_SIGNAL_S and not self._stop_now.is_set():
                self._console.message("slipway", f"second {name}: stopping without waiting for open requests")
                self._stop_now.set()
            return
        self._console.message(
            "slipway", f"{name}: stopping; open requests have {self._service.gateway.drain_s:g} s to finish"
        )
        self._finish(self._halted or Outcome(exits.OK))

    def _on_ignored_signal(self, number: int) -> None:
        self._console.message("slipway", f"{signals.name_of(number)} is ignored: slipway does not use this signal")

    def _on_notice(self, line: bytes) -> None:
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
            self._finish(Outcome(exits.SUPERVISOR, message, notice.program, last))
            return
        cause = classify(
            notice.exit_status, hung=bool(notice.hung), permanent=notice.kind == "permanent", last_lines=last
        )
        if notice.kind == "restart":
            self._console.message(notice.program, _restart_message(notice, cause, self._service.restarts))
            self._startup.restarted()
            then = None
        else:
            then = _conclusion(notice, cause, self._service.restarts, last)
        task = self._loop.create_task(self._write_bundle(notice, cause, all_lines, then))
        self._bundle_tasks.add(task)
        task.add_done_callback(self._bundle_tasks.discard)

    async def _write_bundle(self, notice: Notice, cause: Cause, lines: list[str], then: Outcome | None) -> None:
        """Write the crash bundle of an engine, then apply the outcome, if the crash has one."""
        bundle = None
        if notice.program != "gateway":
            try:
                async with asyncio.timeout(_BUNDLE_S):
                    bundle = await self._crashes.write(notice, cause, lines)
                reason = self._crashes.error if bundle is None else ""
            except Exception as error:  # an error in a report must not prevent the shutdown
                reason = f"{type(error).__name__}: {error}".rstrip(": ")
            if bundle is not None:
                self._console.message(notice.program, f"crash bundle {bundle}; run: slipway explain {cause.name}")
            elif reason:
                self._console.message(notice.program, f"cannot write a crash bundle: {reason}")
        if notice.exit_status is not None and notice.exit_status.stuck:
            self._console.message(notice.program, notice.exit_status.leftovers())
        if then is None:
            return
        then = replace(then, bundle=str(bundle or ""))
        if notice.halt:
            self._halt(then)
        else:
            self._finish(then)

    def _halt(self, outcome: Outcome) -> None:
        """Halt the appliance: no engine is restarted, and the gateway reports that until the appliance is stopped."""
        if self._outcome.done() or self._halted is not None:
            return
        self._halted = outcome
        self._watching.cancel()
        self._console.end_progress()
        exit, cause = outcome.exit, outcome.cause.name if outcome.cause else ""
        state = halted.HaltedState(outcome.message, exit.name, exit.number, cause, outcome.cure)
        try:
            halted.write_halted(self._directory, state)
        except OSError as error:  # a full disk: the gateway would not see the halted state, so it must not continue
            self._console.message(
                "slipway", f"cannot halt, so the appliance exits: {self._directory}: {error.strerror}"
            )
            self._finish(outcome)
            return
        self._console.message(
            "slipway", f"halted: {outcome.message}; /ready reports the reason; SIGTERM exits with code {exit.number}"
        )
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
            await asyncio.sleep(_CHECK_INTERVAL_S)
            now_s = self._clock.now_s()
            if why := self._monitor.lost(now_s):
                self._monitor_fails(why)
                return
            if self._monitor.silent(now_s):
                self._console.message(
                    "monitor", f"sent no message for {SILENT_S:g} s; killing it, so that Supervisor restarts it"
                )
                with contextlib.suppress(ProcessLookupError):
                    pid = await asyncio.to_thread(program, os.getpid(), "monitor")
                    if pid:
                        os.kill(pid, signal.SIGKILL)

    def _monitor_fails(self, why: str) -> None:
        self._drain()
        self._finish(Outcome(exits.SUPERVISOR, why, "monitor", tuple(_text(self._lines["monitor"].last))))

    def _drain(self) -> None:
        for name, lines in self._lines.items():
            if name != "notices":
                lines.read()

    def _reap(self) -> None:
        self._on_reaped(processes.reap())

    def _on_reaped(self, ended: dict[int, int]) -> None:
        status = ended.get(self._supervisor.pid)
        if status is None:
            return
        code = os.waitstatus_to_exitcode(status)
        self._supervisor.returncode = code  # reaped here instead of by subprocess
        self._supervisor_gone.set()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        lines = self._lines["supervisor"]
        lines.read()
        last = tuple(line.decode(errors="replace") for line in lines.last)
        self._finish(Outcome(exits.SUPERVISOR, f"supervisord {how} unexpectedly", "supervisor", last))

    async def _stop(self) -> None:
        """Let Supervisor stop gateway, engines and monitor in this order, until the deadline or a second signal."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._supervisor.pid, signal.SIGTERM)
        deadline = self._loop.time() + self._service.gateway.drain_s + _STOP_EXTRA_S
        while not self._supervisor_gone.is_set() and not self._stop_now.is_set() and self._loop.time() < deadline:
            wake_supervisor(str(self._directory / "supervisor.sock"))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._supervisor_gone.wait(), _WAKE_S)


def _text(lines: Iterable[bytes]) -> list[str]:
    return [line.decode(errors="replace") for line in lines]


def _restart_message(notice: Notice, cause: Cause, policy: Policy) -> str:
    later = f", in {notice.delay_s:g} s" if notice.delay_s else ""
    count = f"{notice.restart} of {policy.max} within {policy.window_s:g} s"
    return f"exited ({_exit_text(notice, cause)}); restart {count}{later}"


def _exit_text(notice: Notice, cause: Cause) -> str:
    return f"{notice.how}, {cause.name}" if cause in (OOM_KILL, DEVICE, DRIFT) else notice.how


def _conclusion(notice: Notice, cause: Cause, policy: Policy, last: tuple[str, ...]) -> Outcome:
    """Return how the appliance ends after an exit that is not followed by a restart."""
    if notice.kind == "permanent":
        words = _LAST_LINE.fullmatch(last[-1] if last else "it printed no reason")
        assert words is not None, "the expression matches every line"
        exit = _PERMANENT.get(words[2], exits.ENGINE)
        return Outcome(exit, f"{notice.program} failed permanently: {words[1]}", notice.program, last, cause)
    limit = f"lifecycle.restart.max is {policy.max} within {policy.window_s:g} s"
    message = f"{notice.program} exited too often ({_exit_text(notice, cause)}); {limit}"
    return Outcome(exits.RESTARTS, message, notice.program, last, cause)
