"""Detection of turns in audio, and its events in /v1/realtime."""

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
