"""`AsyncLLM`: the engine in this process for asyncio programs, with streams that can be aborted."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.api.errors import EngineError, EngineGone, RequestError
from engine.api.messages import Abort, Delta, Failed, FromEngine, Output, Sampling
from engine.arguments import python_names
from engine.llm import LLM, Generation, Params, Prompt, as_params
from engine.metrics.reader import MetricValue

_Queue = asyncio.Queue[Delta | Failed | Exception]


class AsyncLLM:
    """A loaded checkpoint. `overrides`: the arguments of `LLM`. Requests of several tasks run in one batch.

    Use it in one event loop, as an async context manager or with `close`."""

    def __init__(self, path: str | Path, **overrides: Any) -> None:
        self._llm = LLM(path, **overrides)
        self._queues: dict[str, tuple[asyncio.AbstractEventLoop, _Queue]] = {}
        self._lock = threading.Lock()  # of `_queues` and `_end`
        self._end: EngineError | None = None  # why the engine has ended
        self._reader = threading.Thread(target=self._read, name="async-llm", daemon=True)
        self._reader.start()

    async def generate(
        self, prompt: Prompt, params: Params | Sampling | None = None, *, request_id: str | None = None
    ) -> AsyncIterator[Generation]:
        """Yield the reply so far after each step; the last one has `finish` set. Leaving the loop, or cancelling the
        task, aborts the request. Raises RequestError for an invalid request, or for a request_id that is in use."""
        submit, reply = self._llm._submit(prompt, as_params(params), request_id)
        queue: _Queue = asyncio.Queue()
        with self._lock:
            if self._end is not None:
                raise _gone(self._end) from self._end
            if submit.id in self._queues:
                raise RequestError(f"request_id={submit.id!r} is in use by an open request", "request_id")
            self._queues[submit.id] = asyncio.get_running_loop(), queue
        ended = False
        try:
            self._llm._loop.post([submit])
            while not ended:
                found = await queue.get()
                if isinstance(found, Failed):
                    ended = True
                    with python_names():
                        raise RequestError(found.message, found.param)
                if isinstance(found, Exception):
                    ended = True
                    raise _gone(found) from found
                ended = found.finish is not None
                if reply.take(found):
                    ended = True
                    self._llm._loop.post([Abort((submit.id,))])
                made = reply.generation
                yield replace(made, ids=list(made.ids), logprobs=list(made.logprobs))
        finally:
            with self._lock:
                self._queues.pop(submit.id, None)
            if not ended:
                self._llm._loop.post([Abort((submit.id,))])

    async def abort(self, request_id: str) -> None:
        """End a request: its stream yields a last reply with the finish reason "abort". Unknown ids are ignored."""
        self._llm._loop.post([Abort((request_id,))])

    def get_metrics(self) -> list[MetricValue]:
        """Return all metrics since the start, as of the last report of the scheduler, 0.1 s ago at most."""
        return self._llm.read_metrics()

    async def close(self) -> None:
        """End the engine. Open requests raise EngineGone."""
        await asyncio.to_thread(self._llm.close)
        await asyncio.to_thread(self._reader.join)

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # In the reader's thread

    def _read(self) -> None:
        """Pass messages of the engine to the requests."""
        while True:
            try:
                messages = self._llm._received()
            except EngineError as error:
                with self._lock:
                    self._end, waiting = error, list(self._queues)
                for id in waiting:
                    self._pass_on(id, error)
                return
            for message in messages:
                self._distribute(message)

    def _distribute(self, message: FromEngine) -> None:
        match message:
            case Output(deltas=deltas):
                for delta in deltas:
                    self._pass_on(delta.id, delta)
            case Failed(id=str(id)):
                self._pass_on(id, message)

    def _pass_on(self, id: str, found: Delta | Failed | Exception) -> None:
        with self._lock:
            known = self._queues.get(id)
        if known is not None:
            loop, queue = known
            with suppress(RuntimeError):  # the event loop was closed, which must not end the other requests
                loop.call_soon_threadsafe(queue.put_nowait, found)


def _gone(error: Exception) -> EngineGone:
    return EngineGone(f"the engine is not running: {type(error).__name__}: {error}")
