"""Grammars of requests, compiled once in processes of their own before any engine hears of them.

Such a process may take `limits.grammar_time` and `limits.grammar_memory` and is killed beyond: whatever a grammar does
to its compiler, gateway and engines go on. Verdicts are kept, so a language that comes again costs a look-up; requests
with the same new language wait for one compilation, which ends when the last of them has left.
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

MAX_KEPT: Final = 1024  # verdicts, the most recently used ones
MAX_KEPT_BYTES: Final = 16 << 20  # of the grammars that they are about
PROCESSES: Final = 2  # that compile at a time
_START_S: Final = 60.0  # for a process to begin, on a machine that does much else


@dataclass(frozen=True)
class Bounds:
    """What a request's grammar may cost: bytes of its source, seconds and bytes to compile it."""

    size: int
    time_s: float
    memory: int


_Key = tuple[Grammar, Bounds]


class _Process:
    """A compiler beside the gateway. `ask` is for one thread, `kill` for any."""

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
        """The verdict on a grammar. Raises TimeoutError, or ChildProcessError with what it said when it died."""
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
            left = until - monotonic()  # a verdict that is there when the time is over has come too late
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
        """Ends it and lets go of its pipes."""
        self._child.kill()
        if self._child.stdout is not None and not self._child.stdout.closed:
            self._child.communicate()

    def _last_words(self) -> str:
        _, said = self._child.communicate()
        text = said.decode(errors="replace").strip()
        log.warning("a process that compiles grammars ended with %d: %s", self._child.returncode, text[-300:])
        return text


@dataclass
class _Check:
    """A compilation that requests wait for. `left`: none does any more."""

    future: Future[str] = field(default_factory=Future)
    waiting: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    process: _Process | None = None
    left: bool = False

    def leave(self) -> None:
        with self.lock:
            self.left = True
            if self.process is not None:
                self.process.kill()


class Grammars:
    """`checked` hears how each look ended ("kept", "valid", "invalid", "limit") and its seconds."""

    def __init__(self, checked: Callable[[str, float], None]) -> None:
        self._checked = checked
        self._kept: OrderedDict[_Key, str] = OrderedDict()
        self._kept_bytes = 0
        self._running: dict[_Key, _Check] = {}
        self._pool = ThreadPoolExecutor(PROCESSES, "grammars")
        self._idle: list[_Process] = []  # appended and popped by the pool's threads, each in one operation

    async def check(self, grammar: Grammar, bounds: Bounds, param: str) -> None:
        """Raises RequestError for a grammar that cannot be served, naming the request's field and, if it is a limit,
        the manifest's key."""
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
        """Compilations that somebody waits for."""
        return len(self._running)

    def close(self) -> None:
        """Ends all processes."""
        for check in self._running.values():
            check.leave()
        self._pool.shutdown(cancel_futures=True)
        for process in self._idle:
            process.bury()
        self._idle.clear()

    async def _shared(self, key: _Key) -> str:
        """One compilation for all who wait for it. It ends when the last of them leaves."""
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
        """In a thread of the pool: the verdict of a process, which is killed where it gives none in time."""
        if check.left:
            return ""
        try:
            process = self._process(bounds)
        except ChildProcessError:  # it cannot even begin in so little memory
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
        """One that waits, or a new one, which has begun."""
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
    """Why a process died over a grammar, in words for whoever sent it."""
    if "memory allocation" in said or "MemoryError" in said:
        return _too_large(bounds)
    return "the grammar is nested, or its rules refer to each other, too deep for its compiler."


def _too_large(bounds: Bounds) -> str:
    return f"compiling the grammar took more than the server's limits.grammar_memory of {bounds.memory} bytes."
