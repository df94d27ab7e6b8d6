"""Run work in a few separate processes, where an item may crash, hang or change its process permanently."""

import multiprocessing
import multiprocessing.connection
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any

Work = Callable[[Any], Any]


@dataclass(frozen=True)
class ProcessLost:
    """Result of an item whose process exited or exceeded the time limit."""

    reason: str


# Starting a process also asks whether each other process has ended. A process's exit code can be read only once, so
# processes start and their codes are read one after the other.
_processes = threading.Lock()


class _WorkerProcess:
    """One process at a time, started when it is first needed and again after a loss."""

    def __init__(self, prepare: Callable[[], Work], limit_s: float) -> None:
        self._prepare, self._limit_s = prepare, limit_s
        self._process: ForkServerProcess | None = None
        self._pipe: Connection | None = None

    def run(self, item: Any) -> Any:
        if self._process is None or self._pipe is None:
            context = multiprocessing.get_context("forkserver")
            self._pipe, end = context.Pipe()
            self._process = context.Process(target=_serve, args=(end, self._prepare), daemon=True)
            with _processes:
                self._process.start()
            end.close()
        try:
            self._pipe.send(item)
            if not self._pipe.poll(self._limit_s):
                self.close(kill=True)
                return ProcessLost(f"took longer than {self._limit_s:.0f} s")
            result = self._pipe.recv()
        except (EOFError, OSError):
            code = self.close(kill=False)
            return ProcessLost(f"exited with code {code}")
        if isinstance(result, Exception):
            raise result
        return result

    def close(self, kill: bool) -> int | None:
        if self._process is None or self._pipe is None:
            return None
        self._pipe.close()
        if kill:
            self._process.kill()
        multiprocessing.connection.wait([self._process.sentinel])
        with _processes:
            code = self._process.exitcode
        self._process = self._pipe = None
        return code


def _serve(pipe: Connection, prepare: Callable[[], Work]) -> None:
    try:
        work = prepare()
        while True:
            item = pipe.recv()
            pipe.send(work(item))
    except EOFError:
        return
    except Exception as error:
        pipe.send(error)


def run_in_processes(
    prepare: Callable[[], Work], items: Sequence[Any], processes: int, limit_s: float, modules: Sequence[str] = ()
) -> Iterator[Any]:
    """Compute `prepare()(item)` for each item in `processes` processes and yield the results in order. An item whose
    process was lost yields ProcessLost. `prepare` runs once in each process. All arguments must be picklable. Raise the
    exceptions of `prepare` and of the work.

    The first call starts a process that imports `modules`. All processes are its forks."""
    multiprocessing.set_forkserver_preload(["__main__", *modules])
    own = threading.local()
    workers: list[_WorkerProcess] = []

    def run(item: Any) -> Any:
        if not hasattr(own, "worker"):
            own.worker = _WorkerProcess(prepare, limit_s)
            workers.append(own.worker)
        return own.worker.run(item)

    with ThreadPoolExecutor(max(1, min(processes, len(items)))) as threads:
        try:
            yield from threads.map(run, items)
        finally:
            threads.shutdown(wait=True, cancel_futures=True)
            for worker in workers:
                worker.close(kill=False)
