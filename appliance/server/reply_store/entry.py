"""One durable reply: its request and all generated deltas, read by any number of subscribers."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Literal

from appliance.server.reply_store.records import Ended, Gained, Opened, decode_gained, encode
from engine.api.messages import Delta

State = Literal["running", "paused", "ended"]


class Suspended(Exception):
    """Raised when a generation was taken from its engine without an end. It can be resumed."""


class Entry:
    """State of one durable reply. `write` appends each new record to the log."""

    def __init__(self, opened: Opened, write: Callable[[bytes], None]) -> None:
        self.opened = opened
        self.gained: list[bytes] = []  # encoded delta records, in order
        self.state: State = "paused"  # "paused": it is not being generated
        self.failure: Exception | None = None  # why it cannot be generated further, if known
        self.ended_at = 0.0
        self.abandoned = False  # it was cancelled and must not be resumed
        self.counted = False  # metrics already count it as ended
        self.document = b""  # final object, if the route stores one
        self.subscribers = 0
        self.size = len(encode(opened))  # bytes of all its records
        self._write = write
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def choices(self) -> int:
        return len(self.opened.submits)

    def append(self, choice: int, delta: Delta) -> None:
        record = encode(Gained(self.opened.entry, len(self.gained), choice, delta))
        self.load(record)
        self._write(record)
        self._wake()

    def load(self, record: bytes) -> None:
        """Add a record that is already in the log."""
        self.gained.append(record)
        self.size += len(record)

    def delta(self, number: int) -> tuple[int, Delta]:
        record = decode_gained(self.gained[number])
        return record.choice, record.delta

    async def change(self) -> None:
        """Wait for the next delta or state change."""
        await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def run(self, work: Coroutine[Any, Any, None], on_end: Callable[["Entry"], None]) -> None:
        """Generate the reply by running `work`. Calls `over` when it ends or fails."""
        self.state, self.failure = "running", None
        self._task = asyncio.create_task(self._run(work, on_end))

    async def _run(self, work: Coroutine[Any, Any, None], on_end: Callable[["Entry"], None]) -> None:
        try:
            await work
        except (Suspended, asyncio.CancelledError):
            self.state = "paused"
        except Exception as error:  # reported to every subscriber, as to the client of any other request
            self.state, self.failure = "paused", error
        else:
            self.end(on_end)
        self._task = None
        self._wake()
        if self.failure is not None:
            on_end(self)

    def set_document(self, document: bytes) -> None:
        """Store the final object, complete or not. The end record follows."""
        self.document = document
        self.size += len(document)

    def end(self, on_end: Callable[["Entry"], None]) -> None:
        self.state = "ended"
        on_end(self)
        self._write(self.end_record())
        self._wake()

    def end_record(self) -> bytes:
        return encode(Ended(self.opened.entry, len(self.gained), self.ended_at, self.document))

    def pause_soon(self) -> None:
        """Cancel the generation soon. The next request for this reply resumes it."""
        if self._task is not None:
            self._task.cancel()

    async def abandon(self) -> None:
        """Cancel the generation for good, as for a client that disconnected, and wait for that."""
        self.abandoned = True
        await self.pause()

    async def pause(self) -> None:
        """Cancel the generation so that it can be resumed, and wait for that."""
        task = self._task
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
