"""Amazon SageMaker's bidirectional streams (SM-27), with an independent client."""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest
from wsproto import ConnectionType, WSConnection
from wsproto.events import (
    AcceptConnection,
    CloseConnection,
    Ping,
    Pong,
    RejectConnection,
    RejectData,
    Request,
    TextMessage,
)

from tests.contracts.conftest import KEY

PATH = "/invocations-bidirectional-stream"
PROMPT = {"prompt": "Hello", "max_tokens": 2, "temperature": 0}


class Client:
    """A WebSocket on a plain socket."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.socket = socket.create_connection((parts.hostname, parts.port), 60)
        self.connection = WSConnection(ConnectionType.CLIENT)
        self.pending: list = []

    def send(self, event) -> None:
        self.socket.sendall(self.connection.send(event))

    def next(self):
        while not self.pending:
            data = self.socket.recv(65536)
            self.connection.receive_data(data or None)
            self.pending += self.connection.events()
        return self.pending.pop(0)

    def message(self) -> str:
        """Return the next complete text message."""
        text = ""
        while True:
            event = self.next()
            assert isinstance(event, TextMessage), event
            text += event.data
            if event.message_finished:
                return text


@contextmanager
def opened(url: str, key: str | None = KEY, path: str = PATH) -> Iterator[Client]:
    client = Client(url)
    headers = [("Authorization", f"Bearer {key}")] if key else []
    client.send(Request(host="slipway", target=path, extra_headers=headers))
    try:
        yield client
    finally:
        client.socket.close()


def test_sm_27_messages_are_invocations_and_streams_come_record_by_record(url, client):
    long = {**PROMPT, "max_tokens": 40}  # a busy machine merges some tokens
    whole = client.post("/invocations", json=long).json()["choices"][0]["text"]
    with opened(url) as ws:
        assert isinstance(ws.next(), AcceptConnection)
        ws.send(TextMessage(data=json.dumps(long)))
        assert json.loads(ws.message())["choices"][0]["text"] == whole
        ws.send(TextMessage(data=json.dumps({**long, "stream": True})))
        ws.send(TextMessage(data="{"))
        records = []
        while (text := ws.message()) != "[DONE]":
            records.append(json.loads(text))
        assert "".join(one["choices"][0]["text"] for one in records if one["choices"]) == whole and len(records) >= 2
        assert json.loads(ws.message())["error"]["code"] == 400, "a wrong message does not end the socket"
        ws.send(Ping(payload=b"x"))
        assert isinstance(ws.next(), Pong)
        ws.send(CloseConnection(code=1000))
        assert isinstance(ws.next(), CloseConnection)


def test_sm_27_a_message_may_have_several_frames(url):
    with opened(url) as ws:
        assert isinstance(ws.next(), AcceptConnection)
        text = json.dumps(PROMPT)
        ws.send(TextMessage(data=text[:9], message_finished=False))
        ws.send(TextMessage(data=text[9:]))
        assert json.loads(ws.message())["object"] == "text_completion"


@pytest.mark.parametrize("key", [None, "sk-wrong"])
def test_sm_27_a_handshake_without_a_key_is_401(url, key):
    with opened(url, key) as ws:
        event = ws.next()
        assert isinstance(event, RejectConnection) and event.status_code == 401
        body = b""
        while isinstance(event := ws.next(), RejectData):
            body += event.data
            if event.body_finished:
                break
        assert json.loads(body)["error"]["code"] == 401


def test_sm_27_other_paths_have_no_websocket(url):
    with opened(url, path="/v1/models") as ws:
        event = ws.next()
        assert isinstance(event, RejectConnection) and event.status_code == 200
