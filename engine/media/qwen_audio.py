"""Qwen2-Audio and Qwen2.5-Omni: the log-mel spectrogram of a clip of up to 30 s or 5 min.

transformers' processor pads spectrograms to the complete window and masks the silence. Here only as much silence is
kept as the convolutions read. Source: transformers processing_qwen2_audio.py, feature_extraction_whisper.py.
"""

from dataclasses import dataclass

import numpy as np

from engine.media.clip import Array
from engine.media.processed import MediaError, Tokens
from engine.media.processor import AudioProcessor, Layout
from engine.media.settings import Files
from engine.media.spectrogram import FFT, HOP, SAMPLE_RATE, log_mel

SILENCE = 2
"""Frames after the clip that influence its last position: one for each convolution."""


@dataclass(frozen=True)
class QwenAudio:
    """Processor of Qwen2-Audio."""

    tokens: Tokens
    mels: int
    samples: int
    """Samples of a window."""

    @property
    def max_seconds(self) -> float:
        return self.samples / SAMPLE_RATE

    def layout(self, samples: int) -> Layout:
        frames = -(-samples // HOP)
        count = ((frames - 1) // 2 + 1) // 2
        if count < 1:
            raise MediaError("the audio clip is shorter than 0.03 s")
        return Layout(self.tokens.image, (count,))

    def tensors(self, samples: Array) -> dict[str, Array]:
        window = self.samples // HOP
        frames = -(-len(samples) // HOP)
        kept = min(frames + SILENCE, window)
        spectrogram = log_mel(samples, mels=self.mels, frames=kept)
        return {
            "input_features": np.ascontiguousarray(spectrogram[:, :kept]),
            "feature_attention_mask": (np.arange(kept) < frames).astype(np.int64),
        }


def declare(files: Files) -> AudioProcessor:
    settings = files.audio
    for name, wanted in (("sampling_rate", SAMPLE_RATE), ("hop_length", HOP), ("n_fft", FFT)):
        if settings.get(name, wanted) != wanted:
            raise ValueError(f"{name} is {settings[name]}; supported is {wanted}")
    token = files.token("audio_token", "<|AUDIO|>")
    seconds = int(settings.get("chunk_length") or 30)
    return QwenAudio(Tokens(token, token), int(settings.get("feature_size") or 128), seconds * SAMPLE_RATE)
