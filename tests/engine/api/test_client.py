"""Tests of the gateway's side of an engine socket: the stream of one request from a scripted peer."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from engine.api.client import EngineClient, Interrupted
from engine.api.errors import EngineGone, RequestError, StepError
from engine.api.frames import FrameReader, encode, to_engine
from engine.api.messages import Abort, Delta, Failed, FromEngine, Output, Ready, Sampling, Submit, ToEngine

READY = Ready(max_context=64, kv_blocks=9, block_tokens=4, kv_tokens=36, weight_bytes=1, kv_bytes=1, seconds={}, pid=1)


def ask(name: str = "a") -> Submit:
    return Submit(name, (1, 2), Sampling(), max_tokens=9)


def gains(*deltas: Delta) -> Output:
    return Output(1, deltas)


class Peer:
    """The engine's side of the socket: records received messages and can send messages."""

    def __init__(self) -> None:
        self.heard: list[ToEngine] = []
        self._writer: asyncio.StreamWriter | None = None
        self._frames = FrameReader()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.say(READY)
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                for body in self._frames.feed(data):
                    self.heard += to_engine(body)
        writer.close()

    def say(self, *messages: FromEngine) -> None:
        assert self._writer is not None, "a client is connected"
        self._writer.write(encode(list(messages)))

    def leave(self) -> None:
        assert self._writer is not None, "a client is connected"
        self._writer.close()


@contextlib.asynccontextmanager
async def connected(path: Path) -> AsyncIterator[tuple[EngineClient, Peer]]:
    peer = Peer()
    async with await asyncio.start_unix_server(peer.serve, str(path)):
        client = EngineClient(str(path))
        running = asyncio.create_task(client.run())
        try:
            await client.wait_ready()
            yield client, peer
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


Body = Callable[[EngineClient, Peer], Awaitable[None]]


@pytest.fixture
def played(tmp_path: Path) -> Callable[[Body], None]:
    def play(body: Body) -> None:
        async def run() -> None:
            async with asyncio.timeout(100), connected(tmp_path / "engine.sock") as (client, peer):
                await body(client, peer)

        asyncio.run(run())

    return play


async def until(check: Callable[[], bool]) -> None:
    while not check():
        await asyncio.sleep(0.001)


def test_nothing_is_sent_before_a_stream_is_read(played: Callable[[Body], None]) -> None:
    async def body(client: EngineClient, peer: Peer) -> None:
        unread, read = client.generate(ask("unread")), client.generate(ask("read"))
        reading = asyncio.ensure_future(anext(read))
        await until(lambda: bool(peer.heard))
        await unread.aclose()
        peer.say(gains(Delta("read", (5,), finish="length")))
        assert (await reading).ids == (5,)
        assert peer.heard == [ask("read")] and client.open == 0
        assert [delta async for delta in unread] == [], "what was left has nothing more to give"

    played(body)


def test_deltas_are_merged_for_a_slow_reader(played: Callable[[Body], None]) -> None:
    async def body(client: EngineClient, peer: Peer) -> None:
        stream = client.generate(ask())
        first = asyncio.ensure_future(anext(stream))
        await until(lambda: bool(peer.heard))
        peer.say(gains(Delta("a", (1,))))
        assert (await first).ids == (1,)
        peer.say(gains(Delta("a", (2,))), gains(Delta("a", (3, 4))), gains(Delta("a", (5,), finish="length")))
        await until(lambda: stream.emitted == [1, 2, 3, 4, 5])
        assert [(delta.ids, delta.finish) async for delta in stream] == [((2, 3, 4, 5), "length")]
        assert not any(isinstance(message, Abort) for message in peer.heard)

    played(body)


@pytest.mark.parametrize("ids", [(), (7, 8)])
@pytest.mark.parametrize("told_at_once", [True, False])
def test_error_follows_earlier_tokens(played: Callable[[Body], None], ids: tuple[int, ...], told_at_once: bool) -> None:
    """The last delta of a request that failed may be empty, and its reason may come with it or in a later frame."""

    async def body(client: EngineClient, peer: Peer) -> None:
        stream, other, got = client.generate(ask()), client.generate(ask("other")), []

        async def read() -> None:
            async for delta in stream:
                got.append((delta.ids, delta.finish))

        reading, beside = asyncio.ensure_future(read()), asyncio.ensure_future(anext(other))
        await until(lambda: len(peer.heard) == 2)
        failed = Failed("a", StepError.code, "not a number")
        if told_at_once:
            peer.say(gains(Delta("a", ids, finish="error")), failed)
        else:
            peer.say(gains(Delta("a", ids, finish="error")))
            peer.say(gains(Delta("other", (1,))))
            await beside  # so the first one was read too
            peer.say(failed)
        with pytest.raises(StepError, match="not a number"):
            await reading
        assert got == ([(ids, None)] if ids else [])
        assert [delta async for delta in stream] == [] and client.open == 1
        beside.cancel()
        await asyncio.gather(beside, return_exceptions=True)

    played(body)


def test_leaving_a_stream_aborts_it_once(played: Callable[[Body], None]) -> None:
    async def body(client: EngineClient, peer: Peer) -> None:
        left, closed = client.generate(ask("left")), client.generate(ask("closed"))
        waiting = asyncio.ensure_future(anext(left))
        other = asyncio.ensure_future(anext(closed))
        await until(lambda: len(peer.heard) == 2)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await left.aclose()
        peer.say(gains(Delta("closed", (1,))))
        await other
        await closed.aclose()
        await until(lambda: len(peer.heard) == 4)
        assert peer.heard[2:] == [Abort(("left",)), Abort(("closed",))] and client.open == 0

    played(body)


def test_lost_engine_is_reported_after_its_last_delta(played: Callable[[Body], None]) -> None:
    async def body(client: EngineClient, peer: Peer) -> None:
        stream = client.generate(ask())
        first = asyncio.ensure_future(anext(stream))
        await until(lambda: bool(peer.heard))
        peer.say(gains(Delta("a", (1,))), gains(Delta("a", (2,))))
        peer.leave()
        got = (await first).ids
        with pytest.raises(Interrupted) as caught:
            async for delta in stream:
                got += delta.ids
        assert got == caught.value.emitted == (1, 2)

    played(body)


def test_invalid_streams_are_rejected_without_effect_on_others(played: Callable[[Body], None]) -> None:
    async def body(client: EngineClient, peer: Peer) -> None:
        stream, twin = client.generate(ask()), client.generate(ask())
        first = asyncio.ensure_future(anext(stream))
        await until(lambda: bool(peer.heard))
        with pytest.raises(RequestError, match="in use"):
            await anext(twin)
        await twin.aclose()
        peer.say(gains(Delta("a", (1,), finish="length")))
        assert (await first).finish == "length"
        peer.leave()
        await until(lambda: client.state.kind != "ready")
        with pytest.raises(EngineGone, match="not ready"):
            await anext(client.generate(ask()))
        assert peer.heard == [ask()]

    played(body)
