"""Server-sent events: records, comments that keep proxies awake, and a response that ends with its client."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

import orjson
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

# Clients that split lines as str.splitlines does would cut a record at these; inside JSON they only occur in strings.
_LINE_ENDS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))


def record(value: Any, event_id: str = "") -> bytes:
    """One `data:` record of a JSON value, with the id of its event if it has one."""
    body = orjson.dumps(value)
    for raw, escaped in _LINE_ENDS:
        if raw in body:
            body = body.replace(raw, escaped)
    event = b"id: " + event_id.encode() + b"\n" if event_id else b""
    return event + b"data: " + body + b"\n\n"


async def kept_alive(records: AsyncIterator[bytes], pause_s: float, sign: bytes = KEEP_ALIVE) -> AsyncIterator[bytes]:
    """The records, with a sign of life after each pause of `pause_s` seconds without one; 0 sends none."""
    pending: asyncio.Future[bytes] | None = None
    try:
        while True:
            pending = pending or asyncio.ensure_future(anext(records))
            done, _ = await asyncio.wait({pending}, timeout=pause_s or None)
            if not done:
                yield sign
                continue
            try:
                value, pending = pending.result(), None
            except StopAsyncIteration:
                pending = None
                return
            yield value
    finally:
        if pending is not None:
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)


async def guarded(
    records: AsyncIterator[bytes], describe: Callable[[Exception], dict[str, Any]]
) -> AsyncIterator[bytes]:
    """The records and the terminator. After the first byte an error can only be a record of its own (ER-17)."""
    try:
        async for each in records:
            yield each
    except Exception as error:  # the one border of a stream: whatever fails is told and ends it
        yield record(describe(error))
    yield DONE


class EventStream(StreamingResponse):
    """Streams records while `work` is entered; a client that closes the connection ends both at once (ER-16)."""

    def __init__(
        self,
        records: AsyncIterator[bytes],
        work: AbstractAsyncContextManager[Any],
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(records, headers={**HEADERS, **(headers or {})}, media_type="text/event-stream")
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._work:
            sending = asyncio.ensure_future(self.stream_response(send))
            watching = asyncio.ensure_future(self.listen_for_disconnect(receive))
            try:
                await asyncio.wait({sending, watching}, return_when=asyncio.FIRST_COMPLETED)
                if sending.done():
                    sending.result()
            finally:
                sending.cancel()
                watching.cancel()
                await asyncio.gather(sending, watching, return_exceptions=True)
