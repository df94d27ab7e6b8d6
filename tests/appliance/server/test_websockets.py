"""The WebSockets of the gateway on real sockets: handshakes, hostile clients, and both kinds together."""

import asyncio
import base64
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection, CloseConnection, Ping, Request, TextMessage
from wsproto.extensions import PerMessageDeflate

from appliance.security.keys import parse_keys
from appliance.server.http import websocket
from appliance.server.speech import realtime
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
        return self.receive()

    def receive(self) -> Any:
        """Return the next message."""
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


def test_both_sockets_are_open_together(gateway: Gateway) -> None:
    with opened(gateway, STREAM) as stream, opened(gateway, REALTIME) as session:
        assert session.next().data.startswith('{"type":"session.created"')
        assert stream.ask("{")["error"]["code"] == 400
        assert session.ask("[1]")["type"] == "error"
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


SILENCE = base64.b64encode(bytes(4800)).decode()  # 0.1 s
TRANSCRIPTION = "conversation.item.input_audio_transcription"


def event(kind: str, **fields: Any) -> str:
    return json.dumps({"type": kind, **fields})


def commit(client: Client) -> Any:
    """Commit a buffer, skip the two events of the new item, and return the next event."""
    client.send(TextMessage(data=event("input_audio_buffer.append", audio=SILENCE)))
    assert client.ask(event("input_audio_buffer.commit"))["type"] == "input_audio_buffer.committed"
    assert client.receive()["type"] == "conversation.item.added"
    return client.receive()


@contextmanager
def realtime_session(gateway: Gateway, key: str | None = None) -> Iterator[Client]:
    with connected(gateway) as connection:
        client = Client(connection)
        headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
        client.send(Request(host="a", target=REALTIME, extra_headers=headers))
        assert isinstance(client.next(), AcceptConnection)
        assert client.receive()["type"] == "session.created"
        yield client


def test_a_refused_realtime_handshake_has_the_status_of_its_error(
    start_gateway: Callable[..., Gateway], new_engine: Callable[..., Any]
) -> None:
    gateway = start_gateway(new_engine().start(), tasks=("transcribe",), keys=["sk-a name=alice"])
    head, key = f"GET {REALTIME}%s HTTP/1.1\r\n{UPGRADE}", "Authorization: Bearer sk-a\r\n"
    for query, headers, status in (
        ("", "", 401),
        ("?model=other", key, 404),
        ("", f"{key}Origin: https://evil.example\r\n", 403),
    ):
        reply = exchange(gateway, head % query + headers)
        assert int(reply.split()[1]) == status
        assert json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["code"] == status
    gateway.service.closed = True
    assert exchange(gateway, head % "" + key).split()[1] == b"503"


def test_an_audio_text_outside_of_ascii_is_an_event_error(gateway: Gateway) -> None:
    with realtime_session(gateway) as client:
        assert (
            "base64"
            in client.ask(event("input_audio_buffer.append", audio="\u00e9\u00e9\u00e9\u00e9"))["error"]["message"]
        )
        assert client.ask(event("input_audio_buffer.clear"))["type"] == "input_audio_buffer.cleared"


def test_an_item_after_an_unexpected_error_is_transcribed(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    faults = [KeyError("planted")]

    async def pieces(*_: Any) -> Any:
        if faults:
            raise faults.pop()

        async def found() -> Any:
            yield "text"

        return found()

    monkeypatch.setattr(realtime, "_pieces", pieces)
    with realtime_session(gateway) as client:
        failed = commit(client)
        assert failed["type"] == f"{TRANSCRIPTION}.failed" and failed["error"]["code"] == 500
        assert commit(client)["delta"] == "text"
        assert client.receive()["transcript"] == "text"
        until("no request is open", lambda: gateway.service.open_requests == 0)
    assert "unexpected KeyError" in caplog.text


def test_a_removed_key_ends_the_transcripts_of_its_connection(
    start_gateway: Callable[..., Gateway], new_engine: Callable[..., Any]
) -> None:
    gateway = start_gateway(new_engine().start(), tasks=("transcribe",), keys=["sk-a name=alice"])
    with realtime_session(gateway, "sk-a") as client:
        gateway.service.keys = tuple(parse_keys(["sk-b name=bob"], "keys"))
        failed = commit(client)
        assert failed["type"] == f"{TRANSCRIPTION}.failed" and failed["error"]["code"] == 401


def test_a_drain_completes_committed_items_and_a_lost_client_ends_its_items(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()

    async def pieces(*_: Any) -> Any:
        async def found() -> Any:
            while not goes_on.is_set():
                await asyncio.sleep(0.01)
            yield "text"

        return found()

    monkeypatch.setattr(realtime, "_pieces", pieces)
    append = event("input_audio_buffer.append", audio=SILENCE)
    with realtime_session(gateway) as client, realtime_session(gateway) as lost:
        for each in (client, lost):
            for _ in range(2):
                each.send(TextMessage(data=append))
                each.ask(event("input_audio_buffer.commit"))
                each.receive()
        assert gateway.service.open_requests == 4
        lost.socket.close()
        until("the items of the lost client have ended", lambda: gateway.service.open_requests == 2)
        gateway.service.closed = True
        goes_on.set()
        kinds = [client.receive()["type"].removeprefix(TRANSCRIPTION) for _ in range(4)]
        assert kinds == [".delta", ".completed"] * 2
        client.send(TextMessage(data=append))
        close = client.next()
        assert isinstance(close, CloseConnection) and close.code == 1001
    until("no request is open", lambda: gateway.service.open_requests == 0)


def test_audio_without_a_transcript_is_limited(
    start_gateway: Callable[..., Gateway], new_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def pieces(*_: Any) -> Any:
        await asyncio.Event().wait()

    monkeypatch.setattr(realtime, "_pieces", pieces)
    limits = {"limits.max_audio_seconds": 0.14}
    gateway = start_gateway(new_engine().start(), tasks=("transcribe",), **limits)
    append = TextMessage(data=event("input_audio_buffer.append", audio=SILENCE))
    with realtime_session(gateway) as client:
        for _ in range(2):
            client.send(append)
            assert client.ask(event("input_audio_buffer.commit"))["type"] == "input_audio_buffer.committed"
            client.receive()
        client.send(append)
        client.send(append)
        assert "twice the server's" in client.receive()["error"]["message"]
