"""The engine process: `python -m engine CONFIG.json`. Binds its socket at once and reports its start to the gateway.

The main thread only waits for signals, so that SIGTERM is answered within a second while the device is busy. All other
work runs in the threads of the engine, the worker and the connection. Exit codes: 0 after SIGTERM or a drain,
`EXIT_PERMANENT` for an error that a restart does not fix, `EXIT_CRASH` otherwise.
"""

import contextlib
import ctypes
import gc
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from engine.api.config import EngineConfig, read_config
from engine.api.errors import EXIT_CRASH, EXIT_DRIFT, EXIT_PERMANENT, CheckpointError, Drift, EngineError, OutOfMemory
from engine.api.heartbeat import HeartbeatWriter, State
from engine.api.messages import (
    Failed,
    FromEngine,
    Loading,
    PhaseMemory,
    RankMemory,
    Ready,
    SelfTestResult,
    Submit,
    ToEngine,
)
from engine.api.server import Connection, Server
from engine.binding import bind
from engine.core.golden import SelfTestRunner
from engine.core.grammars import Compiler
from engine.core.loop import Loop, Worker, build_loop, build_self_test
from engine.core.profiler import OperationTrace
from engine.imports import collector_off, leave_out_unused
from engine.models.changes import WeightFiles
from engine.worker.ranks import RankLost, Ranks

Progress = Callable[[str, float], None]
OnPhaseMemory = Callable[[str, PhaseMemory], None]
OnRankLost = Callable[[Exception], None]  # reports the failure of another rank; called from any thread
BuildWorker = Callable[[EngineConfig, Progress, OnPhaseMemory, OnRankLost], Worker]

PROGRESS_S = 0.1  # minimum interval between Loading messages of one phase
FILES_S = 2.0  # interval at which weight files are checked for changes on disk
STOP_S = 0.5  # time limit of the step that is running when SIGTERM arrives
TOLERANCE = 0.02  # relative difference between planned and real memory above which the log warns
FLUSH_S = 1.0  # time limit for a gateway to connect and receive the reason of a failed start
PR_SET_PDEATHSIG = 1
TESTING = "testing"  # the phase of the golden prompts


