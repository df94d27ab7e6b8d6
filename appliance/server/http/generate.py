"""Stages stream and format: read a source, format each delta, and stop choices that met a stop string."""

from collections.abc import AsyncIterator
from typing import Any, TypeVar

from appliance.server.http.choices import Source
from appliance.server.http.reply import Formatter, Reply

Piece = TypeVar("Piece")


async def pieces(source: Source, reply: Formatter[Piece]) -> AsyncIterator[Piece]:
    """Yield each delta of a source as a piece of the reply, in order of arrival.

    A reply counts in metrics and logs when its reader ends for any reason, if the source is a request of its own.
    """
    try:
        async for index, delta in source.deltas():
            reply.completion_log.take(delta)
            piece = reply.take(index, delta)
            if reply.choices[index].stopped:
                source.stop(index)
            if source.counts:
                reply.log_output(index)
            yield piece
        reply.check()
    finally:
        if source.counts:
            reply.count()


async def drain(source: Source, reply: Formatter[Any]) -> None:
    """Read a reply to its end without a client."""
    async for _ in pieces(source, reply):
        pass


async def complete(source: Source, reply: Reply[Any]) -> dict[str, Any]:
    """Read a reply to its end and return the complete object."""
    async with source:
        await drain(source, reply)
    return reply.whole()


async def records(source: Source, reply: Reply[Any]) -> AsyncIterator[bytes]:
    """Yield a reply as records of a stream. After the first byte, an error can only be sent as a record (ER-17)."""
    try:
        if not source.skips_opening:
            for data in reply.opening(source.event_id()):
                yield data
        async for piece in pieces(source, reply):
            if not source.seen and (data := reply.record(piece, source.event_id())):
                yield data
        if not source.skips_usage:
            for data in reply.closing(source.event_id(usage=True)):
                yield data
    except Exception as error:  # outermost handler of the stream: report any failure and end the stream
        yield reply.failure(error)
    if reply.terminator:
        yield reply.terminator
