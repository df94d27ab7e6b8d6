"""Source of a reply's deltas, and the merged stream of all choices of a request."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Protocol

from msgspec.structs import replace

from appliance.server.errors.api import DeadlineExceeded, EngineFailed
from engine.api.messages import Delta

CUT = ("error", "deadline")  # finish reasons of a choice that fail its request


class Running(Protocol):
    """Interface of a running sequence, implemented by the router's Generation."""

    async def __aenter__(self) -> Any: ...
    async def __aexit__(self, *error: Any) -> None: ...
    def __aiter__(self) -> AsyncIterator[Delta]: ...
    def stop(self) -> None: ...
    def suspend(self) -> None: ...


class Source(Protocol):
    """Source of a reply's deltas, as (choice, delta) in order of arrival.

    `event_id` names the position after the last delta; it is empty if streams cannot resume.
    """

    seen: bool  # the client already has the output of the last delta
    counts: bool  # this reader counts as a request of its own in metrics and logs
    skips_opening: bool
    skips_usage: bool

    async def __aenter__(self) -> Any: ...
    async def __aexit__(self, *error: Any) -> None: ...
    def deltas(self) -> AsyncIterator[tuple[int, Delta]]: ...
    def stop(self, index: int) -> None: ...
    def event_id(self, *, usage: bool = False) -> str: ...


class ChoiceStream:
    """Merged stream of the deltas of all choices, in order of arrival. Exiting it ends the choices that still run.

    `indexes` are the choices of the generations; the default is to count from 0. An exception of one choice fails the
    request, and `failed` is the index of that choice.
    """

    seen = skips_opening = skips_usage = False
    counts = True
    failed: int | None = None

    def __init__(self, generations: Sequence[Running], indexes: Sequence[int] | None = None) -> None:
        self._generations = dict(zip(range(len(generations)) if indexes is None else indexes, generations, strict=True))
        self._queue: asyncio.Queue[tuple[int, Delta | None | Exception]] = asyncio.Queue()
        self._pumps: dict[int, asyncio.Task[None]] = {}
        self._open = set(self._generations)

    async def __aenter__(self) -> "ChoiceStream":
        if len(self._generations) > 1:
            self._pumps = {at: asyncio.create_task(self._pump(at, each)) for at, each in self._generations.items()}
        return self

    async def __aexit__(self, *error: Any) -> None:
        for pump in self._pumps.values():
            pump.cancel()
        await asyncio.gather(*self._pumps.values(), return_exceptions=True)
        for generation in self._generations.values():
            await generation.__aexit__(*error)

    def event_id(self, *, usage: bool = False) -> str:
        return ""

    def suspend(self) -> None:
        """Do not count the end of the remaining choices, because they will be resumed."""
        for generation in self._generations.values():
            generation.suspend()

    async def _pump(self, index: int, generation: Running) -> None:
        try:
            async for delta in generation:
                self._queue.put_nowait((index, delta))
        except Exception as error:  # handed to the reader, who raises it
            self._queue.put_nowait((index, error))
        else:
            self._queue.put_nowait((index, None))

    def stop(self, index: int) -> None:
        """End a choice that met a stop string, so that the engine can release it."""
        self._generations[index].stop()
        if index in self._pumps:
            self._pumps[index].cancel()
        self._open.discard(index)

    def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        return self._one() if len(self._generations) == 1 else self._many()

    def _cut(self, index: int, delta: Delta) -> Iterator[tuple[int, Delta]]:
        """Yield the remaining tokens of a choice that was cut off, then raise the reason."""
        if delta.finish == "error":
            self.failed = index
            raise EngineFailed
        if delta.ids:  # tokens that arrived together with the end, because the reader was slow
            yield index, replace(delta, finish=None)
        raise DeadlineExceeded

    async def _one(self) -> AsyncIterator[tuple[int, Delta]]:
        """Yield the deltas of a single choice, without a queue."""
        ((index, generation),) = self._generations.items()
        async for delta in generation:
            if delta.finish in CUT:
                for part in self._cut(index, delta):
                    yield part
            yield index, delta
            if index not in self._open:
                return

    async def _many(self) -> AsyncIterator[tuple[int, Delta]]:
        while self._open:
            index, delta = await self._queue.get()
            if index not in self._open:
                continue  # it follows a stop string
            if delta is None:
                self._open.discard(index)
            elif isinstance(delta, Exception):
                self.failed = index
                raise delta
            else:
                if delta.finish in CUT:
                    for part in self._cut(index, delta):
                        yield part
                yield index, delta
