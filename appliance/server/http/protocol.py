"""HTTP/1.1 of one connection: uvicorn's httptools protocol with limits on what a client may send and how slowly.

The limits of `endpoints.connections` are read from the configuration for each request: size of a request head and of
trailers, number of header fields, time for the head. Connections without a request are closed after
`endpoints.keep_alive`. The time for a body is limited in `appliance.server.middleware`, where a late body becomes an
ordinary error reply.
"""

import asyncio
import logging
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import httptools
from starlette.responses import Response
from uvicorn._types import ASGI3Application, WebSocketEvent
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.websockets.wsproto_impl import WSProtocol

from appliance.config.gateway import GatewayConfig
from appliance.server.errors.api import ApiError, BadRequest, HeadTooLarge, RequestTimeout, error_response
from appliance.server.errors.formats import response_of
from appliance.server.http.connections import CloseReason, Connection, ConnectionTable

log = logging.getLogger(__name__)

STREAM = b"/invocations-bidirectional-stream"
"""Path of the WebSocket of Amazon SageMaker."""
REALTIME = b"/v1/realtime"
"""Path of the WebSocket of realtime transcription."""
SLICE_BYTES = 8192
"""Maximum bytes per call of the parser, so that one read cannot start more than a few hundred requests."""
LINGER_S = 5.0
"""Time for which input is read and dropped after a last reply.

Closing at once would reset the connection, and the reset could overtake the reply.
"""
MAX_UNPARSED_BYTES = 2**20
"""Maximum input that is buffered while pipelined requests wait. Reading is paused, so only an attacker reaches it."""


class _TooLarge(Exception):
    """Raised inside a parser callback to stop the parser."""


class _CycleTransport:
    """The part of a transport that uvicorn's request cycle uses. It closes without a reset."""

    def __init__(self, protocol: "HttpProtocol") -> None:
        self._protocol = protocol

    def write(self, data: bytes) -> None:
        self._protocol.transport.write(data)

    def is_closing(self) -> bool:
        return self._protocol.transport.is_closing()

    def close(self) -> None:
        self._protocol.close_gently()


class RealtimeSocket(WSProtocol):
    """WebSocket of /v1/realtime. Reads nothing while the client does not read, so that replies to pings of a client
    that reads nothing need no memory."""

    def __init__(self, lost: Callable[[], None], **arguments: Any) -> None:
        """lost: called when the connection is closed."""
        super().__init__(**arguments)
        self._lost = lost

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._lost()

    def data_received(self, data: bytes) -> None:
        try:
            super().data_received(data)
        except UnicodeError:  # the Host header of the handshake
            self.transport.write(refusal(BadRequest("Invalid HTTP request received.")))
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.transport.pause_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.read_paused:
            self.transport.resume_reading()

    async def receive(self) -> WebSocketEvent:
        event = await super().receive()
        if not self.writable.is_set() and not self.transport.is_closing():
            self.transport.pause_reading()
        return event


