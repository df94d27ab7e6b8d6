"""Detection of turns in audio, and its events in /v1/realtime."""

import asyncio
import base64
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient, WebSocketTestSession

from appliance.server.speech import realtime
from appliance.server.speech.turns import Turn, TurnDetection, TurnDetector
from tests.appliance.server.http.conftest import checkpoint, make_gateway  # noqa: F401
from tests.appliance.server.speech.conftest import SpeechGateway

RATE = 16_000
SPOKEN = ((0.6, 0.0), (1.0, 0.3), (0.8, 0.0), (0.5, 0.3), (0.7, 0.0))
"""Seconds and amplitudes: two turns, from 0.6 s to 1.6 s and from 2.4 s to 2.9 s."""

USUAL = TurnDetection()


def audio(parts: tuple[tuple[float, float], ...] = SPOKEN) -> bytes:
    noise = np.random.default_rng(1)
    pieces = [noise.normal(0, 1e-4, int(RATE * seconds)) for seconds, _ in parts]
    tones = [np.sin(np.arange(len(piece)) * 0.3) * loud for piece, (_, loud) in zip(pieces, parts, strict=True)]
    samples = np.concatenate([piece + tone for piece, tone in zip(pieces, tones, strict=True)])
    return (samples * 32_767).astype("<i2").tobytes()


def turns(data: bytes, piece: int, settings: TurnDetection = USUAL, longest: int = 10**9) -> list[Turn]:
    detector = TurnDetector(settings, RATE, longest)
    return [turn for at in range(0, len(data), piece) for turn in detector.feed(data[at : at + piece])]


@pytest.mark.parametrize("piece", [1, 641, 30_001, 10**6])
def test_turns_do_not_depend_on_the_division_of_the_audio(piece: int) -> None:
    data = audio() if piece > 1 else audio()[: 2 * RATE * 2]
    found = turns(data, piece)
    expected = [Turn("started", 9_600), Turn("stopped", 25_600 + 8_000)]
    assert found[:2] == expected[: len(found)]
    if piece > 1:
        assert found[2:] == [Turn("started", 38_400), Turn("stopped", 46_400 + 8_000)]


def test_clicks_and_quiet_speech_are_no_turns() -> None:
    clicks = audio(((0.2, 0.0), (0.03, 0.5), (0.2, 0.0), (0.03, 0.5), (0.6, 0.0)))
    assert turns(clicks, 4096) == []
    quiet = audio(((0.2, 0.0), (1.0, 0.005), (0.6, 0.0)))
    assert turns(quiet, 4096) == []
    assert [turn.kind for turn in turns(quiet, 4096, TurnDetection(threshold=0.1))] == ["started", "stopped"]


def test_a_pause_within_speech_does_not_end_it() -> None:
    data = audio(((0.2, 0.0), (0.5, 0.3), (0.4, 0.0), (0.5, 0.3), (0.6, 0.0)))
    assert [turn.kind for turn in turns(data, 999)] == ["started", "stopped"]
    found = turns(data, 999, TurnDetection(silence_duration_ms=200))
    assert [turn.kind for turn in found] == ["started", "stopped"] * 2


def test_long_speech_is_cut() -> None:
    found = turns(audio(((2.5, 0.3),)), 4096, longest=RATE)
    assert [turn.sample for turn in found if turn.kind == "stopped"] == [RATE, 2 * RATE]


def received(socket: WebSocketTestSession, kind: str) -> dict[str, Any]:
    event: dict[str, Any] = socket.receive_json()
    assert event["type"] == kind, event
    return event


