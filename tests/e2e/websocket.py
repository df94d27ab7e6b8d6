"""A WebSocket client for JSON events."""

import json
import socket
from typing import Any
from urllib.parse import urlsplit

from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection, CloseConnection, Message, RejectConnection, Request, TextMessage


class Refused(Exception):
    """The server did not open a WebSocket."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class WebSocketClient:
    def __init__(self, url: str, headers: dict[str, str] | None = None, protocols: tuple[str, ...] = ()) -> None:
        """Open a connection. Raises Refused."""
        parts = urlsplit(url)
        self._socket = socket.create_connection((parts.hostname or "", parts.port or 80), timeout=60)
        self._connection, self._text = WSConnection(ConnectionType.CLIENT), ""
        self._events: list[dict[str, Any]] = []
        self.closed: int | None = None
        self._open = False
        extra = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        target = f"{parts.path}?{parts.query}" if parts.query else parts.path
        request = Request(host=parts.netloc, target=target, extra_headers=extra, subprotocols=list(protocols))
        self._socket.sendall(self._connection.send(request))
        while not self._open:
            self._read()

    def send(self, kind: str, **fields: Any) -> None:
        self.send_text(json.dumps({"type": kind, **fields}))

    def send_text(self, text: str) -> None:
        self._socket.sendall(self._connection.send(Message(data=text)))

    def receive(self) -> dict[str, Any]:
        """Return the next event."""
        while not self._events:
            assert self.closed is None, f"closed with {self.closed}"
            self._read()
        return self._events.pop(0)

    def close(self) -> None:
        self._socket.close()

    def _read(self) -> None:
        data = self._socket.recv(1 << 16)
        self._connection.receive_data(data or None)
        for event in self._connection.events():
            match event:
                case AcceptConnection():
                    self._open = True
                case RejectConnection(status_code=status):
                    self._socket.close()
                    raise Refused(status)
                case TextMessage(data=text, message_finished=complete):
                    self._text += text
                    if complete:
                        self._events.append(json.loads(self._text))
                        self._text = ""
                case CloseConnection(code=code):
                    self.closed = code
