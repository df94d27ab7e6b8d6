"""A rank other than rank 0: `python -m engine.rank FD`, started by engine.worker.ranks.

It loads its share of the model, runs every plan that it receives over its socket, and exits when the socket is closed,
which means that the engine has ended. The main thread only reads, so that it notices this while the device is busy.
"""

import argparse
import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Protocol

from engine.api.config import AdapterConfig
from engine.api.errors import EXIT_CRASH, EXIT_PERMANENT, EngineError
from engine.api.messages import PhaseMemory, RankMemory
from engine.binding import bind
from engine.core.plan import Masks, PendingMasks, StepPlan, StepResult
from engine.imports import collector_off, leave_out_unused
from engine.worker.rank_messages import (
    ALIVE_S,
    Alive,
    Begin,
    Broken,
    Built,
    Done,
    FromRank,
    HandleAdapter,
    LateMasks,
    Loading,
    RegisterAdapter,
    Step,
    checksum,
    encode,
    to_rank,
    unpacked,
)


class Handle(Protocol):
    def result(self) -> StepResult: ...


class AdapterStore(Protocol):
    """See engine.worker.adapters, which imports torch."""

    def read_and_register(self, version: int, adapter: AdapterConfig) -> None: ...
    def prepare(self, version: int) -> None: ...
    def release(self, version: int) -> None: ...
    def forget(self, version: int) -> None: ...


class Rank:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._steps: SimpleQueue[tuple[StepPlan, Masks | PendingMasks]] = SimpleQueue()
        self._running: SimpleQueue[Handle] = SimpleQueue()
        self._store: AdapterStore | None = None  # set with the worker

    def serve(self) -> None:
        """Run forever: the process exits when the engine ends or when an error occurs."""
        begin = to_rank(self._read())
        assert isinstance(begin, Begin), "the first message must be Begin"
        for name, work in (
            ("alive", self._send_alive),
            ("rank", lambda: self._run(begin)),
            ("results", self._send_results),
        ):
            threading.Thread(target=self._guarded, args=(work,), name=name, daemon=True).start()
        waiting: deque[PendingMasks] = deque()
        while True:
            match to_rank(self._read()):
                case Step(plan, None):
                    waiting.append(PendingMasks())
                    self._steps.put((plan, waiting[-1]))
                case Step(plan, masks) if masks is not None:
                    self._steps.put((plan, unpacked(masks)))
                case LateMasks(masks):
                    waiting.popleft().set_result(unpacked(masks))
                case RegisterAdapter(version, adapter):
                    self._adapters().read_and_register(version, adapter)
                case HandleAdapter(verb, version):
                    getattr(self._adapters(), verb)(version)
                case Begin():
                    raise AssertionError("Begin is sent only once")

    def _adapters(self) -> AdapterStore:
        assert self._store is not None, "adapters are sent only to ranks with adapter slots"
        return self._store

    def _read(self) -> bytes:
        try:
            return self._connection.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)

    def _send(self, message: FromRank) -> None:
        try:
            with self._sending:
                self._connection.send_bytes(encode(message))
        except OSError:
            os._exit(0)

    def _send_alive(self) -> None:
        while True:
            self._send(Alive())
            time.sleep(ALIVE_S)

    def _run(self, begin: Begin) -> None:
        bind(begin.config)
        self._send(Loading("importing", 0.0))
        leave_out_unused(begin.config)
        with collector_off():
            from engine.worker.build import build_rank  # torch takes a second or more

        def progress(phase: str, fraction: float) -> None:
            self._send(Loading(phase, fraction))

        taken: dict[str, PhaseMemory] = {}
        worker = build_rank(begin.config, begin.rank, begin.rendezvous, progress, taken.__setitem__)
        self._store = worker.adapters
        gc.collect()
        gc.freeze()
        self._send(
            Built(worker.weight_bytes, worker.blocks, RankMemory(worker.memory_usage, worker.mapped, taken=taken))
        )
        while True:
            plan, masks = self._steps.get()
            self._running.put(worker.start(plan, masks))

    def _send_results(self) -> None:
        while True:
            self._send(Done(checksum(self._running.get().result())))

    def _guarded(self, work: "Work") -> None:
        """Run `work`. Report any error to the engine and end the process."""
        try:
            work()
        except EngineError as error:
            self._end(EXIT_PERMANENT, error.code, str(error))
        except Exception as error:
            traceback.print_exc()
            self._end(EXIT_CRASH, "", f"{type(error).__name__}: {error}")

    def _end(self, code: int, word: str, message: str) -> None:
        self._send(Broken(word, message))
        sys.stderr.flush()
        os._exit(code)


class Work(Protocol):
    def __call__(self) -> None: ...


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m engine.rank", description="A rank of an engine.")
    parser.add_argument("fd", type=int, help="file descriptor of the socket to the engine")
    descriptor = parser.parse_args(arguments).fd
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # sent to the entire process group; the engine stops its ranks itself
    Rank(Connection(descriptor)).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
