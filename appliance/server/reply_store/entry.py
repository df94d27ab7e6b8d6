"""One durable reply: what its request asked for and all that came of it, read by any number of followers."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Literal

from appliance.server.reply_store.records import Ended, Gained, Opened, decode_gained, encode
from engine.api.messages import Delta

State = Literal["running", "paused", "ended"]


class Suspended(Exception):
    """The generation was taken from its engine without an end; it can go on."""


class Entry:
    """`gained` are encoded records in order, `size` the bytes of all of its records. `paused`: nobody generates it;
    `failure`: why it will not be, once known. `abandoned`: it was ended on purpose, and does not go on. `counted`:
    metrics already count it as ended. `document`: how it ended, if its route keeps that. `write` gets each new
    record."""

    def __init__(self, opened: Opened, write: Callable[[bytes], None]) -> None:
        self.opened = opened
        self.gained: list[bytes] = []
        self.state: State = "paused"
        self.failure: Exception | None = None
        self.ended_at = 0.0
        self.abandoned = False
        self.counted = False
        self.document = b""
        self.followers = 0
        self.size = len(encode(opened))
        self._write = write
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def choices(self) -> int:
        return len(self.opened.submits)

    def gain(self, choice: int, delta: Delta) -> None:
        record = encode(Gained(self.opened.entry, len(self.gained), choice, delta))
        self.take(record)
        self._write(record)
        self._wake()

    def take(self, record: bytes) -> None:
        """A record that is in the log already."""
        self.gained.append(record)
        self.size += len(record)

    def delta(self, number: int) -> tuple[int, Delta]:
        record = decode_gained(self.gained[number])
        return record.choice, record.delta

    async def change(self) -> None:
        """Waits for the next delta or state."""
        await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def run(self, work: Coroutine[Any, Any, None], over: Callable[["Entry"], None]) -> None:
        """Generates it, by reading the reply to its end; `over` hears when that is so, or failed."""
        self.state, self.failure = "running", None
        self._task = asyncio.create_task(self._run(work, over))

    async def _run(self, work: Coroutine[Any, Any, None], over: Callable[["Entry"], None]) -> None:
        try:
            await work
        except (Suspended, asyncio.CancelledError):
            self.state = "paused"
        except Exception as error:  # every follower is told, as the client of any other request is
            self.state, self.failure = "paused", error
        else:
            self.end(over)
        self._task = None
        self._wake()
        if self.failure is not None:
            over(self)

    def settle(self, document: bytes) -> None:
        """This is what it came to, whether or not that is a complete reply; its end is to follow."""
        self.document = document
        self.size += len(document)

    def end(self, over: Callable[["Entry"], None]) -> None:
        self.state = "ended"
        over(self)
        self._write(self.ending())
        self._wake()

    def ending(self) -> bytes:
        return encode(Ended(self.opened.entry, len(self.gained), self.ended_at, self.document))

    def let_go(self) -> None:
        """Takes it from its engine, soon; the next who asks for it goes on."""
        if self._task is not None:
            self._task.cancel()

    async def abandon(self) -> None:
        """Ends the generation for good, as one whose client has gone; waits for it."""
        self.abandoned = True
        await self.pause()

    async def pause(self) -> None:
        """The same, and waits for it."""
        task = self._task
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