class Engine:
    """One engine process. The server exists from the beginning, the loop once the worker has been built."""

    def __init__(self, config: EngineConfig, build_worker: BuildWorker) -> None:
        self._config, self._build_worker = config, build_worker
        self._lock, self._failure_lock = threading.Lock(), threading.Lock()
        self._loading = Loading("starting", 0.0)
        self._loading_at = 0.0
        self._loop: Loop | None = None
        self._ready: Ready | None = None  # set together with the loop
        self._connection: Connection | None = None  # the newest one; receives messages while loading
        self._listener: Connection | None = None  # the one that the loop serves; used only in the loop's thread
        self._connected = threading.Event()
        self._heartbeat = HeartbeatWriter(config.lifecycle.heartbeat)
        self._awaiting_exit, self._requesting_exit = socket.socketpair()  # a byte in it ends `serve`
        self._code = 0
        self._exiting = False
        self._server = Server(config.socket, opened=self._opened, received=self._received, closed=self._closed)

    def serve(self) -> int:
        """Run until the engine ends or gets SIGTERM or SIGINT. Return the exit code."""
        # The kernel may deliver a signal to any thread; then Python runs its handler only when the main thread wakes.
        # The byte that Python writes at once, in the thread that got the signal, wakes it.
        self._requesting_exit.setblocking(False)
        signal.set_wakeup_fd(self._requesting_exit.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        self._server.start()
        thread = threading.Thread(target=self._run, name="engine", daemon=True)
        thread.start()
        while self._awaiting_exit.recv(1)[0] not in (0, signal.SIGTERM, signal.SIGINT):
            pass  # the number of another signal, for which a library has installed a handler
        self._server.close()
        if self._loop is not None:
            self._loop.stop()
            thread.join(STOP_S)
        return self._code

    def _request_exit(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full of earlier requests
            self._requesting_exit.send(b"\0")

    # In the engine's thread

    def _run(self) -> None:
        try:
            memory: dict[str, PhaseMemory] = {}
            files = WeightFiles(Path(self._config.model.path))
            worker = self._build_worker(self._config, self._progress, memory.__setitem__, self._on_rank_lost)
            _check_pool(self._config, worker)
            open_compiler = partial(_open_compiler, self._config, worker)
            self_test = build_self_test(self._config, worker)
            result = self._test(self_test, worker)
            trace = _trace(self._config, worker)
            loop = build_loop(self._config, worker, self._send, open_compiler, self._heartbeat.write, self_test, trace)
            ready = _ready_message(self._config, worker, memory, result)
            if memory:
                print(f"slipway engine: {memory_line(self._config, memory)}", file=sys.stderr, flush=True)
            for warning in differences(self._config, ready):
                print(f"slipway engine: warning: {warning}", file=sys.stderr, flush=True)
            with self._lock:
                self._loop = loop
                if self._connection is not None:
                    loop.call(partial(self._attach, self._connection, ready))
                self._ready = ready
            gc.collect()
            pause_s = min(
                filter(None, (self._config.lifecycle.probe_s, self._config.lifecycle.self_test.every)), default=0.0
            )
            if pause_s:
                threading.Thread(target=self._probe, args=(loop, pause_s), name="probe", daemon=True).start()
            watching = partial(self._watch_files, files, any(one.mapped for one in worker.memory))
            threading.Thread(target=watching, name="files", daemon=True).start()
            gc.freeze()  # modules and the model are never freed, so the collector need not traverse them
            loop.run()
            if self._listener is not None:
                self._listener.flush(FLUSH_S)
            worker.close()
        except Exception as error:  # top level: report to gateway and log, then end the process
            self._fail(error)
        self._request_exit()

    def _fail(self, error: Exception) -> None:
        match error:
            case Drift():
                self._exit_with(EXIT_DRIFT, error.code, str(error))
            case EngineError():
                # An error after the start may depend on the requests, so a restart can help.
                self._exit_with(EXIT_PERMANENT if self._ready is None else EXIT_CRASH, error.code, str(error))
            case RankLost():
                self._exit_with(EXIT_CRASH, "rank", str(error))
            case _:
                traceback.print_exception(error)
                self._exit_with(EXIT_CRASH, "crash", f"{type(error).__name__}: {error}")

    def _on_rank_lost(self, error: Exception) -> None:
        """End the process, whatever the engine's thread is waiting for."""
        self._fail(error)
        self._request_exit()

    def _probe(self, loop: Loop, pause_s: float) -> None:
        """Periodically request a health check step while the engine is idle; its heartbeat shows the result."""
        while True:
            time.sleep(pause_s)
            if self._heartbeat.state is State.IDLE:
                loop.probe()

    def _watch_files(self, files: WeightFiles, mapped: bool) -> None:
        """End the engine when mapped weight files are overwritten, because its replies would change."""
        while True:
            for change in files.changes():
                if change.overwritten and mapped:
                    message = f"{change.file} {change.what} while the engine was using it (mapped); restart the engine"
                    self._exit_with(EXIT_PERMANENT, CheckpointError.code, message)
                    self._request_exit()
                    return
                after = "the next start of an engine reads the new content"
                print(f"slipway engine: warning: {change.file} {change.what}; {after}", file=sys.stderr, flush=True)
            time.sleep(FILES_S)

    def _test(self, self_test: SelfTestRunner | None, worker: Worker) -> SelfTestResult | None:
        """Run the golden prompts before the engine serves. Raises SelfTestFailed."""
        if self_test is None or not self._config.lifecycle.self_test.at_start:
            return None
        result = self_test.start(
            lambda plan: worker.start(plan, {}).result(),
            time.monotonic,
            lambda fraction: self._progress(TESTING, fraction),
        )
        worker.seconds[TESTING] = result.seconds
        if result.differs:
            print(f"slipway engine: warning: self-test: {result.differs}", file=sys.stderr, flush=True)
        if result.skipped:
            print(f"slipway engine: {skipped_line(self._config, result)}", file=sys.stderr, flush=True)
        return result

    def _progress(self, phase: str, fraction: float) -> None:
        self._heartbeat.write(State.TESTING if phase == TESTING else State.LOADING)
        now = time.monotonic()
        with self._lock:
            if phase == self._loading.phase and fraction < 1 and now - self._loading_at < PROGRESS_S:
                return
            self._loading, self._loading_at = Loading(phase, fraction), now
            if self._connection is not None:
                self._connection.send([self._loading])

    def _exit_with(self, code: int, word: str, message: str) -> None:
        with self._failure_lock:  # if two threads report one cause, the second waits until the first has sent it
            if self._exiting:
                return
            self._exiting, self._code = True, code
            print(f"slipway engine: {word}: {message}", file=sys.stderr, flush=True)
            self._connected.wait(FLUSH_S)
            with self._lock:
                connection = self._connection
            if connection is not None:
                connection.send([Failed(None, word, message)])
                connection.flush(FLUSH_S)

    def _attach(self, connection: Connection, ready: Ready) -> None:
        """Serve this connection from now on. Requests of the previous connection are aborted."""
        assert self._loop is not None, "only the loop calls this"
        self._loop.end_all()
        self._listener = connection
        connection.send([ready])

    def _detach(self, connection: Connection) -> None:
        if self._listener is connection and self._loop is not None:
            self._loop.end_all()
            self._listener = None

    def _send(self, messages: list[FromEngine]) -> None:
        if self._listener is not None:
            self._listener.send(messages)

    # In the connection's threads

    def _opened(self, connection: Connection) -> None:
        with self._lock:
            self._connection = connection
            if self._loop is None:
                connection.send([self._loading])
            elif self._ready is not None:
                self._loop.call(partial(self._attach, connection, self._ready))
        self._connected.set()

    def _received(self, connection: Connection, messages: list[ToEngine]) -> None:
        with self._lock:
            loop = self._loop
        if loop is not None:
            loop.post(messages, lambda: self._listener is connection)
        else:
            refused = [Failed(m.id, "engine_gone", "the engine is loading") for m in messages if isinstance(m, Submit)]
            if refused:
                connection.send([*refused])

    def _closed(self, connection: Connection) -> None:
        with self._lock:
            if self._connection is connection:
                self._connection = None
                self._connected.clear()
            if self._loop is not None:
                self._loop.call(partial(self._detach, connection))


def serve(config: EngineConfig, build_worker: BuildWorker) -> int:
    """Run an engine process in the main thread. Return the exit code. Expected errors are one line on stderr."""
    try:
        return Engine(config, build_worker).serve()
    except EngineError as error:
        print(f"slipway engine: {error.code}: {error}", file=sys.stderr, flush=True)
        return EXIT_PERMANENT


def _ready_message(
    config: EngineConfig, worker: Worker, memory: dict[str, PhaseMemory], result: SelfTestResult | None
) -> Ready:
    blocks = worker.blocks - 1
    return Ready(
        max_context=config.model.max_context,
        kv_blocks=blocks,
        block_tokens=worker.layout.block_tokens,
        kv_tokens=worker.layout.tokens_in(blocks, config.scheduling.max_step_tokens) if worker.layout.groups else 0,
        weight_bytes=worker.weight_bytes,
        kv_bytes=worker.kv_bytes,
        seconds=worker.seconds,
        pid=os.getpid(),
        memory=tuple(_rank_memory(config, rank, one, memory) for rank, one in enumerate(worker.memory)),
        self_test=result,
    )


def skipped_line(config: EngineConfig, result: SelfTestResult) -> str:
    """Return the log line about golden prompts for which there was no time."""
    of = result.prompts + result.skipped
    return (
        f"self-test: ran {result.prompts} of {of} golden prompts in {result.seconds:.1f} s; lifecycle.self_test.budget "
        f"is {config.lifecycle.self_test.budget:g} s, so the others run when the engine is idle"
    )


def _rank_memory(config: EngineConfig, rank: int, memory: RankMemory, own: dict[str, PhaseMemory]) -> RankMemory:
    """Return the rank's memory with its plan. own: measured memory by phase of this process, which is rank 0."""
    planned = config.memory.ranks[rank] if config.memory.ranks else {}
    return msgspec.structs.replace(memory, planned=planned, taken=memory.taken if rank else own)


def memory_line(config: EngineConfig, memory: dict[str, PhaseMemory]) -> str:
    """Return the log line that compares the memory of the start with the plan, by part."""
    kept = {phase: taken.kept for phase, taken in memory.items()}
    weights, cache = kept["reading"] + kept["loading"], kept["allocating"]
    process = kept["starting"] + kept["warming"]
    of = " of rank 0" if config.parallelism.tensor > 1 else ""
    once_written = " (its pages count once they are written)" if config.hardware.device == "cpu" else ""
    return (
        f"memory{of} on {memory['loading'].device}: weights {_mib(weights, config.memory.weights)}, "
        f"peak while loading {_mib(memory['loading'].peak)}; "
        f"KV cache {_mib(cache, config.memory.kv_cache)}{once_written}; "
        f"process and first steps {_mib(process, config.memory.workspace)}"
    )


def differences(config: EngineConfig, ready: Ready) -> list[str]:
    """Return warnings about parts that take more memory than planned, or a cache that is smaller, beyond TOLERANCE.

    A measured pool may be smaller. Weights that take less are fine: the plan assumes that the groups of an act-order
    matrix are scattered, and some are not."""
    found = []
    for rank, memory in enumerate(ready.memory):
        of = f" of rank {rank}" if config.parallelism.tensor > 1 else ""
        for part, planned in memory.planned.items():
            if part == "kv" and config.memory.kv_cache_measured:
                continue
            real = memory.held.get(part, 0)
            differs = abs(real - planned) if part == "kv" else real - planned
            if differs > TOLERANCE * planned:
                more = f"{(real / planned - 1) * 100:+.1f} %" if planned else "not planned"
                what = f"memory of {part}{of}: {real:,} B used, {planned:,} B planned ({more})"
                found.append(f"{what}; please report it")
    return found


def _mib(count: int, planned: int = 0) -> str:
    return f"{count / 2**20:,.1f} MiB" + (f" of {planned / 2**20:,.1f} planned" if planned else "")


def _check_pool(config: EngineConfig, worker: Worker) -> None:
    """Raise OutOfMemory if the pool is too small for one sequence of max_context tokens."""
    layout, step_tokens = worker.layout, config.scheduling.max_step_tokens
    needed = layout.blocks_for(config.model.max_context, step_tokens) + 1
    if worker.blocks < needed:
        fits = layout.tokens_in(worker.blocks - 1, step_tokens)
        raise OutOfMemory(
            f"kv_bytes={config.memory.kv_cache}: the cache has {worker.blocks} blocks, one sequence of "
            f"max_context={config.model.max_context} tokens needs {needed} ({needed * layout.block_bytes} bytes); "
            f"raise hardware.kv_cache_memory, or lower model.max_context to {fits}"
        )


def _trace(config: EngineConfig, worker: Worker) -> OperationTrace | None:
    """Return the trace of the worker's operations, or None without a profiler."""
    if not config.observability.profiler_folder:
        return None
    from engine.worker.profiler import TorchTrace  # needs torch.profiler, which takes 0.1 s

    return TorchTrace(worker.call)


def _open_compiler(config: EngineConfig, worker: Worker, compiled: Callable[[float], None]) -> Compiler:
    from engine.structured.grammar import compiler_for  # imported for the first grammar; most engines never get one

    return compiler_for(config.model.path, worker.model.embed.vocab, compiled)


def build(config: EngineConfig, progress: Progress, on_memory: OnPhaseMemory, on_rank_lost: OnRankLost) -> Worker:
    """Build the configured worker and start its other ranks. Raises the errors of `engine.worker.build`."""
    progress("importing", 0.0)  # importing torch takes a second or more, while the socket already answers
    ranks = Ranks(config, on_rank_lost) if config.parallelism.tensor > 1 else None
    leave_out_unused(config)
    with collector_off():
        from engine.worker.build import build_worker

    return build_worker(config, progress, on_memory, ranks)


def _exit_with_parent() -> None:
    """Request SIGTERM for the death of the parent: a supervisor that was killed cannot stop its programs."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # the parent ended before prctl took effect
        sys.exit(0)


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m engine CONFIG.json", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    _exit_with_parent()
    try:
        config = read_config(Path(arguments[0]))
        bind(config)
    except EngineError as error:
        print(f"slipway engine: {error.code}: {error}", file=sys.stderr)
        return EXIT_PERMANENT
    return serve(config, build)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(
        code
    )  # without interpreter shutdown, which would wait for a device thread that is still in a step, or crash on it
