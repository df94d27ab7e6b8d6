"""A response as server-sent events, numbered from 0 without gaps, or as one object.

A stored response is always replayed from its start, and events that the client already has are skipped: the same tokens
produce the same events with the same numbers. Its end is read from the store.
"""

import itertools
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Protocol

import orjson

from appliance.observability.log import Subject
from appliance.server.errors.api import Unavailable, is_unexpected
from appliance.server.http.choices import Source
from appliance.server.http.durable import RETRY_AFTER_S
from appliance.server.http.generate import drain, pieces
from appliance.server.http.reply import error_fields
from appliance.server.http.service import Service
from appliance.server.http.sse import named_record
from appliance.server.openai.responses.events import Fields
from appliance.server.openai.responses.reply import TERMINAL, ResponseReply
from appliance.server.reply_store.entry import Entry

PAUSED = "The service is shutting down. Retrieve the rest of this response with starting_after."


class ResponseOutput(Protocol):
    """A reply, the source of its deltas, and access to its end."""

    reply: ResponseReply
    source: Source

    @property
    def cause(self) -> Exception | None: ...

    async def whole(self) -> Fields: ...

    async def end(self) -> Fields: ...

    def failed(self, error: Exception) -> Fields: ...


class DirectResponse:
    """A response that is not stored. It ends with its client's connection."""

    def __init__(self, reply: ResponseReply, source: Source) -> None:
        self.reply = reply
        self.source = source

    @property
    def cause(self) -> Exception | None:
        return self.reply.failure

    async def whole(self) -> Fields:
        await drain(self.source, self.reply)
        return self.reply.end()

    async def end(self) -> Fields:
        return self.reply.end()

    def failed(self, error: Exception) -> Fields:
        if is_unexpected(error):
            self.reply.service.log.unexpected(self.reply.subject, error)
        return self.reply.fail(error)


class StoredResponse:
    """A stored response that is read while it is generated."""

    def __init__(self, reply: ResponseReply, source: Source, entry: Entry) -> None:
        self.reply = reply
        self.source = source
        self._entry = entry

    @property
    def cause(self) -> Exception | None:
        return self._entry.failure

    async def whole(self) -> Fields:
        return await self.end()

    async def end(self) -> Fields:
        """Return the final object. Raise Unavailable if generation stopped without an end."""
        entry = self._entry
        while entry.state == "running" or (entry.abandoned and entry.state != "ended" and entry.failure is None):
            await entry.change()
        if entry.state != "ended":
            raise entry.failure or Unavailable(PAUSED, RETRY_AFTER_S)
        document: Fields = orjson.loads(self._entry.document)
        return document

    def failed(self, error: Exception) -> Fields:
        """Return the final object of an ended response, else raise the error."""
        if self._entry.state != "ended" or not self._entry.document:
            raise error
        document: Fields = orjson.loads(self._entry.document)
        return document


async def _events(output: ResponseOutput) -> AsyncIterator[Fields]:
    reply = output.reply
    for opening in reply.openings():
        yield opening
    try:
        async for events in pieces(output.source, reply):
            for event in events:
                yield event
        closings, document = reply.closings(), await output.end()
    except Exception as error:  # outermost handler of the stream: any failure becomes the response's end
        closings, document = reply.closings(), output.failed(error)
    for event in closings:
        yield event
    yield {"type": TERMINAL[document["status"]], "response": document}


async def records(output: ResponseOutput, after: int = -1, *, with_ids: bool = False) -> AsyncIterator[bytes]:
    """Yield the events after number `after`. Raise errors that end the stream but not the response."""
    numbers = itertools.count()
    async for event in _events(output):
        number = next(numbers)
        if number > after:
            fields = {"type": event["type"], "sequence_number": number, **event}
            yield named_record(event["type"], fields, str(number) if with_ids else "")


async def whole(output: ResponseOutput) -> Fields:
    """Return the final object of a response that the client waits for. Raise the error that it failed with."""
    async with output.source:  # until it is stored: leaving a stored response earlier stops it
        document = await output.whole()
    if output.cause is not None:
        raise output.cause
    return document


async def closed(records: AsyncIterator[bytes], service: Service, subject: Subject) -> AsyncIterator[bytes]:
    """Yield the records. An error outside the response becomes a bare error record, on which clients raise."""
    try:
        async for each in records:
            yield each
    except Exception as error:  # outermost handler of the stream: report any failure and end the stream
        yield named_record("error", error_fields(service, subject, error))


def listed(items: Iterable[Fields], *, after: str | None, limit: int, newest_first: bool) -> Fields:
    """Return one page of items, starting after the item with ID `after`. Raise KeyError if there is no such item."""
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
