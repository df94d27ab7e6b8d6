"""Control of the other ranks by rank 0: child processes that get every plan and report only progress and errors.

Rank 0 starts them before it imports torch, so that all load in parallel. If a rank exits, fails, becomes silent or
diverges, all ranks are killed and `on_lost` is called with the reason, in a separate thread because rank 0's own thread
may
be waiting for the rank. Does not import torch.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path

from engine.api import errors
from engine.api.config import EngineConfig, Place, with_values
from engine.api.errors import EngineError
from engine.api.messages import RankMemory
from engine.core.plan import Masks, PendingMasks, StepPlan, StepResult
from engine.worker.rank_messages import (
    ALIVE_S,
    Begin,
    Broken,
    Built,
    Done,
    FromRank,
    HandleAdapter,
    Loading,
    RegisterAdapter,
    Rendezvous,
    checksum,
    encode,
    from_rank,
    masks_message,
    step_message,
)
from engine.worker.watchdog import RankWatchdog

PHASES = ("importing", "reading", "loading", "profiling", "allocating", "warming", "capturing")
CAUSE_S = 3.0  # time after an error of rank 0 to find the rank that caused it
EARLIER_EXIT_S = 0.4  # time after an error of a rank to find another rank that exited before and caused it
END_S = 2.0  # time for a rank to exit by itself after its socket was closed

OnRankLost = Callable[[Exception], None]


class RankLost(Exception):
    """A rank has failed, and the engine with it."""


class Ranks:
    """Ranks 1, 2, … of one engine. `on_lost` is called at most once, after all of them were killed, and never after
    `close`."""

    def __init__(self, config: EngineConfig, on_lost: OnRankLost = lambda error: None) -> None:
        self.size = config.parallelism.tensor
        beside = Path(config.socket).parent if config.socket else None
        # Named after the engine, so that the launcher can find and remove the folder of a killed engine.
        self._folder = Path(tempfile.mkdtemp(prefix=f"{Path(config.socket).stem}-ranks-", dir=beside))
        self.rendezvous = Rendezvous(str(self._folder / "meeting"), os.memfd_create("ranks"))
        self._watchdog, self._on_lost = RankWatchdog(self.size), on_lost
        self._changed = threading.Condition()  # guards everything below, and the watchdog
        self._progress: Callable[[str, float], None] = lambda phase, fraction: None
        self._phases: dict[int, tuple[str, float]] = dict.fromkeys(range(self.size), (PHASES[0], 0.0))
        self._built: dict[int, Built] = {}
        self._failure: Exception | None = None
        self._closing = False
        self._abort: Callable[[], None] = lambda: None
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._sockets: dict[int, Connection] = {}
        self._thread: threading.Thread | None = None
        try:
            for rank in range(1, self.size):
                self._start(rank, config)
        except OSError as error:
            self.close()
            raise RankLost(f"rank {len(self._processes) + 1} cannot be started: {error}") from error
        self._thread = threading.Thread(target=self._listen, name="ranks", daemon=True)
        self._thread.start()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of ranks 1, 2, …"""
        return tuple(process.pid for process in self._processes.values())

    @property
    def weight_bytes(self) -> int:
        """Sum over these ranks, once they are built."""
        return sum(built.weight_bytes for built in self._built.values())

    @property
    def memory(self) -> tuple[RankMemory, ...]:
        """Memory of each of these ranks, once they are built."""
        return tuple(built.memory for _, built in sorted(self._built.items()))

    def track_progress(self, progress: Callable[[str, float], None]) -> Callable[[str, float], None]:
        """Return the progress callback for rank 0. `progress` gets the progress of all ranks together."""
        self._progress = progress
        return lambda phase, fraction: self._set_phase(0, phase, fraction)

    def set_abort(self, abort: Callable[[], None]) -> None:
        """Set the callback that ends rank 0's wait for a rank that is gone. Called at once if one is gone already."""
        self._abort = abort
        with self._changed:
            gone = self._failure is not None
        if gone:
            abort()

    def wait_imported(self) -> None:
        """Wait until all ranks have imported their modules. Raises the error of a rank that fails."""
        self._wait(lambda: all(phase != PHASES[0] for rank, (phase, _) in self._phases.items() if rank))

    def wait_built(self, blocks: int) -> None:
        """Wait until all ranks are ready. blocks: size of rank 0's KV pool, which must be equal on all ranks."""
        self._wait(lambda: len(self._built) == self.size - 1)
        for rank, built in self._built.items():
            assert built.blocks == blocks, f"rank {rank} has {built.blocks} blocks of cache, rank 0 has {blocks}"

    def send(self, plan: StepPlan, masks: Masks | PendingMasks) -> None:
        """Send a step to all ranks, which run steps in this order. Late masks follow. Raises the error that ended the
        ranks."""
        with self._changed:
            self._watchdog.step_sent()
        try:
            self._send(step_message(plan, masks))
        except OSError as error:
            raise self.find_cause(error) from error
        if isinstance(masks, Future):
            masks.add_done_callback(self._send_masks)

    def send_adapter(self, message: RegisterAdapter | HandleAdapter) -> None:
        """Send a message about an adapter to all ranks."""
        with suppress(OSError):  # the listening thread detects that a rank is gone
            self._send(encode(message))

    def _send_masks(self, late: PendingMasks) -> None:
        with suppress(OSError):  # the listening thread detects that a rank is gone
            self._send(masks_message(late.result()))

    def _send(self, message: bytes) -> None:
        for connection in self._sockets.values():
            connection.send_bytes(message)

    def step_finished(self, result: StepResult) -> None:
        """Report that rank 0 has finished the next step. Raises the error that ended the ranks."""
        with self._changed:
            if self._failure is not None:
                raise self._failure
            wrong = self._watchdog.step_finished(0, checksum(result))
        if wrong is not None:
            raise self._kill_all(RankLost(wrong))

    def find_cause(self, error: Exception) -> Exception:
        """Return the cause of an error that rank 0 got in a step, or the error itself."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None, CAUSE_S)
            return self._failure or error

    def close(self) -> None:
        """End all ranks and wait until they have exited."""
        with self._changed:
            self._closing = True
        for connection in self._sockets.values():
            with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
                end.shutdown(socket.SHUT_RDWR)  # noticed at once by the rank and by the listening thread
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        for connection in self._sockets.values():
            connection.close()
        os.close(self.rendezvous.memory)
        self._end(END_S)

    # The listening thread

    def _listen(self) -> None:
        ranks = {connection: rank for rank, connection in self._sockets.items()}
        last = time.monotonic()
        while True:
            try:
                ready = wait(list(ranks), timeout=ALIVE_S)
            except OSError:
                return  # closed
            for connection in ready:
                assert isinstance(connection, Connection)
                wrong = self._receive(ranks[connection], connection)
                if wrong is not None:
                    self._report(wrong)
                    return
            now = time.monotonic()
            with self._changed:
                if self._closing:
                    return
                # The limit ignores pauses of all processes, such as that of a container.
                silent = self._watchdog.time_passed(min(now - last, 2 * ALIVE_S))
            last = now
            if silent is not None:
                self._report(RankLost(silent))
                return

    def _receive(self, rank: int, connection: Connection) -> Exception | None:
        """Handle a message. Return the error of the rank, if there is one."""
        try:
            message: FromRank = from_rank(connection.recv_bytes())
        except (EOFError, OSError):
            return RankLost(f"rank {rank} {self._exit_description(rank)}")
        with self._changed:
            self._watchdog.message_received(rank)
            match message:
                case Loading(phase, fraction):
                    self._phases[rank] = (phase, fraction)
                case Built():
                    self._built[rank] = message
                    self._phases[rank] = ("", 1.0)
                    self._watchdog.started_serving(rank)
                case Done(drawn):
                    wrong = self._watchdog.step_finished(rank, drawn)
                    return None if wrong is None else RankLost(wrong)
            self._changed.notify_all()
        if isinstance(message, Broken):
            # If one rank exits, the collectives of the others fail: report the rank that exited.
            gone = None if message.code else self._find_exited(rank)
            return RankLost(gone) if gone is not None else _error(rank, message.code, message.message)
        if isinstance(message, Loading | Built):
            self._report_progress()
        return None

    def _find_exited(self, but: int) -> str | None:
        """Return the description of another rank whose process exits within EARLIER_EXIT_S, or None."""
        limit = time.monotonic() + EARLIER_EXIT_S
        while time.monotonic() < limit:
            for rank, process in self._processes.items():
                if rank != but and process.poll() is not None:
                    return f"rank {rank} {self._exit_description(rank)}"
            time.sleep(EARLIER_EXIT_S / 20)
        return None

    def _exit_description(self, rank: int) -> str:
        process = self._processes[rank]
        try:
            code = process.wait(END_S)
        except subprocess.TimeoutExpired:
            return f"(process {process.pid}) closed its socket"
        if code >= 0:
            return f"(process {process.pid}) exited with code {code}"
        name = signal.Signals(-code).name
        memory = "; the system may have been out of memory" if -code == signal.SIGKILL else ""
        return f"(process {process.pid}) was killed by {name}{memory}"

    def _report(self, error: Exception) -> None:
        if self._kill_all(error) is error and not self._closing:
            self._on_lost(error)

    # Any thread

    def _kill_all(self, error: Exception) -> Exception:
        """Kill all ranks. Return the reason, which is the first error that was reported."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()
        for process in self._processes.values():
            process.kill()
        self._abort()
        return self._failure

    def _set_phase(self, rank: int, phase: str, fraction: float) -> None:
        with self._changed:
            self._phases[rank] = (phase, fraction)
        self._report_progress()

    def _report_progress(self) -> None:
        """Report progress: the phase of the slowest ranks, how many ranks are past it, and the average fraction."""
        with self._changed:
            places = [
                (PHASES.index(phase) if phase in PHASES else len(PHASES), f) for phase, f in self._phases.values()
            ]
        least = min(place for place, _ in places)
        if least == len(PHASES):
            return
        fractions = [fraction if place == least else 1.0 for place, fraction in places]
        ahead = sum(place > least for place, _ in places)
        self._progress(f"{PHASES[least]} ({ahead} of {self.size} ranks are done)", sum(fractions) / self.size)

    def _wait(self, there: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or there())
            if self._failure is not None:
                raise self._failure

    def _start(self, rank: int, config: EngineConfig) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-m", "engine.rank", str(theirs.fileno())]
            self._processes[rank] = subprocess.Popen(
                command, pass_fds=[theirs.fileno(), self.rendezvous.memory], stdin=subprocess.DEVNULL
            )
        self._sockets[rank] = Connection(ours.detach())
        self._sockets[rank].send_bytes(encode(Begin(_config_of(config, rank), rank, self.rendezvous)))

    def _end(self, seconds: float) -> None:
        limit = time.monotonic() + seconds
        for process in self._processes.values():
            try:
                process.wait(max(0.0, limit - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def _place(phase: str) -> int:
    return PHASES.index(phase) if phase in PHASES else len(PHASES)


def _config_of(config: EngineConfig, rank: int) -> EngineConfig:
    """Return rank 0's configuration with the CPUs of this rank and without recording."""
    own = config.parallelism.rank_cpus[rank - 1] if config.parallelism.rank_cpus else Place()
    values = {"record": None, "hardware.cpus": own.cpus, "hardware.process_cpus": own.process_cpus}
    return with_values(config, values)


def _error(rank: int, code: str, text: str) -> Exception:
    """Return the error that a rank sent. It keeps its class if a restart would fail in the same way."""
    kinds: Sequence[type[EngineError]] = (
        errors.ConfigError,
        errors.CheckpointError,
        errors.UnknownArchitecture,
        errors.OutOfMemory,
    )
    kind = next((kind for kind in kinds if kind.code == code), None)
    return kind(f"rank {rank}: {text}") if kind is not None else RankLost(f"rank {rank} failed: {text}")
