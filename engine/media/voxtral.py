"""Voxtral: log-mel spectrograms of windows of 30 s, of which silence fills the last one.

Source: transformers processing_voxtral.py, feature_extraction_whisper.py; mistral-common's audio tokens.
"""

from dataclasses import dataclass

import numpy as np

from engine.media.clip import Array
from engine.media.processed import Tokens
from engine.media.processor import AudioProcessor, Layout
from engine.media.settings import Files
from engine.media.spectrogram import FFT, HOP, SAMPLE_RATE, log_mel

MAX_WINDOWS = 120
"""Windows of the longest clip, an hour."""
CONVOLUTION = 2
"""Frames of a position of the encoder."""


@dataclass(frozen=True)
class VoxtralAudio:
    """Processor of Voxtral."""

    tokens: Tokens
    mels: int
    samples: int
    """Samples of a window."""
    joined: int
    """Positions of the encoder that have one token."""

    @property
    def max_seconds(self) -> float:
        return MAX_WINDOWS * self.samples / SAMPLE_RATE

    def _windows(self, samples: int) -> int:
        return max(1, -(-samples // self.samples))

    def layout(self, samples: int) -> Layout:
        positions = self.samples // HOP // CONVOLUTION
        return Layout(self.tokens.image, (self._windows(samples) * (positions // self.joined),))

    def tensors(self, samples: Array) -> dict[str, Array]:
        count, frames = self._windows(len(samples)), self.samples // HOP
        spectrogram = log_mel(samples, mels=self.mels, frames=count * frames)
        windows = spectrogram.reshape(self.mels, count, frames).transpose(1, 0, 2)
        return {"input_features": np.ascontiguousarray(windows)}


def declare(files: Files) -> AudioProcessor:
    settings = files.audio
    for name, wanted in (("sampling_rate", SAMPLE_RATE), ("hop_length", HOP), ("n_fft", FFT)):
        if settings.get(name, wanted) != wanted:
            raise ValueError(f"{name} is {settings[name]}; supported is {wanted}")
    token, audio = files.token("audio_token", "[AUDIO]"), files.config.get("audio_config")
    sizes = audio if isinstance(audio, dict) else {}
    joined = int(sizes.get("intermediate_size") or 5120) // int(sizes.get("hidden_size") or 1280)
    seconds = int(settings.get("chunk_length") or 30)
    return VoxtralAudio(Tokens(token, token), int(settings.get("feature_size") or 128), seconds * SAMPLE_RATE, joined)
