"""Speech recognition through the running service: OpenAI's client, a stream, and a crash of the engine.

The model is a small Whisper with random weights. tests/appliance/server/speech compares its transcripts with those of
transformers.
"""

import os
import signal
from collections.abc import Callable, Iterator

import openai
import pytest

from tests.appliance.server.speech.conftest import clip, wav
from tests.e2e.conftest import Appliance
from tests.engine.speech.whisper import write

FILE = ("clip.wav", wav(clip(9)))
SEEDED = {"seed": 7}  # a model with random weights needs the fallback to higher temperatures


@pytest.fixture(scope="module")
def service(launch: Callable[..., Appliance], tmp_path_factory: pytest.TempPathFactory) -> Appliance:
    folder = tmp_path_factory.mktemp("speech")
    write(folder / "whisper")
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


def test_text_routes_refuse_a_speech_model(service: Appliance) -> None:
    body = {"model": "whisper", "messages": [{"role": "user", "content": "hello"}]}
    assert service.client.post("/v1/chat/completions", json=body).status_code == 404
