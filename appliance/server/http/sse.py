"""Server-sent events: records, keep-alive comments, and a response that ends when its client disconnects."""

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

# Clients that split lines like str.splitlines would cut a record at these. In JSON they only occur in strings.
_LINE_ENDS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))


def line(value: Any) -> bytes:
    """Return a JSON value as one line, for every definition of a line end."""
    body = orjson.dumps(value)
    if body.isascii():
        return body
    for raw, escaped in _LINE_ENDS:
        if raw in body:
            body = body.replace(raw, escaped)
    return body


def record(value: Any, event_id: str = "") -> bytes:
    """Return one `data:` record of a JSON value, with an event ID if there is one."""
    return _named(event_id, b"data: " + line(value) + b"\n\n")


def _named(event_id: str, data: bytes) -> bytes:
    return b"id: " + event_id.encode() + b"\n" + data if event_id else data


class ChunkEncoder:
    """Renderer of records that have the same first fields.

    Each record is one JSON object: `fields`, then a list `name` with one item, then the item's extra fields. The
    constant part is rendered once.
    """

    def __init__(self, fields: Mapping[str, Any], name: str) -> None:
        self._opening = b"data: " + line({**fields, name: []}).removesuffix(b"]}")

    def record(self, item: Any, more: Mapping[str, Any], event_id: str = "") -> bytes:
        """Return the record of `{**fields, name: [item], **more}`."""
        closing = b"]," + line(more)[1:] if more else b"]}"
        data = self._opening + line(item) + closing + b"\n\n"
        return _named(event_id, data) if event_id else data


def named_record(name: str, value: Any, event_id: str = "") -> bytes:
    """Return a record with an event name."""
    return b"event: " + name.encode() + b"\n" + record(value, event_id)


async def guarded(
    records: AsyncIterator[bytes], describe: Callable[[Exception], dict[str, Any]]
) -> AsyncIterator[bytes]:
    """Yield the records and the terminator. After the first byte, an error can only be sent as a record (ER-17)."""
    try:
        async for each in records:
            yield each
    except Exception as error:  # outermost handler of the stream: report any failure and end the stream
        yield record(describe(error))
    yield DONE


class EventStream(StreamingResponse):
    """Streams records while `work` is entered. A client that disconnects ends both (ER-16).

    After each pause of `pause_s` seconds without a record it sends a keep-alive; 0 disables that. Middleware sees only
    the start of the reply. Records bypass it through `send_body` in the request's state, if present
    (middleware.RequestFrame): six layers that only inspect the start would cost as much as building a record.
    """

    def __init__(
        self,
        records: AsyncIterator[bytes],
        work: AbstractAsyncContextManager[Any],
        headers: Mapping[str, str] | None = None,
        *,
        pause_s: float = 0.0,
        sign: bytes = KEEP_ALIVE,
    ) -> None:
        super().__init__(records, headers={**HEADERS, **(headers or {})}, media_type="text/event-stream")
        self._work = work
        self._pause_s, self._sign = pause_s, sign
        self._sent_s = 0.0

    async def _stream(self, start: Send, send: Send) -> None:
        await start({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        clock = asyncio.get_running_loop().time
        self._sent_s = clock()
        # One timer for the stream: a timeout for each record would cost as much as the record.
        awake = asyncio.ensure_future(self._keep_awake(send)) if self._pause_s else None
        try:
            async for each in self.body_iterator:
                await send({"type": "http.response.body", "body": each, "more_body": True})
                self._sent_s = clock()
        finally:
            if awake is not None:
                awake.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _keep_awake(self, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            left_s = self._sent_s + self._pause_s - clock()
            if left_s > 0:
                await asyncio.sleep(left_s)
                continue
            await send({"type": "http.response.body", "body": self._sign, "more_body": True})
            self._sent_s = clock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        send_body = scope.get("state", {}).get("send_body", send)
        async with self._work:
            sending = asyncio.ensure_future(self._stream(send, send_body))
            watching = asyncio.ensure_future(self.listen_for_disconnect(receive))
            try:
                await asyncio.wait({sending, watching}, return_when=asyncio.FIRST_COMPLETED)
                if sending.done():
                    sending.result()
            finally:
                sending.cancel()
                watching.cancel()
                await asyncio.gather(sending, watching, return_exceptions=True)
