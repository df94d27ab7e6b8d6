"""The WebSockets of the gateway on real sockets: handshakes, hostile clients, and both kinds beside each other."""

import asyncio
import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection, CloseConnection, Ping, Request, TextMessage
from wsproto.extensions import PerMessageDeflate

from appliance.server.http import websocket
from tests.appliance.conftest import Gateway, until

STREAM, REALTIME = "/invocations-bidirectional-stream", "/v1/realtime"
UPGRADE = (
    "Host: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)


class Client:
    """A WebSocket on a plain socket."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.connection = WSConnection(ConnectionType.CLIENT)
        self.pending: list[Any] = []

    def send(self, event: Any) -> None:
        self.socket.sendall(self.connection.send(event))

    def next(self) -> Any:
        while not self.pending:
            data = self.socket.recv(65536)
            self.connection.receive_data(data or None)
            self.pending += self.connection.events()
        return self.pending.pop(0)

    def ask(self, text: str) -> Any:
        self.send(TextMessage(data=text))
        reply = ""
        while True:
            event = self.next()
            assert isinstance(event, TextMessage), event
            reply += event.data
            if event.message_finished:
                return json.loads(reply)


@pytest.fixture
def gateway(start_gateway: Callable[..., Gateway], new_engine: Callable[..., Any]) -> Gateway:
    """A gateway of a model that generates and transcribes."""
    return start_gateway(new_engine().start(), tasks=("generate", "transcribe"))


@contextmanager
def connected(gateway: Gateway) -> Iterator[socket.socket]:
    address = httpx.URL(gateway.url)
    with socket.create_connection((address.host, address.port), 60) as connection:
        yield connection


@contextmanager
def opened(gateway: Gateway, path: str) -> Iterator[Client]:
    with connected(gateway) as connection:
        client = Client(connection)
        client.send(Request(host="a", target=path))
        assert isinstance(client.next(), AcceptConnection)
        yield client


def active(gateway: Gateway) -> float:
    return gateway.metric("slipway_connections", state="active")


def exchange(gateway: Gateway, head: str, body: bytes = b"") -> bytes:
    """Return all bytes of the reply to a request."""
    with connected(gateway) as connection:
        connection.sendall(head.encode("latin-1") + b"\r\n" + body)
        pieces = []
        while piece := connection.recv(65536):
            pieces.append(piece)
        return b"".join(pieces)


def test_both_sockets_open_beside_each_other(gateway: Gateway) -> None:
    with opened(gateway, STREAM) as stream, opened(gateway, REALTIME) as realtime:
        assert realtime.next().data.startswith('{"type":"session.created"')
        assert stream.ask("{")["error"]["code"] == 400
        assert realtime.ask("[1]")["type"] == "error"
        assert stream.ask("[1]")["error"]["code"] == 400
    until("both connections are removed", lambda: active(gateway) == 1)


@pytest.mark.parametrize("path", [STREAM, REALTIME])
def test_a_socket_opens_after_other_requests_of_its_connection(gateway: Gateway, path: str) -> None:
    with connected(gateway) as connection:
        connection.sendall(b"GET /live HTTP/1.1\r\nHost: a\r\n\r\n")
        reply = b""
        while not reply.endswith(b'{"status":"live"}'):
            reply += connection.recv(65536)
        client = Client(connection)
        client.send(Request(host="a", target=path))
        assert isinstance(client.next(), AcceptConnection)


def test_handshakes_are_no_requests(gateway: Gateway) -> None:
    """The handler of unknown paths is not called for the path of a socket."""
    with opened(gateway, STREAM) as stream:
        stream.ask("{")
    handlers = [dict(labels).get("handler") for _, labels in gateway.samples()]
    assert "/invocations" in handlers and "none" not in handlers


@pytest.mark.parametrize("path", [STREAM, REALTIME])
@pytest.mark.parametrize("host", ["\xff", "a\r\nHost: b"])
def test_a_handshake_with_an_invalid_host_is_400(gateway: Gateway, path: str, host: str, caplog: Any) -> None:
    head = f"GET {path} HTTP/1.1\r\n" + UPGRADE.replace("Host: a", f"Host: {host}")
    assert exchange(gateway, head).startswith(b"HTTP/1.1 400")
    until("the connection is removed", lambda: active(gateway) == 1)
    assert not [one for one in caplog.records if one.levelname == "ERROR"]


@pytest.mark.parametrize("path", [STREAM, REALTIME])
def test_a_handshake_with_a_body_is_no_leak(gateway: Gateway, path: str) -> None:
    head = f"GET {path} HTTP/1.1\r\n{UPGRADE}Content-Length: 3\r\n"
    with connected(gateway) as connection:
        connection.sendall(head.encode() + b"\r\n")
        connection.sendall(b"abc")
        assert connection.recv(65536)
    until("the connection is removed", lambda: active(gateway) == 1)


@pytest.mark.parametrize("path", [STREAM, REALTIME])
def test_a_client_that_pings_and_reads_nothing_fills_no_memory(gateway: Gateway, path: str) -> None:
    """The server stops to read once its own replies are not read, so the client cannot send forever."""
    with opened(gateway, path) as client:
        client.socket.settimeout(2)
        pings = client.connection.send(Ping(payload=b"x" * 100)) * 10_000
        with pytest.raises(TimeoutError):
            for _ in range(60):
                client.socket.sendall(pings)


def test_messages_that_wait_have_the_size_of_one_body(
    start_gateway: Callable[..., Gateway], new_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    held = websocket._Exchange.run

    async def run(self: Any, method: str, path: str, body: bytes) -> None:
        await (held(self, method, path, body) if method == "GET" else asyncio.Event().wait())

    monkeypatch.setattr(websocket._Exchange, "run", run)
    gateway = start_gateway(new_engine().start(), **{"limits.max_body": 4096})
    with opened(gateway, STREAM) as client:
        for _ in range(3):
            client.send(TextMessage(data="a" * 2500))
        event = client.next()
        assert isinstance(event, CloseConnection) and event.code == 1013


def test_an_internal_error_closes_the_stream(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def failing(self: Any, data: bytes) -> None:
        raise ValueError("planted")

    monkeypatch.setattr(websocket.WebSocketProtocol, "reply", failing)
    with opened(gateway, STREAM) as client:
        client.send(TextMessage(data="{"))
        event = client.next()
        assert isinstance(event, CloseConnection) and event.code == 1011
    assert "internal error" in caplog.text


def test_a_stream_with_a_request_is_not_idle(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    held = websocket._Exchange.run

    async def run(self: Any, method: str, path: str, body: bytes) -> None:
        await asyncio.sleep(0.5 if method == "POST" else 0)
        await held(self, method, path, body)

    monkeypatch.setattr(websocket._Exchange, "run", run)
    monkeypatch.setattr(websocket, "IDLE_S", 0.2)
    with opened(gateway, STREAM) as client:
        assert client.ask("{")["error"]["code"] == 400
        event = client.next()
        assert isinstance(event, CloseConnection) and event.code == 1000, "an idle socket is closed"


def test_realtime_refuses_compression(gateway: Gateway) -> None:
    """A few bytes could otherwise become hundreds of megabytes, before the size of the message is known."""
    with connected(gateway) as connection:
        client = Client(connection)
        client.send(Request(host="a", target=REALTIME, extensions=[PerMessageDeflate()]))
        event = client.next()
        assert isinstance(event, AcceptConnection) and not event.extensions
