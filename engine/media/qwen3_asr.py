"""Qwen3-ASR and Qwen3-Omni: the log-mel spectrogram of a clip of any length. Short clips are padded with silence:
to half a second for Qwen3-ASR, and to a frame for Qwen3-Omni.

Source: transformers feature_extraction_qwen3_asr.py, processing_qwen3_asr.py, processing_qwen3_omni_moe.py.
"""

from dataclasses import dataclass

import numpy as np

from engine.media.clip import Array
from engine.media.processed import Tokens
from engine.media.processor import AudioProcessor, Layout
from engine.media.settings import Files
from engine.media.spectrogram import FFT, HOP, SAMPLE_RATE, log_mel_of_all

MAX_SECONDS = 3600.0


@dataclass(frozen=True)
class Qwen3Audio:
    """Processor of Qwen3-ASR and Qwen3-Omni."""

    tokens: Tokens
    mels: int
    chunk: int
    """Frames of a chunk."""
    shortest: int
    """Samples to which shorter clips are padded."""

    @property
    def max_seconds(self) -> float:
        return MAX_SECONDS

    def layout(self, samples: int) -> Layout:
        whole, rest = divmod(max(samples, self.shortest) // HOP, self.chunk)
        return Layout(self.tokens.image, (whole * _reduced(self.chunk) + _reduced(rest),))

    def tensors(self, samples: Array) -> dict[str, Array]:
        padded = np.pad(samples, (0, max(0, self.shortest - len(samples))))
        return {"input_features": log_mel_of_all(padded, mels=self.mels)}


def _reduced(frames: int) -> int:
    """Return the number of tokens of a chunk: three convolutions have a stride of 2."""
    return -(-frames // 8)


def declare(files: Files) -> AudioProcessor:
    settings = files.audio
    for name, wanted in (("sampling_rate", SAMPLE_RATE), ("hop_length", HOP), ("n_fft", FFT)):
        if settings.get(name, wanted) != wanted:
            raise ValueError(f"{name} is {settings[name]}; supported is {wanted}")
    token, window = files.token("audio_token", "<|audio_pad|>"), int(files.hearing.get("n_window") or 50)
    shortest = 0 if files.is_qwen3_omni else int(settings.get("min_length", 8_000))
    return Qwen3Audio(Tokens(token, token), int(settings.get("feature_size") or 128), 2 * window, max(FFT, shortest))
