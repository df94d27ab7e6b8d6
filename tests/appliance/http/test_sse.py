"""Server-sent events: records, comments, errors (docs/http.md)."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest

from appliance.http.sse import DONE, KEEP_ALIVE, guarded, kept_alive, record


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


def test_a_silent_stream_gets_comments_and_loses_nothing() -> None:
    """Comments come while the next record is waited for, the record follows."""

    async def run() -> list[bytes]:
        gate = asyncio.Event()

        async def slow() -> AsyncIterator[bytes]:
            yield b"1"
            await gate.wait()
            yield b"2"

        seen = []
        async for each in kept_alive(slow(), 0.001):
            seen.append(each)
            if seen.count(KEEP_ALIVE) == 2:
                gate.set()
        return seen

    seen = asyncio.run(run())
    assert [each for each in seen if each != KEEP_ALIVE] == [b"1", b"2"]
    assert seen.count(KEEP_ALIVE) >= 2 and seen[0] == b"1"


def test_without_a_pause_there_are_no_comments() -> None:
    assert collected(kept_alive(played(b"1", b"2"), 0)) == [b"1", b"2"]
    assert collected(kept_alive(played(), 0)) == []


def test_an_error_is_the_last_record_before_the_terminator() -> None:
    """ER-17"""
    faulty = guarded(played(b"1", ValueError("x")), lambda error: {"error": str(error)})
    assert collected(faulty) == [b"1", b'data: {"error":"x"}\n\n', DONE]
    assert collected(guarded(played(b"1"), lambda error: {})) == [b"1", DONE]


@pytest.mark.parametrize("pause_s", [0, 5.0])
def test_a_stream_that_is_left_stops_what_it_waits_for(pause_s: float) -> None:
    ended: list[Any] = []

    async def endless() -> AsyncIterator[bytes]:
        try:
            yield b"1"
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def run() -> None:
        stream = kept_alive(endless(), pause_s)
        assert await anext(stream) == b"1"
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    asyncio.run(run())
    assert ended == [True]
