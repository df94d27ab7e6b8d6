"""Server-sent events: records, comments, errors (docs/http.md)."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import nullcontext
from typing import Any

import orjson
import pytest

from appliance.server.http.sse import DONE, KEEP_ALIVE, ChunkEncoder, EventStream, guarded, record


def collected(records: AsyncIterator[bytes]) -> list[bytes]:
    async def run() -> list[bytes]:
        return [each async for each in records]

    return asyncio.run(run())


async def played(*values: bytes | Exception) -> AsyncIterator[bytes]:
    for value in values:
        await asyncio.sleep(0)
        if isinstance(value, Exception):
            raise value
        yield value


def test_a_record_is_one_line_for_every_splitter_of_lines() -> None:
    """U+0085, U+2028 and U+2029 are escaped, other text is not."""
    value = {"text": "a\u0085b\u2028c\u2029d\n中文 🎉"}
    data = record(value)
    assert data.startswith(b"data: ") and data.endswith(b"\n\n")
    assert len(data.decode().splitlines()) == 2
    assert orjson.loads(data[6:]) == value and "中文 🎉".encode() in data


HOSTILE = (
    "", '"', "\\", "]}", "]", '"choices":[', "\x00\x01\x1f\x7f", "\r\n\t\b\f", "\u0085", "\u2028\u2029", "\ufffd\ufeff",
    "\U0001f389", "中文 Ünïcode", "\ue000\uffff\U0010ffff", "a" * 5000 + "\u2028",
)  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
def test_the_chunk_encoder_matches_a_full_serialization(text: str) -> None:
    """The bytes are equal for any text in the parts that are rendered once and in the parts that vary."""
    for head in ({"id": "cmpl-1", "model": "demo"}, {"id": text, "model": f"]}}{text}"}, {text: [[]]}):
        for more in ({}, {"usage": {"total_tokens": 3}}, {"system_fingerprint": text, "ids": [1, 2]}):
            for event_id in ("", "12.7e"):
                item = {"index": 3, "delta": {"content": text}, "logprobs": None, text: text}
                plain = orjson.dumps({**head, "choices": [item], **more}).decode()
                for raw in "\u0085\u2028\u2029":
                    plain = plain.replace(raw, f"\\u{ord(raw):04x}")
                event = f"id: {event_id}\n" if event_id else ""
                wanted = f"{event}data: {plain}\n\n".encode()
                assert ChunkEncoder(head, "choices").record(item, more, event_id) == wanted
                assert record({**head, "choices": [item], **more}, event_id) == wanted


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb"])
def test_half_a_character_is_no_json_in_an_envelope_either(text: str) -> None:
    with pytest.raises(TypeError):
        record({"choices": [text]})
    with pytest.raises(TypeError):
        ChunkEncoder({}, "choices").record(text, {})


class Client:
    """Receiver of an ASGI response: records the bodies; disconnects when `gone` is set."""

    def __init__(self, *, leaves_after: int | None = None) -> None:
        self.bodies: list[bytes] = []
        self.gone = asyncio.Event()
        self._leaves_after = leaves_after
        self.changed = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.body" and message["body"]:
            self.bodies.append(message["body"])
            self.changed.set()
            if len(self.bodies) == self._leaves_after:
                self.gone.set()

    async def reads(self, stream: AsyncIterator[bytes], pause_s: float) -> list[bytes]:
        response = EventStream(stream, nullcontext(), pause_s=pause_s)
        async with asyncio.timeout(100):
            await response({"type": "http"}, self.receive, self.send)
        return self.bodies


def test_a_silent_stream_gets_comments_and_loses_nothing() -> None:
    """Comments are sent until the next record is ready; the record follows."""

    async def run() -> list[bytes]:
        client = Client()

        async def slow() -> AsyncIterator[bytes]:
            yield b"1"
            while client.bodies.count(KEEP_ALIVE) < 2:
                client.changed.clear()
                await client.changed.wait()
            yield b"2"

        return await client.reads(slow(), 0.001)

    seen = asyncio.run(run())
    assert [each for each in seen if each != KEEP_ALIVE] == [b"1", b"2"]
    assert seen.count(KEEP_ALIVE) >= 2 and seen[0] == b"1" and seen[-1] == b"2"


def test_a_stream_that_is_not_silent_gets_no_comments() -> None:
    async def run() -> list[bytes]:
        async def busy() -> AsyncIterator[bytes]:
            for number in range(200):
                await asyncio.sleep(0.001)
                yield b"%d" % number

        return await Client().reads(busy(), 30.0)

    assert asyncio.run(run()) == [b"%d" % number for number in range(200)]


def test_without_a_pause_there_are_no_comments() -> None:
    async def late() -> AsyncIterator[bytes]:
        await asyncio.sleep(0.05)
        yield b"1"

    assert asyncio.run(Client().reads(late(), 0)) == [b"1"]
    assert asyncio.run(Client().reads(played(), 0)) == []


def test_a_client_that_does_not_read_holds_its_stream_back() -> None:
    """Chunks that cannot be sent are not generated."""
    made = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal made
        while True:
            made += 1
            yield b"%d" % made
            await asyncio.sleep(0)

    class Slow(Client):
        async def send(self, message: Any) -> None:
            await super().send(message)
            if message["type"] == "http.response.body":
                await self.gone.wait()

    async def run() -> None:
        client = Slow()
        reading = asyncio.ensure_future(client.reads(endless(), 0))
        for _ in range(100):
            await asyncio.sleep(0)
        assert (client.bodies, made) == ([b"1"], 1)
        client.gone.set()
        await reading

    asyncio.run(run())


def test_behind_its_start_a_stream_goes_past_the_middleware() -> None:
    """Middleware that reads only the response start sees it; the sent messages and their order do not change."""

    async def run() -> None:
        inner, outer = Client(), Client()
        starts: list[Any] = []

        async def start(message: Any) -> None:
            starts.append(message["type"])

        scope = {"type": "http", "state": {"send_body": outer.send}}
        response = EventStream(played(b"1", b"2"), nullcontext())
        await response(scope, inner.receive, start)
        assert starts == ["http.response.start"] and outer.bodies == [b"1", b"2"]

    asyncio.run(run())


def test_an_error_is_the_last_record_before_the_terminator() -> None:
    """ER-17"""
    faulty = guarded(played(b"1", ValueError("x")), lambda error: {"error": str(error)})
    assert collected(faulty) == [b"1", b'data: {"error":"x"}\n\n', DONE]
    assert collected(guarded(played(b"1"), lambda error: {})) == [b"1", DONE]


@pytest.mark.parametrize("pause_s", [0, 0.001, 5.0])
def test_a_disconnected_stream_cancels_its_source(pause_s: float) -> None:
    ended: list[Any] = []

    async def endless() -> AsyncIterator[bytes]:
        try:
            yield b"1"
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def run() -> None:
        await Client(leaves_after=1).reads(endless(), pause_s)
        assert len(asyncio.all_tasks()) == 1, "nothing of it goes on"

    asyncio.run(run())
    assert ended == [True]
