"""The other ranks of an engine, as rank 0 has them: processes of its own, which get every plan and answer only errors.

Rank 0 starts them before it imports torch, so that all of them load at once. A rank that ends, breaks, falls silent or
goes another way ends them all: their processes are killed, and `lost` is called with the reason, in a thread of its
own, as rank 0's own may wait for a rank that is gone. Free of torch.
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

import msgspec

from engine.api import errors
from engine.api.config import EngineConfig
from engine.api.errors import EngineError
from engine.api.messages import RankMemory
from engine.core.plan import Late, Masks, StepPlan, StepResult
from engine.worker.rank_messages import (
    ALIVE_S,
    Begin,
    Broken,
    Built,
    Done,
    FromRank,
    Loading,
    Meeting,
    checksum,
    encode,
    from_rank,
    masks_message,
    step_message,
)
from engine.worker.watchdog import RankWatchdog

PHASES = ("importing", "reading", "loading", "profiling", "allocating", "warming", "capturing")
EXPLAINED_S = 3.0  # after an error of rank 0's own in which the rank that caused it may still be found
GONE_S = 0.4  # after a rank broke in which another one may be found to have ended before it
END_S = 2.0  # that a rank has to end by itself once its socket is closed

Lost = Callable[[Exception], None]


class RankLost(Exception):
    """A rank is gone or of no use any more, and so is the engine."""


class Ranks:
    """Ranks 1 … of one engine. `lost` is called at most once, after all of them were killed, and not once `close` was
    called."""

    def __init__(self, config: EngineConfig, lost: Lost = lambda error: None) -> None:
        self.size = config.tensor
        beside = Path(config.socket).parent if config.socket else None
        # Named after its engine, so that a keeper knows what a killed one left.
        self._folder = Path(tempfile.mkdtemp(prefix=f"{Path(config.socket).stem}-ranks-", dir=beside))
        self.meeting = Meeting(str(self._folder / "meeting"), os.memfd_create("ranks"))
        self._watch, self._lost = RankWatchdog(self.size), lost
        self._changed = threading.Condition()  # guards all below, and the watch
        self._progress: Callable[[str, float], None] = lambda phase, fraction: None
        self._phases: dict[int, tuple[str, float]] = dict.fromkeys(range(self.size), (PHASES[0], 0.0))
        self._built: dict[int, Built] = {}
        self._failure: Exception | None = None
        self._closing = False
        self._abandon: Callable[[], None] = lambda: None
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
        """Of ranks 1 …"""
        return tuple(process.pid for process in self._processes.values())

    @property
    def weight_bytes(self) -> int:
        """Of all of them, once they are built."""
        return sum(built.weight_bytes for built in self._built.values())

    @property
    def memory(self) -> tuple[RankMemory, ...]:
        """Of each of them, once they are built."""
        return tuple(built.memory for _, built in sorted(self._built.items()))

    def following(self, progress: Callable[[str, float], None]) -> Callable[[str, float], None]:
        """What rank 0 is to report its own progress to; `progress` gets that of all ranks together."""
        self._progress = progress
        return lambda phase, fraction: self._moved(0, phase, fraction)

    def abandoned_by(self, abandon: Callable[[], None]) -> None:
        """What lets rank 0 go where it waits for a rank that is gone, if nothing else does; at once if one is."""
        self._abandon = abandon
        with self._changed:
            gone = self._failure is not None
        if gone:
            abandon()

    def wait_imported(self) -> None:
        """Until all ranks have imported what they need. Raises what went wrong with one."""
        self._wait(lambda: all(phase != PHASES[0] for rank, (phase, _) in self._phases.items() if rank))

    def wait_built(self, blocks: int) -> None:
        """Until all ranks are warm. `blocks`: of rank 0's KV pool, which all must have."""
        self._wait(lambda: len(self._built) == self.size - 1)
        for rank, built in self._built.items():
            assert built.blocks == blocks, f"rank {rank} has {built.blocks} blocks of cache, rank 0 has {blocks}"

    def send(self, plan: StepPlan, masks: Masks | Late) -> None:
        """To all ranks; what rank 0 sends first they run first. Late masks follow. Raises what ended the ranks."""
        with self._changed:
            self._watch.sent()
        try:
            self._send(step_message(plan, masks))
        except OSError as error:
            raise self.explained(error) from error
        if isinstance(masks, Future):
            masks.add_done_callback(self._send_masks)

    def _send_masks(self, late: Late) -> None:
        with suppress(OSError):  # who listens hears that a rank is gone
            self._send(masks_message(late.result()))

    def _send(self, message: bytes) -> None:
        for connection in self._sockets.values():
            connection.send_bytes(message)

    def settled(self, result: StepResult) -> None:
        """Rank 0 has finished the next step. Raises what ended the ranks."""
        with self._changed:
            if self._failure is not None:
                raise self._failure
            wrong = self._watch.finished(0, checksum(result))
        if wrong is not None:
            raise self._give_up(RankLost(wrong))

    def explained(self, error: Exception) -> Exception:
        """What is behind an error that rank 0 met in the middle of a step, or the error itself."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None, EXPLAINED_S)
            return self._failure or error

    def close(self) -> None:
        """Ends all ranks; returns when they are gone."""
        with self._changed:
            self._closing = True
        for connection in self._sockets.values():
            with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
                end.shutdown(socket.SHUT_RDWR)  # seen at once, by the rank and by the thread that listens
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        for connection in self._sockets.values():
            connection.close()
        os.close(self.meeting.memory)
        self._end(END_S)

    # The thread that listens

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
                # Where all processes were suspended together, no rank was silent for that long.
                silent = self._watch.passed(min(now - last, 2 * ALIVE_S))
            last = now
            if silent is not None:
                self._report(RankLost(silent))
                return

    def _receive(self, rank: int, connection: Connection) -> Exception | None:
        """What is wrong with a rank that sent something, if anything is."""
        try:
            message: FromRank = from_rank(connection.recv_bytes())
        except (EOFError, OSError):
            return RankLost(f"rank {rank} {self._how_it_ended(rank)}")
        with self._changed:
            self._watch.heard(rank)
            match message:
                case Loading(phase, fraction):
                    self._phases[rank] = (phase, fraction)
                case Built():
                    self._built[rank] = message
                    self._phases[rank] = ("", 1.0)
                    self._watch.serving(rank)
                case Done(drawn):
                    wrong = self._watch.finished(rank, drawn)
                    return None if wrong is None else RankLost(wrong)
            self._changed.notify_all()
        if isinstance(message, Broken):
            # Where one rank ends, those that waited for it break: it is the one to name.
            gone = None if message.code else self._gone(rank)
            return RankLost(gone) if gone is not None else _error(rank, message.code, message.message)
        if isinstance(message, Loading | Built):
            self._tell()
        return None

    def _gone(self, but: int) -> str | None:
        """Another rank whose process has ended, or ends soon."""
        limit = time.monotonic() + GONE_S
        while time.monotonic() < limit:
            for rank, process in self._processes.items():
                if rank != but and process.poll() is not None:
                    return f"rank {rank} {self._how_it_ended(rank)}"
            time.sleep(GONE_S / 20)
        return None

    def _how_it_ended(self, rank: int) -> str:
        process = self._processes[rank]
        try:
            code = process.wait(END_S)
        except subprocess.TimeoutExpired:
            return f"(process {process.pid}) closed its socket"
        if code >= 0:
            return f"(process {process.pid}) ended with code {code}"
        name = signal.Signals(-code).name
        memory = "; the system may have been out of memory" if -code == signal.SIGKILL else ""
        return f"(process {process.pid}) was killed by {name}{memory}"

    def _report(self, error: Exception) -> None:
        if self._give_up(error) is error and not self._closing:
            self._lost(error)

    # Any thread

    def _give_up(self, error: Exception) -> Exception:
        """Kills all ranks; the reason that counts, which is the first one."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()
        for process in self._processes.values():
            process.kill()
        self._abandon()
        return self._failure

    def _moved(self, rank: int, phase: str, fraction: float) -> None:
        with self._changed:
            self._phases[rank] = (phase, fraction)
        self._tell()

    def _tell(self) -> None:
        """The phase of those that are behind, how many have left it, and how far all of them are in it."""
        with self._changed:
            places = [
                (PHASES.index(phase) if phase in PHASES else len(PHASES), f) for phase, f in self._phases.values()
            ]
        least = min(place for place, _ in places)
        if least == len(PHASES):
            return
        fractions = [fraction if place == least else 1.0 for place, fraction in places]
        ahead = sum(place > least for place, _ in places)
        self._progress(f"{PHASES[least]} ({ahead} of {self.size} ranks are through)", sum(fractions) / self.size)

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
                command, pass_fds=[theirs.fileno(), self.meeting.memory], stdin=subprocess.DEVNULL
            )
        self._sockets[rank] = Connection(ours.detach())
        self._sockets[rank].send_bytes(encode(Begin(_config_of(config, rank), rank, self.meeting)))

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
    """Rank 0's, with the CPUs of this rank; what only the engine's own process does is left out."""
    own = config.rank_cpus[rank - 1] if config.rank_cpus else None
    return msgspec.structs.replace(
        config,
        record=None,
        cpus=() if own is None else own.cpus,
        process_cpus=() if own is None else own.process_cpus,
    )


def _error(rank: int, code: str, text: str) -> Exception:
    """The error that a rank sent, of the class that it was, if a restart fails the same way."""
    kinds: Sequence[type[EngineError]] = (
        errors.ConfigError,
        errors.CheckpointError,
        errors.UnknownArchitecture,
        errors.OutOfMemory,
    )
    kind = next((kind for kind in kinds if kind.code == code), None)
    return kind(f"rank {rank}: {text}") if kind is not None else RankLost(f"rank {rank} failed: {text}")