def test_the_server_commits_where_speech_ends(gateway: SpeechGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[int] = []
    original = realtime.resampled
    monkeypatch.setattr(realtime, "resampled", lambda data, rate: heard.append(len(data) // 2) or original(data, rate))
    with TestClient(gateway.app) as client, client.websocket_connect("/v1/realtime") as socket:
        received(socket, "session.created")
        given = {"format": {"type": "audio/pcm", "rate": RATE}, "turn_detection": {"type": "server_vad"}}
        socket.send_json({"type": "session.update", "session": {"audio": {"input": given}}})
        shown = received(socket, "session.updated")["session"]["audio"]["input"]["turn_detection"]
        assert shown == {"type": "server_vad", "threshold": 0.5, "prefix_padding_ms": 300, "silence_duration_ms": 500}
        data, previous = audio(), None
        for begin, end in ((600, 2_100), (2_400, 3_400)):
            first, last = (0, 72_000) if begin == 600 else (72_000, len(data))
            for at in range(first, last, 9_001):
                piece = base64.b64encode(data[at : min(last, at + 9_001)]).decode()
                socket.send_json({"type": "input_audio_buffer.append", "audio": piece})
            started = received(socket, "input_audio_buffer.speech_started")
            stopped = received(socket, "input_audio_buffer.speech_stopped")
            assert (started["audio_start_ms"], stopped["audio_end_ms"]) == (begin, end)
            committed = received(socket, "input_audio_buffer.committed")
            assert started["item_id"] == stopped["item_id"] == committed["item_id"]
            assert committed["previous_item_id"] == previous
            previous = committed["item_id"]
            received(socket, "conversation.item.added")
            while not (event := socket.receive_json())["type"].endswith(".completed"):
                assert event["type"].endswith(".delta"), event
            assert event["item_id"] == previous
        for wrong, what in (
            ({"type": "semantic_vad"}, "of the type server_vad"),
            ({"type": "server_vad", "threshold": 2}, "threshold must be a number from 0 to 1"),
            ({"type": "server_vad", "silence_duration_ms": 1.5}, "silence_duration_ms must be"),
            ({"type": "server_vad", "eagerness": "low"}, "'eagerness' is not supported"),
        ):
            socket.send_json({"type": "session.update", "session": {"turn_detection": wrong}})
            assert what in received(socket, "error")["error"]["message"]
        socket.send_json({"type": "input_audio_buffer.clear"})
        received(socket, "input_audio_buffer.cleared")
        socket.send_json({"type": "session.update", "session": {"turn_detection": None}})
        assert received(socket, "session.updated")["session"]["audio"]["input"]["turn_detection"] is None
    # An item has 0.3 s before the speech and 0.5 s after it.
    assert heard == [int(1.8 * RATE), int(1.3 * RATE)]


def connected(socket: WebSocketTestSession, **detection: Any) -> None:
    received(socket, "session.created")
    given = {"format": {"type": "audio/pcm", "rate": RATE}, "turn_detection": {"type": "server_vad", **detection}}
    socket.send_json({"type": "session.update", "session": {"audio": {"input": given}}})


def append(socket: WebSocketTestSession, data: bytes) -> None:
    socket.send_json({"type": "input_audio_buffer.append", "audio": base64.b64encode(data).decode()})


def test_speech_without_a_pause_is_cut_below_the_longest_audio(
    make_speech: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the buffer is full before the speech is cut, and the server refuses all further audio."""
    seconds: list[float] = []

    async def transcribed(self: realtime.Connection, item: realtime.Item) -> None:
        seconds.append(item.seconds)

    monkeypatch.setattr(realtime.Connection, "_transcribe_item", transcribed)
    app = make_speech(**{"limits.max_audio_seconds": 2.0}).app
    data = audio(((0.5, 0.0), (6.5, 0.3)))
    with TestClient(app) as client, client.websocket_connect("/v1/realtime") as socket:
        connected(socket)
        received(socket, "session.updated")
        for at in range(0, len(data), RATE // 2):
            append(socket, data[at : at + RATE // 2])
        for _ in range(4):
            for kind in ("speech_started", "speech_stopped", "committed"):
                received(socket, f"input_audio_buffer.{kind}")
            received(socket, "conversation.item.added")
        socket.send_json({"type": "session.update", "session": {"turn_detection": None}})
        received(socket, "session.updated")
        long = {"type": "server_vad", "prefix_padding_ms": 2_000}
        socket.send_json({"type": "session.update", "session": {"turn_detection": long}})
        fault = received(socket, "error")["error"]
        assert "prefix_padding_ms is not shorter than 2 seconds" in fault["message"]
        assert fault["param"].endswith("prefix_padding_ms")
    assert len(seconds) == 4 and 1.9 < max(seconds) <= 2.0, seconds


def test_turns_after_a_refused_one_have_their_times(gateway: SpeechGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    async def wait(self: realtime.Connection, item: realtime.Item) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(realtime.Connection, "_transcribe_item", wait)
    monkeypatch.setattr(realtime, "MAX_WAITING", 1)
    count = 4
    with TestClient(gateway.app) as client, client.websocket_connect("/v1/realtime") as socket:
        connected(socket, silence_duration_ms=100)
        received(socket, "session.updated")
        append(socket, audio(((0.2, 0.0), (0.2, 0.3), (0.6, 0.0)) * count))  # a turn begins every second
        begins: list[int] = []
        refused, event = 0, {"type": ""}
        while len(begins) < count or event["type"] != "error":
            event = socket.receive_json()
            if event["type"].endswith("speech_started"):
                begins.append(event["audio_start_ms"])
            elif event["type"] == "error":
                refused += 1
                assert "wait for their transcripts" in event["error"]["message"]
    assert begins == [200 + 1000 * number for number in range(count)] and refused >= 2


@pytest.mark.parametrize("name", ["type", "event_id"])
def test_events_of_deep_nesting_are_refused(gateway: SpeechGateway, name: str) -> None:
    """JSON is read up to 1,024 levels and written up to 254."""
    with TestClient(gateway.app) as client, client.websocket_connect("/v1/realtime") as socket:
        received(socket, "session.created")
        socket.send_text(f'{{"{name}": {"[" * 1_020}{"]" * 1_020}}}')
        assert "is not supported" in received(socket, "error")["error"]["message"]
