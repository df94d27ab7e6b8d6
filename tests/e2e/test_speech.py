"""Speech recognition through the running service: OpenAI's client, a stream, and a crash of the engine.

The model is a small Whisper with random weights. tests/appliance/server/speech compares its transcripts with those of
transformers.
"""

import base64
import json
import math
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import openai
import pytest
import soxr

from appliance.cli.main import main
from tests.appliance.server.speech.conftest import clip, wav
from tests.documented import documented
from tests.e2e.conftest import Appliance
from tests.e2e.websocket import Refused, WebSocketClient
from tests.engine.speech.whisper import write

FILE = ("clip.wav", wav(clip(9)))
SEEDED = {"seed": 7}  # a model with random weights may need the fallback to higher temperatures


@pytest.fixture(scope="module")
def service(launch: Callable[..., Appliance], tmp_path_factory: pytest.TempPathFactory) -> Appliance:
    folder = tmp_path_factory.mktemp("speech")
    write(folder / "whisper", sure=3)
    (folder / "m.yaml").write_text(
        "apiVersion: slipway/v2\nmodel: {source: {path: whisper}, names: [whisper]}\n"
        "hardware: {device: cpu, threads: 1}\n"
    )
    appliance = launch(folder / "m.yaml")
    appliance.wait_ready()
    return appliance


@pytest.fixture(scope="module")
def client(service: Appliance) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", timeout=120, max_retries=0) as made:
        yield made


def test_the_stream_is_the_transcript_of_the_json_reply(service: Appliance, client: openai.OpenAI) -> None:
    settings = {"file": FILE, "model": "whisper", "language": "en", "temperature": 0.0, "extra_body": SEEDED}
    reply = client.audio.transcriptions.create(**settings, response_format="verbose_json")
    assert reply.text and reply.duration == pytest.approx(9) and reply.segments
    assert reply.segments[-1].end <= 9.001
    events = list(client.audio.transcriptions.create(**settings, stream=True))
    assert events[-1].type == "transcript.text.done" and events[-1].text == reply.text
    assert "".join(one.delta for one in events[:-1]) == reply.text
    assert "slipway_audio_seconds_total" in service.client.get("/metrics").text


def test_a_transcript_survives_a_kill_of_its_engine(service: Appliance, client: openai.OpenAI) -> None:
    settings = {
        "file": ("long.wav", wav(clip(40))),
        "model": "whisper",
        "language": "en",
        "temperature": 0.0,
        "extra_body": SEEDED,
    }
    whole = client.audio.transcriptions.create(**settings).text
    events = client.audio.transcriptions.create(**settings, stream=True)
    first = next(iter(events))
    os.kill(service.pids()["engine-0"], signal.SIGKILL)
    *_, last = events
    assert first.type == "transcript.text.delta" and last.text == whole


def pcm(samples: np.ndarray, rate: int) -> bytes:
    return (soxr.resample(samples, 16_000, rate).clip(-1, 1) * 32_767).astype("<i2").tobytes()


def test_realtime_transcribes_buffers_in_order(service: Appliance, client: openai.OpenAI) -> None:
    """Two items of several appended pieces, at two sampling rates; events that are invalid leave the session open."""
    socket = WebSocketClient(f"{service.url.replace('http', 'ws')}/v1/realtime?intent=transcription")
    created = socket.receive()
    assert (created["type"], created["session"]["audio"]["input"]["format"]["rate"]) == ("session.created", 24_000)
    input_settings = {"format": {"type": "audio/pcm", "rate": 16_000}, "transcription": {"language": "en"}}
    socket.send("session.update", session={"type": "transcription", "audio": {"input": input_settings}})
    assert socket.receive()["session"]["audio"]["input"]["transcription"]["language"] == "en"
    before, previous = seconds_of(service), None
    for seconds, rate in ((2.5, 16_000), (1, 24_000)):
        if rate == 24_000:
            former = {"input_audio_format": "pcm16", "input_audio_transcription": {"language": "en"}}
            socket.send("transcription_session.update", session=former)
            assert socket.receive()["type"] == "session.updated"
        data = pcm(clip(seconds), rate)
        for at in range(0, len(data), 30_001):
            socket.send("input_audio_buffer.append", audio=base64.b64encode(data[at : at + 30_001]).decode())
        socket.send("input_audio_buffer.commit")
        committed, added = socket.receive(), socket.receive()
        assert (committed["type"], committed["previous_item_id"]) == ("input_audio_buffer.committed", previous)
        previous = committed["item_id"]
        assert (added["type"], added["item"]["id"]) == ("conversation.item.added", previous)
        text, event = "", socket.receive()
        while event["type"].endswith(".delta"):
            assert event["item_id"] == previous
            text, event = text + event["delta"], socket.receive()
        assert event["type"] == "conversation.item.input_audio_transcription.completed", event
        assert event["transcript"] == text
        assert event["usage"] == {"type": "duration", "seconds": math.ceil(seconds)}
        for sent, what in (
            ("input_audio_buffer.commit", "0.1 s are needed"),
            ("response.create", "'response.create' is not supported"),
        ):
            socket.send(sent, event_id="mine")
            fault = socket.receive()
            assert fault["type"] == "error" and what in fault["error"]["message"]
            assert fault["error"]["event_id"] == "mine"
    assert seconds_of(service) - before == pytest.approx(3.5, abs=0.01)
    for session, what in (
        ({"audio": {"input": {"turn_detection": {"type": "semantic_vad"}}}}, "turn_detection must be null, or"),
        ({"input_audio_format": "g711_ulaw"}, "must have the type audio/pcm"),
        ({"audio": {"input": {"transcription": {"model": "other"}}}}, "does not exist"),
        ({"type": "realtime"}, "must be transcription"),
    ):
        socket.send("session.update", session=session)
        assert what in socket.receive()["error"]["message"]
    socket.send_text("[1]")
    assert "must be a JSON object" in socket.receive()["error"]["message"]
    socket.send("input_audio_buffer.append", audio="%%%")
    assert "base64" in socket.receive()["error"]["message"]
    socket.close()


