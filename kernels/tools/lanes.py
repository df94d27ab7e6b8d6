"""Run work in a few separate processes, where a piece may crash, hang or change its process permanently."""

import multiprocessing
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

Work = Callable[[Any], Any]


@dataclass(frozen=True)
class Lost:
    """Result of a piece whose process exited or exceeded the time limit."""

    reason: str


class _Lane:
    """One process at a time, started when it is first needed and again after a loss."""

    def __init__(self, begin: Callable[[], Work], limit_s: float) -> None:
        self._begin, self._limit_s = begin, limit_s
        self._process: SpawnProcess | None = None
        self._pipe: Connection | None = None

    def run(self, piece: Any) -> Any:
        if self._process is None or self._pipe is None:
            context = multiprocessing.get_context("spawn")
            self._pipe, end = context.Pipe()
            self._process = context.Process(target=_serve, args=(end, self._begin), daemon=True)
            self._process.start()
            end.close()
        try:
            self._pipe.send(piece)
            if not self._pipe.poll(self._limit_s):
                self.close(kill=True)
                return Lost(f"took longer than {self._limit_s:.0f} s")
            result = self._pipe.recv()
        except (EOFError, OSError):
            code = self.close(kill=False)
            return Lost(f"ended its process with code {code}")
        if isinstance(result, Exception):
            raise result
        return result

    def close(self, kill: bool) -> int | None:
        if self._process is None or self._pipe is None:
            return None
        self._pipe.close()
        if kill:
            self._process.kill()
        self._process.join()
        code = self._process.exitcode
        self._process = self._pipe = None
        return code


def _serve(pipe: Connection, begin: Callable[[], Work]) -> None:
    try:
        work = begin()
        while True:
            piece = pipe.recv()
            pipe.send(work(piece))
    except EOFError:
        return
    except Exception as error:
        pipe.send(error)


def in_lanes(begin: Callable[[], Work], pieces: Sequence[Any], lanes: int, limit_s: float) -> Iterator[Any]:
    """Compute `begin()(piece)` for each piece in `lanes` processes and yield the results in order. A piece whose
    process was lost yields Lost. `begin` runs once in each process. All arguments must be picklable. Raise the
    exceptions of `begin` and of the work."""
    own = threading.local()
    made: list[_Lane] = []

    def run(piece: Any) -> Any:
        if not hasattr(own, "lane"):
            own.lane = _Lane(begin, limit_s)
            made.append(own.lane)
        return own.lane.run(piece)

    with ThreadPoolExecutor(max(1, min(lanes, len(pieces)))) as threads:
        try:
            yield from threads.map(run, pieces)
        finally:
            threads.shutdown(wait=True, cancel_futures=True)
            for lane in made:
                lane.close(kill=False)
