"""Grammars of requests, compiled once in processes of their own before any engine hears of them.

Such a process may take `limits.grammar_time` and `limits.grammar_memory` and is killed beyond: whatever a grammar does
to its compiler, gateway and engines go on. Verdicts are kept, so a language that comes again costs a look-up; requests
with the same new language wait for one compilation, which ends when the last of them has left.
"""

import asyncio
import json
import logging
import sys
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Final

import msgspec

from engine.api.errors import RequestError
from engine.api.messages import Grammar

log = logging.getLogger(__name__)

MAX_KEPT: Final = 1024  # verdicts, the most recently used ones
MAX_KEPT_BYTES: Final = 16 << 20  # of the grammars that they are about
PROCESSES: Final = 2  # that compile at a time
_LINE: Final = 1 << 20  # bytes; a verdict is shorter
_START_S: Final = 30.0  # for a process to begin, on a machine that does much else


@dataclass(frozen=True)
class Bounds:
    """What a request's grammar may cost: bytes of its source, seconds and bytes to compile it."""

    size: int
    time_s: float
    memory: int


@dataclass
class _Check:
    task: asyncio.Task[str]
    waiting: int = 0


class Grammars:
    """`checked` hears how each look ended ("kept", "valid", "invalid", "limit") and its seconds."""

    def __init__(self, checked: Callable[[str, float], None]) -> None:
        self._checked = checked
        self._kept: OrderedDict[tuple[Grammar, Bounds], str] = OrderedDict()
        self._kept_bytes = 0
        self._running: dict[tuple[Grammar, Bounds], _Check] = {}
        self._turns = asyncio.Semaphore(PROCESSES)
        self._idle: list[tuple[Process, Bounds]] = []

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
            outcome = "limit" if "limits." in fault else "invalid" if fault else "valid"
            self._checked(outcome, monotonic() - began)
        if fault:
            raise RequestError(f"{param}: {fault}", param)

    async def stop(self) -> None:
        for check in list(self._running.values()):
            check.task.cancel()
        await asyncio.gather(*(check.task for check in self._running.values()), return_exceptions=True)
        for process, _ in self._idle:
            await _kill(process)
        self._idle.clear()

    async def _shared(self, key: tuple[Grammar, Bounds]) -> str:
        """One compilation for all who wait for it."""
        check = self._running.get(key)
        if check is None:
            check = self._running[key] = _Check(asyncio.create_task(self._compile(*key)))
        check.waiting += 1
        try:
            return await asyncio.shield(check.task)
        finally:
            check.waiting -= 1
            if not check.waiting:
                check.task.cancel()  # nothing, if it is done
                if self._running.get(key) is check:
                    del self._running[key]

    async def _compile(self, grammar: Grammar, bounds: Bounds) -> str:
        async with self._turns:
            process = await self._process(bounds)
            done = False
            try:
                async with asyncio.timeout(bounds.time_s):
                    fault = await _asked(process, grammar)
                done = fault is not None
                if fault is None:
                    fault = await _death(process, bounds)
            except TimeoutError:
                fault = f"compiling the grammar took more than the server's limits.grammar_time of {bounds.time_s:g} s."
            finally:
                if done:
                    self._idle.append((process, bounds))
                else:
                    await _kill(process)
        self._keep((grammar, bounds), fault)
        return fault

    async def _process(self, bounds: Bounds) -> Process:
        """One that waits, or a new one, which has begun."""
        while self._idle:
            process, its = self._idle.pop()
            if its == bounds and process.returncode is None:
                return process
            await _kill(process)
        command = (sys.executable, "-m", "engine.structured.check", str(bounds.memory))
        process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=PIPE, limit=_LINE)
        try:
            async with asyncio.timeout(_START_S):
                await _asked(process, Grammar("regex", "a"))
        except BaseException:
            await _kill(process)
            raise
        return process

    def _keep(self, key: tuple[Grammar, Bounds], fault: str) -> None:
        self._kept[key] = fault
        self._kept_bytes += len(key[0].text)
        while len(self._kept) > MAX_KEPT or self._kept_bytes > MAX_KEPT_BYTES:
            (grammar, _), _ = self._kept.popitem(last=False)
            self._kept_bytes -= len(grammar.text)


async def _asked(process: Process, grammar: Grammar) -> str | None:
    """The process's verdict, None if it died over it."""
    assert process.stdin is not None and process.stdout is not None, "both are pipes"
    try:
        process.stdin.write(msgspec.json.encode(grammar) + b"\n")
        await process.stdin.drain()
        line = await process.stdout.readline()
    except (BrokenPipeError, ConnectionResetError):
        return None
    return str(json.loads(line)["fault"]) if line else None


async def _death(process: Process, bounds: Bounds) -> str:
    """Why a process died over a grammar, in words for whoever sent it."""
    assert process.stderr is not None, "it is a pipe"
    said = (await process.stderr.read()).decode(errors="replace")
    code = await process.wait()
    log.warning("a process that compiles grammars ended with %d: %s", code, said[-300:].strip())
    if "memory allocation" in said or "MemoryError" in said:
        return f"compiling the grammar took more than the server's limits.grammar_memory of {bounds.memory} bytes."
    return "the grammar is nested, or its rules refer to each other, too deep for its compiler."


async def _kill(process: Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()
