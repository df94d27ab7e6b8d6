"""Relay between the gRPC port and the server of grpcio.

grpcio has no limit of connections per address and no minimum version of TLS. Its server therefore listens on a socket
in a private folder, and this module accepts the connections of the port: with the limits of `endpoints.connections`,
and with the certificate of the HTTP port. A connection is idle while no call is open on it; frame headers show the
calls (RFC 9113, section 4.1).
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import cast

from appliance.config.gateway import GatewayConfig
from appliance.security.certificate import Certificate
from appliance.server.http.connections import Acceptor, Connection, ConnectionTable

PREFACE = len(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
HEAD = 9
"""Bytes of the head of a frame: length (3), type, flags, stream (4)."""
DATA, HEADERS, RST_STREAM = 0, 1, 3
END_STREAM = 1
MAX_PAUSED = 2**18
"""Bytes that wait for one side before the other is not read."""


class Frames:
    """Heads of the frames of one direction."""

    def __init__(self, preface: int = 0) -> None:
        self._skip = preface
        self._head = b""

    def feed(self, data: bytes) -> Iterator[tuple[int, int, int]]:
        """Yield type, flags and stream of each frame that begins in `data`."""
        at = 0
        while at < len(data):
            if self._skip:
                step = min(self._skip, len(data) - at)
                self._skip -= step
                at += step
                continue
            step = min(HEAD - len(self._head), len(data) - at)
            self._head += data[at : at + step]
            at += step
            if len(self._head) == HEAD:
                self._skip = int.from_bytes(self._head[:3])
                yield self._head[3], self._head[4], int.from_bytes(self._head[5:]) & 0x7FFFFFFF
                self._head = b""


class _Upstream(asyncio.Protocol):
    """The connection to gRPC's server."""

    def __init__(self, relay: "Relay") -> None:
        self._relay = relay

    def data_received(self, data: bytes) -> None:
        self._relay.answer(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._relay.close()

    def pause_writing(self) -> None:
        self._relay.transport.pause_reading()

    def resume_writing(self) -> None:
        self._relay.transport.resume_reading()


class Relay(asyncio.Protocol):
    """One connection of a client."""

    transport: asyncio.Transport

    def __init__(self, connection: Connection, table: ConnectionTable, path: str, opened: set["Relay"]) -> None:
        """path: socket of gRPC's server. opened: the set of open relays."""
        self._connection = connection
        self._table = table
        self._path = path
        self._opened = opened
        self._upstream: asyncio.Transport | None = None
        self._given, self._answered = Frames(PREFACE), Frames()
        self._calls: set[int] = set()
        self._last = 0  # largest stream of a call
        self._is_busy = False
        self._pending = b""
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._connection.transport = transport
        self._opened.add(self)
        self.transport.set_write_buffer_limits(MAX_PAUSED)
        self._task = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            upstream, _ = await loop.create_unix_connection(lambda: _Upstream(self), self._path)
        except OSError:  # the server has ended
            self.transport.abort()
            return
        upstream.set_write_buffer_limits(MAX_PAUSED)
        self._upstream = upstream
        if self.transport.is_closing():
            upstream.abort()
        elif self._pending:
            upstream.write(self._pending)
            self._pending = b""

    def data_received(self, data: bytes) -> None:
        for kind, _, stream in self._given.feed(data):
            # gRPC ignores other new streams: even numbers, and numbers that are not larger than those before.
            if kind == HEADERS and stream % 2 and stream > self._last:
                self._last = stream
                self._calls.add(stream)
            elif kind == RST_STREAM:
                self._calls.discard(stream)
        self._mark()
        if self._upstream is None:
            self._pending += data
        else:
            self._upstream.write(data)

    def answer(self, data: bytes) -> None:
        """Send bytes of gRPC's server to the client."""
        self.transport.write(data)
        for kind, flags, stream in self._answered.feed(data):
            if kind == RST_STREAM or (kind in (DATA, HEADERS) and flags & END_STREAM):
                self._calls.discard(stream)
        self._mark()

    def _mark(self) -> None:
        """Tell the table when the first call begins and when the last one ends. Other frames, such as PING, leave an
        idle connection at its place in the order of the idle ones."""
        if self._is_busy == bool(self._calls):
            return
        self._is_busy = bool(self._calls)
        if self._is_busy:
            self._table.set_busy(self._connection)
        else:
            self._table.set_idle(self._connection)

    def pause_writing(self) -> None:
        if self._upstream is not None:
            self._upstream.pause_reading()

    def resume_writing(self) -> None:
        if self._upstream is not None:
            self._upstream.resume_reading()

    def close(self) -> None:
        """Close the connection after all written bytes are sent. The table may close it earlier, because its calls have
        ended and the client may not read."""
        self._calls.clear()
        self._mark()
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._opened.discard(self)
        self._table.remove(self._connection)
        if self._upstream is not None:
            self._upstream.abort()


@asynccontextmanager
async def relayed(
    listener: socket.socket,
    path: str,
    table: ConnectionTable,
    config: Callable[[], GatewayConfig],
    certificate: Certificate | None,
) -> AsyncIterator[None]:
    """Relay the connections of `listener` to the socket `path`."""
    opened: set[Relay] = set()
    acceptor = Acceptor(
        listener,
        table,
        partial(Relay, table=table, path=path, opened=opened),
        context=None if certificate is None else certificate.http2,
        handshake_s=lambda: config().endpoints.connections.head_timeout,
        refusal=lambda: b"",
    )
    acceptor.start()
    try:
        yield
    finally:
        acceptor.close()
        listener.close()
        await acceptor.wait_closed()
        for relay in [*opened]:
            relay.transport.abort()
        await asyncio.sleep(0)  # connections are closed in the next round of the loop
