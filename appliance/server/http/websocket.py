"""Amazon SageMaker's bidirectional streams (SM-27): a WebSocket whose messages are bodies of POST /invocations.

Each message is one request, answered in order: a stream as one text message for each of its records, any other reply
as one message. A request runs through the routes of the same application, with the headers of the handshake, so keys,
limits, metrics and log lines are those of /invocations. Closing the socket cancels the request in progress.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import orjson
from starlette.types import ASGIApp, Message
from wsproto import ConnectionType, WSConnection
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    Event,
    Ping,
    RejectConnection,
    RejectData,
    Request,
    TextMessage,
)
from wsproto.utilities import LocalProtocolError, RemoteProtocolError

from appliance.config.gateway import GatewayConfig

log = logging.getLogger(__name__)

GUARDED = "/v1/models"
"""Route whose reply to the headers of a handshake says whether their key is accepted."""
PASSED_ON = (b"authorization", b"x-api-key", b"x-request-id", b"traceparent", b"tracestate", b"x-amzn-sagemaker-")
"""Beginnings of headers of the handshake that each request has."""
MAX_PENDING = 64
"""Messages that wait for the reply to an earlier one. Together they have at most `limits.max_body` bytes."""
IDLE_S = 600.0
"""Time without input after which a socket is closed, unless a request is in progress and the client reads its reply.
SageMaker pings every minute."""
LINGER_S = 5.0  # maximum time for the client to read the last messages
NORMAL, GOING_AWAY, UNSUPPORTED, TOO_BIG, INTERNAL, BUSY = 1000, 1001, 1003, 1009, 1011, 1013
Headers = list[tuple[bytes, bytes]]


class WebSocketProtocol(asyncio.Protocol):
    """One socket, from the end of its handshake's head."""

    def __init__(
        self, app: ASGIApp, scope: dict[str, Any], config: Callable[[], GatewayConfig], on_lost: Callable[[Any], None]
    ) -> None:
        """scope: of the handshake's request. on_lost: called when the connection is closed."""
        self._app, self._scope, self._config, self._on_lost = app, scope, config, on_lost
        self._headers: Headers = [one for one in scope["headers"] if one[0].lower().startswith(PASSED_ON)]
        self._socket = WSConnection(ConnectionType.SERVER)
        self._transport: asyncio.Transport | None = None
        self._inbox: asyncio.Queue[bytes] = asyncio.Queue(MAX_PENDING)
        self._waiting = 0  # bytes of the messages in the inbox
        self._works = False  # a request is in progress
        self._message = bytearray()  # received part of the next message
        self._writable = asyncio.Event()
        self._writable.set()
        self._closed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, transport: asyncio.Transport) -> None:
        """Take over a connection whose handshake has been read."""
        self._transport = transport
        try:
            self._socket.initiate_upgrade_connection(self._scope["headers"], self._scope["raw_path"])
            (event,) = self._socket.events()
            assert isinstance(event, Request), "the first event of a handshake is its request"
        except Exception as error:  # of wsproto or h11, or UnicodeError for the Host header
            transport.write(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
            log.info("invalid handshake of a WebSocket: %s", error)
            transport.close()
            return
        self._touch()
        self._task = asyncio.get_running_loop().create_task(self._serve())

    def shutdown(self) -> None:
        """Close the socket, because the server ends."""
        self._close(GOING_AWAY)

    # Called by the transport

    def data_received(self, data: bytes) -> None:
        if self._task is None or self._is_ending:
            return
        self._touch()
        try:
            self._socket.receive_data(data)
            for event in self._socket.events():
                self._take(event)
                if self._is_ending:
                    return
        except RemoteProtocolError as error:
            self._close(error.event_hint.code if isinstance(error.event_hint, CloseConnection) else UNSUPPORTED)
        except LocalProtocolError:  # data before the handshake was answered
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed.set()
        self._writable.set()
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
        self._on_lost(self)

    def pause_writing(self) -> None:
        self._writable.clear()
        if self._transport is not None and not self._is_ending:
            self._transport.pause_reading()  # replies to pings of a client that reads nothing would need memory

    def resume_writing(self) -> None:
        self._writable.set()
        if self._transport is not None and not self._is_ending:
            self._transport.resume_reading()

    # Events

    def _take(self, event: Event) -> None:
        match event:
            case TextMessage() | BytesMessage():
                self._add(event)
            case Ping():
                self._send(event.response())
            case CloseConnection():
                with suppress(LocalProtocolError):
                    self._send(event.response())
                self._end()

    def _add(self, event: TextMessage | BytesMessage) -> None:
        """Add a part of a message."""
        data = event.data.encode() if isinstance(event.data, str) else bytes(event.data)
        self._message += data
        most = self._config().limits.max_body
        if len(self._message) > most:
            self._close(TOO_BIG)
        elif self._waiting + len(self._message) > most or (event.message_finished and self._inbox.full()):
            self._close(BUSY)
        elif event.message_finished:
            self._waiting += len(self._message)
            self._inbox.put_nowait(bytes(self._message))
            self._message.clear()

    def _send(self, event: Event) -> None:
        if self._transport is not None and not self._is_ending:
            self._transport.write(self._socket.send(event))

    def _close(self, code: int) -> None:
        with suppress(LocalProtocolError):
            self._send(CloseConnection(code=code))
        self._end()

    @property
    def _is_ending(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    def _end(self) -> None:
        """Close the connection once the client has read everything, or after LINGER_S."""
        if self._transport is None or self._is_ending:
            return
        self._transport.close()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(LINGER_S, self._transport.abort)

    def _touch(self) -> None:
        """Restart the time after which an idle socket is closed."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(IDLE_S, self._end_idle)

    def _end_idle(self) -> None:
        if self._works and self._writable.is_set():
            self._touch()
        else:
            self._close(NORMAL)

    # Requests

    async def _serve(self) -> None:
        try:
            await self._answer_messages()
        except Exception:
            log.exception("a WebSocket is closed because of an internal error")
            self._close(INTERNAL)

    async def _answer_messages(self) -> None:
        refusal = await self._refusal()
        if refusal is not None:
            status, body = refusal
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
            self._send(RejectConnection(status_code=status, headers=headers, has_body=True))
            self._send(RejectData(data=body))
            self._end()
            return
        self._send(AcceptConnection())
        while True:
            body = await self._inbox.get()
            self._waiting -= len(body)
            self._works = True
            await _Exchange(self).run("POST", "/invocations", body)
            self._works = False

    async def _refusal(self) -> tuple[int, bytes] | None:
        """Return status and body of the reply to a handshake without a valid key; None if it has one."""
        if self._config().endpoints.invocations_without_key:
            return None
        asked = _Exchange(self, forwards=False)
        await asked.run("GET", GUARDED, b"")
        return None if asked.status == 200 else (asked.status, b"".join(asked.parts))

    def scope(self, method: str, path: str) -> dict[str, Any]:
        """Return the scope of a request of this socket."""
        headers = [*self._headers, (b"content-type", b"application/json"), (b"host", b"slipway")]
        return {
            **self._scope,
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": headers,
            "state": {},
        }

    async def reply(self, data: bytes) -> None:
        """Send a message once the client has read enough of the earlier ones: a text, or bytes that are no text."""
        await self._writable.wait()
        try:
            message: Event = TextMessage(data=data.decode())
        except UnicodeDecodeError:
            message = BytesMessage(data=data)
        self._send(message)

    async def closed(self) -> None:
        """Wait until the client has left."""
        await self._closed.wait()

    async def call(self, *arguments: Any) -> None:
        await self._app(*arguments)


class _Exchange:
    """One request to the application. `forwards`: send its reply as messages."""

    def __init__(self, socket: WebSocketProtocol, *, forwards: bool = True) -> None:
        self._socket, self._forwards = socket, forwards
        self.status = 500
        self.parts: list[bytes] = []
        self._streams = False
        self._body = b""
        self._is_read = False

    async def run(self, method: str, path: str, body: bytes) -> None:
        self._body = body
        await self._socket.call(self._socket.scope(method, path), self._receive, self._take)
        if self._forwards and not self._streams:
            await self._socket.reply(b"".join(self.parts) or orjson.dumps({"status": self.status}))

    async def _receive(self) -> Message:
        if not self._is_read:
            self._is_read = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._socket.closed()
        return {"type": "http.disconnect"}

    async def _take(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            kinds = [value for name, value in message.get("headers", ()) if name.lower() == b"content-type"]
            self._streams = self._forwards and any(kind.startswith(b"text/event-stream") for kind in kinds)
            return
        self.parts.append(message.get("body", b""))
        if self._streams:
            *records, rest = b"".join(self.parts).split(b"\n\n")
            self.parts = [rest]
            for record in records:
                data = b"\n".join(line[5:].strip() for line in record.splitlines() if line.startswith(b"data:"))
                if data:
                    await self._socket.reply(data)