class HttpProtocol(HttpToolsProtocol):
    """HTTP protocol of one connection."""

    def __init__(
        self,
        connection: Connection,
        table: ConnectionTable,
        config: Callable[[], GatewayConfig],
        uvicorn_arguments: dict[str, Any],
    ) -> None:
        super().__init__(**uvicorn_arguments)
        self._connection = connection
        self._table = table
        self._gateway = config
        self._receiving: Literal["nothing", "head", "body"] = "nothing"
        self._since = self._idle_since = self.loop.time()
        self._head_bytes = 0  # bytes of complete lines of a head or of trailers
        self._line_bytes = 0  # bytes of the line that is being received
        self._num_headers = 0
        self._unparsed = bytearray()  # buffered while earlier requests of the connection are processed
        self._active: RequestResponseCycle | None = None
        self._deferred: tuple[ApiError, CloseReason] | None = None  # to be sent after the reply in progress
        self._ended = False  # the last reply is written
        self._ignores_input = False
        self._served = False
        self._timer: asyncio.TimerHandle | None = None
        self.ws_protocol_class = partial(RealtimeSocket, self._lost)  # type: ignore[assignment]

    # Connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._connection.transport = transport
        self._idle_since = self.loop.time()
        self._set_timer()

    def _lost(self) -> None:
        """Called when the connection that another protocol took over is closed."""
        self._table.remove(self._connection)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._table.remove(self._connection)
        if self._timer is not None:
            self._timer.cancel()
        # uvicorn notifies only the newest request of a pipeline.
        if self._active is not None and not self._active.response_complete:
            self._active.disconnected = True
            self._active.message_event.set()
        self.pipeline.clear()

    @property
    def _busy(self) -> bool:
        """A request is being processed or is queued behind one that is."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def waits_for_reply(self) -> bool:
        """A request is being received or processed."""
        return self._busy or self._receiving != "nothing"

    def close_gently(self) -> None:
        """Close when everything is written, without a reset if the client is still sending."""
        if self._receiving == "nothing" and not self._unparsed and not self._ended:
            self.transport.close()
            return
        self._ended = True
        self._idle_since = self.loop.time()
        if self.transport.can_write_eof() and not self.transport.is_closing():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._table.set_idle(self._connection)
        self._set_timer()

    # Input

    def data_received(self, data: bytes) -> None:
        if self._ended or self._ignores_input:
            return
        if self._unparsed:
            self._unparsed += data
            self.flow.pause_reading()
            if len(self._unparsed) > MAX_UNPARSED_BYTES:
                self.transport.abort()
            return
        self._parse(data)

    def _parse(self, data: bytes | bytearray) -> None:
        view = memoryview(data)
        for at in range(0, len(view), SLICE_BYTES):
            if self.pipeline:
                self._unparsed = bytearray(view[at:])
                self.flow.pause_reading()
                break
            if not self._parse_slice(view[at : at + SLICE_BYTES]):
                return
        self._set_timer()

    def _parse_slice(self, piece: memoryview) -> bool:
        """Parse one piece. Return False if nothing more may be parsed."""
        self._line_bytes += len(piece)  # reset by the callback that completes a line
        try:
            self.parser.feed_data(piece)
            self._check_head()
        except _TooLarge:
            self._refuse_head()
        except httptools.HttpParserUpgrade as upgrade:
            if self._is_handshake():
                self._become_websocket(bytes(piece[upgrade.args[0] :]))
                return False
            self._ignores_input = True  # handled as if no upgrade had been requested
        except httptools.HttpParserError as error:
            if isinstance(error.__context__, _TooLarge):
                self._refuse_head()
            else:
                self._refuse(BadRequest("Invalid HTTP request received."), "invalid")
        else:
            return True
        self._set_timer()
        return False

    def _become_websocket(self, rest: bytes) -> None:
        """Pass the connection on to a WebSocket. The one of SageMaker gets the input after the handshake."""
        if self._timer is not None:
            self._timer.cancel()
        self._ignores_input = True
        self._table.set_busy(self._connection)
        if self.url.partition(b"?")[0] == REALTIME:
            self.handle_websocket_upgrade()
            return
        from appliance.server.http.websocket import WebSocketProtocol

        self.connections.discard(self)

        def lost(socket: Any) -> None:
            self.connections.discard(socket)
            self._table.remove(self._connection)

        scope = {**self.scope, "raw_path": STREAM}
        socket = WebSocketProtocol(self.app, scope, self._gateway, lost)
        self.connections.add(socket)  # type: ignore[arg-type]
        self.transport.set_protocol(socket)
        socket.begin(self.transport)
        if rest:
            socket.data_received(rest)

    def _count_line(self, size: int) -> None:
        self._head_bytes += size
        self._line_bytes = 0
        self._check_head()

    def _check_head(self) -> None:
        if self._receiving == "nothing":
            return
        limits = self._gateway().endpoints.connections
        if self._head_bytes + self._line_bytes > limits.max_head + SLICE_BYTES:
            raise _TooLarge
        if self._head_bytes > limits.max_head or self._num_headers > limits.max_headers:
            raise _TooLarge

    def _refuse_head(self) -> None:
        limits = self._gateway().endpoints.connections
        too_many = self._num_headers > limits.max_headers
        error = HeadTooLarge(headers=limits.max_headers) if too_many else HeadTooLarge(size=limits.max_head)
        self._refuse(error, "max_headers" if too_many else "max_head")

    # Parser callbacks

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._receiving, self._since = "head", self.loop.time()
        self._head_bytes = self._line_bytes = self._num_headers = 0

    def on_url(self, url: bytes) -> None:
        self._count_line(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        self._count_line(len(name) + len(value) + 4)
        if self._receiving == "head":  # trailers are not used
            super().on_header(name, value)

    def _should_upgrade_to_ws(self) -> bool:
        """Return whether the path is the path of a WebSocket, and earlier requests of the connection are completed.
        Other upgrades are ignored."""
        path = self.url.partition(b"?")[0]
        return path in (STREAM, REALTIME) and not self._busy and self.parser.get_method() == b"GET"

    def _is_handshake(self) -> bool:
        """Return whether the request is the handshake of a WebSocket. uvicorn makes no cycle for it."""
        return self.parser.should_upgrade() and self._should_upgrade()

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if self._is_handshake():
            return  # the time for the head includes a body, which is ignored
        self._receiving, self._since = "body", self.loop.time()
        self._head_bytes = self._line_bytes = self._num_headers = 0
        self._served = True
        self.cycle.transport = _CycleTransport(self)  # type: ignore[assignment]
        if self.parser.should_upgrade():
            self.cycle.keep_alive = False  # the parser reads nothing after such a request
        self._table.set_busy(self._connection)

    def on_chunk_header(self) -> None:
        self._line_bytes = 0

    def on_body(self, body: bytes) -> None:
        self._line_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._receiving = "nothing"

    # Replies

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._active = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        self._idle_since = self.loop.time()
        if self._ended:
            self.server_state.total_requests += 1
            return
        super().on_response_complete()
        self._unset_keepalive_if_required()  # the timer of this class covers it
        if self.transport.is_closing():
            return
        if self._deferred is not None and not self._busy:
            self._send_last(*self._deferred)
            return
        if self._unparsed and not self.pipeline:
            data, self._unparsed = self._unparsed, bytearray()
            self._parse(data)
        if not self._busy:
            self._table.set_idle(self._connection)
        self._set_timer()

    def _refuse(self, error: ApiError, reason: CloseReason) -> None:
        """Answer input that cannot be parsed any further, after the replies to earlier requests, and close."""
        if not self._busy:
            self._send_last(error, reason)
        elif self._receiving == "head":
            self._deferred = (error, reason)
            self._ignores_input = True
        elif self.cycle.response_started or self.pipeline:
            self._table.report(reason)
            self.transport.abort()
        else:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            self._send_last(error, reason)

    def _send_last(self, error: ApiError, reason: CloseReason) -> None:
        self._table.report(reason)
        log.debug("connection of %s closed: %s", self._connection.address, reason)
        url = self.url.partition(b"?")[0].decode("ascii", "replace") if self._receiving != "nothing" else ""
        answer = response_of(url)
        response = answer(error, uuid.uuid4().hex)
        self.transport.write(_bytes(response, self.server_state.default_headers))
        self._ended = True
        self.close_gently()

    # Time

    def _deadline(self) -> float | None:
        """Return when the connection is closed if nothing happens before, or None."""
        limits = self._gateway().endpoints.connections
        if self._ended:
            return self._idle_since + LINGER_S
        if self._busy:
            return None
        if self._receiving == "head":
            return max(self._since, self._idle_since) + limits.head_timeout
        if self._receiving == "body":
            return self._since + limits.body_timeout
        return self._idle_since + (self._gateway().endpoints.keep_alive if self._served else limits.head_timeout)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        deadline = None if self.transport.is_closing() else self._deadline()
        self._timer = None if deadline is None else self.loop.call_at(deadline, self._expire)

    def _expire(self) -> None:
        if self._ended:
            self.transport.abort()
        elif self._receiving == "head":
            seconds = self._gateway().endpoints.connections.head_timeout
            self._refuse(RequestTimeout("head", seconds), "head_timeout")
        elif self._receiving == "body":  # the reply was already sent
            self.transport.abort()
        else:
            if not self._served:
                self._table.report("head_timeout")
            self.transport.close()


def _bytes(response: Response, default_headers: list[tuple[bytes, bytes]]) -> bytes:
    """Return a complete reply with `connection: close`."""
    headers = [*default_headers, *response.raw_headers, (b"connection", b"close")]
    lines = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
    return STATUS_LINE[response.status_code] + lines + b"\r\n" + bytes(response.body)


def refusal(error: ApiError) -> bytes:
    """Return the reply to a connection whose request is not read."""
    return _bytes(error_response(error, uuid.uuid4().hex), [])
