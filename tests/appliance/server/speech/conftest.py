"""The real application, whose sequences a tiny Whisper computes in this process."""

import asyncio
import io
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import soundfile

from appliance.config.gateway import GatewayConfig, with_values
from appliance.planning.speech import speech_model
from engine.api.messages import Delta, Output, Submit
from engine.llm import LLM
from engine.media.spectrogram import SAMPLE_RATE
from engine.models.checkpoint import read_checkpoint
from tests.appliance.server.http.conftest import Gateway
from tests.engine.speech.whisper import Whisper, write


def clip(seconds: float, seed: int = 1) -> np.ndarray:
    """Tones that change, with silence of 0.2 s once in 1.7 s."""
    rng = np.random.default_rng(seed)
    count = int(seconds * SAMPLE_RATE)
    pitch = np.repeat(rng.uniform(0.02, 0.4, count // 4000 + 1), 4000)[:count]
    samples = np.sin(np.cumsum(pitch)) * 0.4 + rng.normal(size=count) * 0.05
    samples[np.arange(count) % 27_200 > 24_000] = 0.0
    return samples.astype(np.float32)


def wav(samples: np.ndarray, rate: int = SAMPLE_RATE) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format="WAV", subtype="FLOAT")
    return file.getvalue()


@pytest.fixture(scope="session")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Whisper:
    return write(tmp_path_factory.mktemp("speech") / "whisper")


@pytest.fixture(scope="session")
def llm(whisper: Whisper) -> Iterator[LLM]:
    with LLM(whisper.path, block_tokens=16, kv_bytes=2 << 20, threads=1, max_running=4) as made:
        yield made


class SpeechGateway(Gateway):
    """`send` posts a form. `decoded` are the submits that the model computed."""

    def send(self, data: bytes, path: str = "/v1/audio/transcriptions", **fields: Any) -> httpx.Response:
        async def call() -> httpx.Response:
            async with self.client() as client:
                return await client.post(path, files={"file": ("clip.wav", data)}, data=fields)

        return asyncio.run(call())


def computed(llm: LLM, submit: Submit) -> list[Delta]:
    llm._loop.post([submit])
    deltas: list[Delta] = []
    while not deltas or deltas[-1].finish is None:
        got = llm._messages.get(timeout=60)
        assert not isinstance(got, Exception), got
        deltas += [delta for message in got if isinstance(message, Output) for delta in message.deltas]
    return deltas


@pytest.fixture
def make_speech(whisper: Whisper, llm: LLM) -> Any:
    checkpoint = read_checkpoint(whisper.path)

    def make(**fields: Any) -> SpeechGateway:
        config = GatewayConfig(
            names=("whisper",),
            model=str(whisper.path),
            engines=(),
            max_context=checkpoint.model.max_context,
            vocab_size=checkpoint.model.embed.vocab,
            eos_token_ids=checkpoint.eos_token_ids,
            tasks=("transcribe",),
            speech=speech_model(checkpoint),
            version="1",
        )
        made = SpeechGateway(with_values(config, {"endpoints.host": "127.0.0.1", "endpoints.port": 0, **fields}))
        made.router.reply = lambda submit: computed(llm, submit)
        return made

    return make


@pytest.fixture
def gateway(make_speech: Any) -> SpeechGateway:
    made: SpeechGateway = make_speech()
    return made