def test_realtime_is_the_transcript_of_the_form(service: Appliance, client: openai.OpenAI) -> None:
    """A greedy transcript without fallback, of samples that are not resampled."""
    samples = (clip(1.5, seed=3).clip(-1, 1) * 32_767).astype("<i2")
    data = wav(samples.astype(np.float32) / 32_768)
    settings = {"file": ("a.wav", data), "model": "whisper", "language": "en", "extra_body": SEEDED}
    reply = client.audio.transcriptions.create(**settings, response_format="verbose_json")
    socket = WebSocketClient(f"{service.url.replace('http', 'ws')}/v1/realtime?model=whisper")
    socket.receive()
    given = {"format": {"type": "audio/pcm", "rate": 16_000}, "transcription": {"language": "en"}}
    socket.send("session.update", session={"audio": {"input": given}})
    socket.send("input_audio_buffer.append", audio=base64.b64encode(samples.tobytes()).decode())
    socket.send("input_audio_buffer.commit")
    while not (event := socket.receive())["type"].endswith(".completed"):
        assert not event["type"].endswith("failed"), event
    assert all(one.temperature == 0 for one in reply.segments)
    assert event["transcript"] == reply.text and reply.text
    socket.close()


def test_realtime_refuses_unknown_models_and_other_sites(service: Appliance) -> None:
    url = f"{service.url.replace('http', 'ws')}/v1/realtime"
    for target, headers, status in (
        (f"{url}?model=other", {}, 404),
        (url, {"origin": "https://evil.example"}, 403),
    ):
        with pytest.raises(Refused) as refused:
            WebSocketClient(target, headers)
        assert refused.value.status == status
    own = service.url.removeprefix("http://")
    WebSocketClient(url, {"origin": f"http://{own}"}, ("realtime",)).close()


def seconds_of(service: Appliance) -> float:
    lines = service.client.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("slipway_audio_seconds_total"))


def test_text_routes_refuse_a_speech_model(service: Appliance) -> None:
    body = {"model": "whisper", "messages": [{"role": "user", "content": "hello"}]}
    assert service.client.post("/v1/chat/completions", json=body).status_code == 404


def test_bench_measures_transcriptions(service: Appliance, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = tmp_path / "result.json"
    options = ["-n", "3", "-C", "2", "--dataset", "audio", "--audio-seconds", "3", "--output", str(result)]
    code = main(["bench", service.url, *options, "--body", '{"language": "en", "temperature": 0}'])
    assert code == 0, capsys.readouterr().out
    summary = json.loads(result.read_text())["endpoints"][0]["summary"]
    assert summary["failures"] == 0 and summary["audio_seconds"] >= 3 and summary["rtfx"] > 0


def test_the_command_of_the_page_runs(service: Appliance, tmp_path: Path) -> None:
    (tmp_path / "clip.wav").write_bytes(FILE[1])
    said = documented("docs/speech.md", "transcriptions", service.url, {"speech.mp3": "clip.wav"}, tmp_path)
    assert "text" in json.loads(said)
