"""Compilation of request grammars in separate processes, before any engine receives them.

A compiler process may use `limits.grammar_time` and `limits.grammar_memory`, and is killed beyond that, so that a
harmful grammar cannot affect the gateway or an engine. Results are cached, so a known grammar costs one look-up.
Requests with the same new grammar share one compilation, which ends when the last of them is cancelled.
"""

import asyncio
import json
import logging
import os
import select
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from time import monotonic
from typing import Final

import msgspec

from engine.api.errors import RequestError
from engine.api.messages import Grammar

log = logging.getLogger(__name__)

MAX_KEPT: Final = 1024  # cached results, the most recently used ones
MAX_KEPT_BYTES: Final = 16 << 20  # of the grammars with a cached result
PROCESSES: Final = 2  # compiler processes that run at the same time
_START_S: Final = 60.0  # time for a process to start on a busy machine


@dataclass(frozen=True)
class Bounds:
    """Limits on a grammar: size of its source in bytes, time and memory to compile it."""

    size: int
    time_s: float
    memory: int


_Key = tuple[Grammar, Bounds]


class _Process:
    """One compiler process. Only one thread may call `ask`; any thread may call `kill`."""

    def __init__(self, bounds: Bounds) -> None:
        command = (sys.executable, "-m", "engine.structured.check", str(bounds.memory))
        self.bounds = bounds
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        try:
            self.ask(Grammar("regex", "a"), _START_S)
        except BaseException:
            self.bury()
            raise

    def ask(self, grammar: Grammar, time_s: float) -> str:
        """Return the compiler's result for a grammar.

        Raise TimeoutError, or ChildProcessError with the stderr of a process that exited.
        """
        child = self._child
        assert child.stdin is not None and child.stdout is not None, "both are pipes"
        try:
            child.stdin.write(msgspec.json.encode(grammar) + b"\n")
            child.stdin.flush()
        except BrokenPipeError:
            raise ChildProcessError(self._last_words()) from None
        line, until = b"", monotonic() + time_s
        ready = select.poll()
        ready.register(child.stdout, select.POLLIN)
        while not line.endswith(b"\n"):
            left = until - monotonic()  # a result that arrives after the time limit is discarded
            if left <= 0 or not ready.poll(left * 1000):
                raise TimeoutError
            piece = os.read(child.stdout.fileno(), 1 << 16)
            if not piece:
                raise ChildProcessError(self._last_words())
            line += piece
        return str(json.loads(line)["fault"])

    def kill(self) -> None:
        self._child.kill()

    def bury(self) -> None:
        """Kill the process and close its pipes."""
        self._child.kill()
        if self._child.stdout is not None and not self._child.stdout.closed:
            self._child.communicate()

    def _last_words(self) -> str:
        _, said = self._child.communicate()
        text = said.decode(errors="replace").strip()
        log.warning("a grammar compiler process exited with status %d: %s", self._child.returncode, text[-300:])
        return text


@dataclass
class _Check:
    """A compilation that requests wait for."""

    future: Future[str] = field(default_factory=Future)
    waiting: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    process: _Process | None = None
    left: bool = False  # no request waits for it any longer

    def leave(self) -> None:
        with self.lock:
            self.left = True
            if self.process is not None:
                self.process.kill()


class Grammars:
    """Compiles and caches grammars.

    Calls `checked` with each outcome ("kept", "valid", "invalid", "limit") and its seconds.
    """

    def __init__(self, checked: Callable[[str, float], None]) -> None:
        self._checked = checked
        self._kept: OrderedDict[_Key, str] = OrderedDict()
        self._kept_bytes = 0
        self._running: dict[_Key, _Check] = {}
        self._pool = ThreadPoolExecutor(PROCESSES, "grammars")
        self._idle: list[_Process] = []  # threads of the pool append and pop it, each in one atomic operation

    async def check(self, grammar: Grammar, bounds: Bounds, param: str) -> None:
        """Raise RequestError for a grammar that cannot be served.

        The error names the request's field and, for a limit, the manifest key.
        """
        began, key = monotonic(), (grammar, bounds)
        size = len(grammar.text.encode("utf-8", "surrogatepass"))
        if size > bounds.size:
            self._checked("limit", 0.0)
            raise RequestError(
                f"{param}: the grammar has {size} bytes; the server's limits.grammar_size allows {bounds.size}.", param
            )
        fault = self._kept.get(key)
        if fault is not None:
            self._kept.move_to_end(key)
            self._checked("kept", 0.0)
        else:
            fault = await self._shared(key)
            self._keep(key, fault)
            outcome = "limit" if "limits." in fault else "invalid" if fault else "valid"
            self._checked(outcome, monotonic() - began)
        if fault:
            raise RequestError(f"{param}: {fault}", param)

    @property
    def running(self) -> int:
        """Number of compilations that requests wait for."""
        return len(self._running)

    def close(self) -> None:
        """End all compiler processes."""
        for check in self._running.values():
            check.leave()
        self._pool.shutdown(cancel_futures=True)
        for process in self._idle:
            process.bury()
        self._idle.clear()

    async def _shared(self, key: _Key) -> str:
        """Share one compilation among all requests that wait for it. It is cancelled when the last of them leaves."""
        check = self._running.get(key)
        if check is None:
            check = self._running[key] = _Check()
            check.future = self._pool.submit(self._compile, check, *key)
        check.waiting += 1
        try:
            return await asyncio.shield(asyncio.wrap_future(check.future))
        finally:
            check.waiting -= 1
            if not check.waiting:
                del self._running[key]
                if not check.future.done():
                    check.leave()

    def _compile(self, check: _Check, grammar: Grammar, bounds: Bounds) -> str:
        """Return a compiler process's result and kill the process if it exceeds the time limit.

        Runs in the thread pool.
        """
        if check.left:
            return ""
        try:
            process = self._process(bounds)
        except ChildProcessError:  # the process cannot even start in so little memory
            return _too_large(bounds)
        with check.lock:
            check.process = None if check.left else process
        alive = False
        try:
            fault = process.ask(grammar, bounds.time_s) if check.process else ""
            alive = True
        except TimeoutError:
            fault = f"compiling the grammar took more than the server's limits.grammar_time of {bounds.time_s:g} s."
        except ChildProcessError as error:
            fault = _cause(str(error), bounds)
        with check.lock:
            check.process = None
        if alive and not check.left:
            self._idle.append(process)
        else:
            process.bury()
        return fault

    def _process(self, bounds: Bounds) -> _Process:
        """Return an idle process, or a new one that has started."""
        while self._idle:
            process = self._idle.pop()
            if process.bounds == bounds:
                return process
            process.bury()
        return _Process(bounds)

    def _keep(self, key: _Key, fault: str) -> None:
        if key in self._kept:
            return
        self._kept[key] = fault
        self._kept_bytes += len(key[0].text)
        while len(self._kept) > MAX_KEPT or self._kept_bytes > MAX_KEPT_BYTES:
            (grammar, _), _ = self._kept.popitem(last=False)
            self._kept_bytes -= len(grammar.text)


def _cause(said: str, bounds: Bounds) -> str:
    """Return an error message for the client that explains why the compiler process exited."""
    if "memory allocation" in said or "MemoryError" in said:
        return _too_large(bounds)
    return "the grammar is nested too deeply for the grammar compiler. Simplify it."


def _too_large(bounds: Bounds) -> str:
    return f"compiling the grammar took more than the server's limits.grammar_memory of {bounds.memory} bytes."
