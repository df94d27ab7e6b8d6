"""A response as server-sent events, numbered from 0 without gaps, and as one object.

A response that is written down is told from its start, whoever asks, and what the client has is left out: the same
tokens make the same events with the same numbers. How it ended is told as it was written down.
"""

import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any, Protocol

import orjson

from appliance.server.errors.api import Unavailable
from appliance.server.http.durable import RETRY_AFTER_S
from appliance.server.http.sse import named_record
from appliance.server.openai.responses.events import Fields
from appliance.server.openai.responses.reply import TERMINAL, ResponseReply
from appliance.server.reply_store.entry import Entry

LET_GO = "The service lets go of this response; ask for the rest of it with starting_after."


class Told(Protocol):
    """A reply and how its end is known. `cause`: what it failed with."""

    reply: ResponseReply

    @property
    def cause(self) -> Exception | None: ...

    async def whole(self) -> Fields: ...

    async def end(self) -> Fields: ...

    def failed(self, error: Exception) -> Fields: ...


class Live:
    """A response that nobody writes down: it ends with its client."""

    def __init__(self, reply: ResponseReply, on_error: Callable[[Exception], None]) -> None:
        self.reply = reply
        self._on_error = on_error

    @property
    def cause(self) -> Exception | None:
        return self.reply.failure

    async def whole(self) -> Fields:
        async for _ in self.reply.pieces():
            pass
        return self.reply.end()

    async def end(self) -> Fields:
        return self.reply.end()

    def failed(self, error: Exception) -> Fields:
        self._on_error(error)
        return self.reply.fail(error)


class Kept:
    """A response that is written down, read along."""

    def __init__(self, reply: ResponseReply, entry: Entry) -> None:
        self.reply = reply
        self._entry = entry

    @property
    def cause(self) -> Exception | None:
        return self._entry.failure

    async def whole(self) -> Fields:
        return await self.end()

    async def end(self) -> Fields:
        """Its document. Raises Unavailable if it is left without an end."""
        entry = self._entry
        while entry.state == "running" or (entry.abandoned and entry.state != "ended" and entry.failure is None):
            await entry.change()
        if entry.state != "ended":
            raise entry.failure or Unavailable(LET_GO, RETRY_AFTER_S)
        document: Fields = orjson.loads(self._entry.document)
        return document

    def failed(self, error: Exception) -> Fields:
        """Raises the error of one that did not end with it."""
        if self._entry.state != "ended" or not self._entry.document:
            raise error
        document: Fields = orjson.loads(self._entry.document)
        return document


async def _events(told: Told) -> AsyncIterator[Fields]:
    reply = told.reply
    for opening in reply.openings():
        yield opening
    try:
        async for events in reply.pieces():
            for event in events:
                yield event
        closings, document = reply.closings(), await told.end()
    except Exception as error:  # the one border of a stream: whatever fails is how the response ended
        closings, document = reply.closings(), told.failed(error)
    for event in closings:
        yield event
    yield {"type": TERMINAL[document["status"]], "response": document}


async def records(told: Told, after: int = -1, *, with_ids: bool = False) -> AsyncIterator[bytes]:
    """The events behind number `after`. Raises what does not end the response, only its stream."""
    numbers = itertools.count()
    async for event in _events(told):
        number = next(numbers)
        if number > after:
            fields = {"type": event["type"], "sequence_number": number, **event}
            yield named_record(event["type"], fields, str(number) if with_ids else "")


async def whole(told: Told) -> Fields:
    """The object of a response that was waited for. Raises what it failed with."""
    async with told.reply.source:  # until it is written down: whoever leaves a kept one before ends it
        document = await told.whole()
    if told.cause is not None:
        raise told.cause
    return document


async def closed(
    records: AsyncIterator[bytes], describe: Callable[[Exception], dict[str, Any]]
) -> AsyncIterator[bytes]:
    """The records; an error that is not the response's own is a bare record, at which clients raise."""
    try:
        async for each in records:
            yield each
    except Exception as error:  # the one border of a stream: whatever fails is told and ends it
        yield named_record("error", describe(error))


def listed(items: Iterable[Fields], *, after: str | None, limit: int, newest_first: bool) -> Fields:
    """One page of items, behind the item of an id. Raises KeyError if there is no such item."""
    ordered = list(items)[::-1] if newest_first else list(items)
    if after is not None:
        ordered = ordered[_place(ordered, after) + 1 :]
    page = ordered[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(ordered) > limit,
    }


def _place(items: list[Fields], id: str) -> int:
    places: Iterator[int] = (at for at, item in enumerate(items) if item["id"] == id)
    found = next(places, None)
    if found is None:
        raise KeyError(id)
    return found
