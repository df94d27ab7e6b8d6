"""Request bodies with a Content-Encoding: gzip or deflate, decompressed up to the limit on body size."""

import asyncio
import zlib
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from appliance.server.errors.api import BadRequest, TooLarge, UnsupportedEncoding
from appliance.server.http.service import Service

GZIP: Final = frozenset(("gzip", "x-gzip"))
MEMBERS: Final = 1000  # maximum number of members of a gzip body; each member copies the rest of the body
_AUTOMATIC, _RAW = zlib.MAX_WBITS | 32, -zlib.MAX_WBITS


class Unpacker:
    """Decompresses one body of at most `limit` decompressed bytes."""

    def __init__(self, encoding: str, limit: int) -> None:
        self._encoding, self._limit = encoding, limit
        self._stream = zlib.decompressobj(_AUTOMATIC)
        self._begun = False
        self._size = self._members = 0

    def take(self, data: bytes, *, last: bool) -> bytes:
        """Decompress a piece of the body. Raise BadRequest or TooLarge."""
        found = bytearray()
        try:
            while data:
                if self._members > MEMBERS:
                    raise self._damaged()
                found += self._piece(data)
                if len(found) + self._size > self._limit:
                    raise TooLarge(self._limit)
                data = self._stream.unused_data if self._stream.eof else b""
                if data:  # gzip allows several members, one after the other
                    self._stream = zlib.decompressobj(_AUTOMATIC)
                    self._members += 1
        except zlib.error:
            raise self._damaged() from None
        if last and not self._stream.eof:
            raise self._damaged()
        self._size += len(found)
        return bytes(found)

    def _piece(self, data: bytes) -> bytes:
        most = self._limit - self._size + 1
        try:
            found = self._stream.decompress(data, most)
        except zlib.error:
            if self._begun or self._encoding in GZIP:
                raise
            self._stream = zlib.decompressobj(_RAW)  # some clients send deflate without zlib's frame
            found = self._stream.decompress(data, most)
        self._begun = True
        return found

    def _damaged(self) -> BadRequest:
        return BadRequest(
            f"The body is not valid {self._encoding}, although Content-Encoding is {self._encoding}.",
            "content-encoding",
        )


class Inflate:
    """Decompresses bodies for the routes. Raises UnsupportedEncoding (415), BadRequest (400) and TooLarge (413)."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app = app
        self.service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        encoding = Headers(scope=scope).get("content-encoding", "").strip() if scope["type"] == "http" else ""
        if encoding.lower() in ("", "identity"):
            return await self.app(scope, receive, send)
        if encoding.lower() not in GZIP | {"deflate"}:
            raise UnsupportedEncoding(encoding)
        unpacker = Unpacker(encoding.lower(), self.service.config.limits.max_body)

        async def unpacked() -> Message:
            message = await receive()
            if message["type"] != "http.request":
                return message
            last = not message.get("more_body", False)
            body = await asyncio.to_thread(unpacker.take, message.get("body", b""), last=last)
            return {**message, "body": body}

        await self.app(scope, unpacked, send)
