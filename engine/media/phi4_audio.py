"""Phi-4-multimodal: log-mel spectrograms of clips, with pre-emphasis.

Source: transformers feature_extraction_phi4_multimodal.py, which computes windows in float64 and mel bands in float32.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from engine.media.clip import Array
from engine.media.processed import MediaError, Tokens
from engine.media.processor import AudioProcessor, Layout
from engine.media.settings import Files
from engine.media.spectrogram import HOP, SAMPLE_RATE

WINDOW = 400
FFT = 512
EMPHASIS = 0.97
SCALE = 32768  # samples are 16-bit integers in the original implementation
REDUCTION = 8  # frames of a token
BLOCK = 1 << 12  # frames that are computed together; their complex numbers take more memory than a clip
MAX_SECONDS = 1800.0
"""Half an hour, the longest recording that the model was trained for."""
SETTINGS: dict[str, Any] = {
    **{"sampling_rate": SAMPLE_RATE, "hop_length": HOP, "n_fft": FFT, "win_length": WINDOW, "preemphasis": EMPHASIS},
    **{"audio_compression_rate": REDUCTION, "audio_downsample_rate": 1, "audio_feat_stride": 1},
}


def _mel(hertz: Any) -> Any:
    """Return the Kaldi mel of a frequency."""
    return 1127.0 * np.log(1.0 + hertz / 700.0)


@lru_cache(maxsize=4)
def mel_filters(mels: int, low: float, high: float) -> Array:
    """Return the weights of each frequency bin in each band, float32 [bins, mels]: triangles in mels (Kaldi)."""
    edges = np.linspace(_mel(low), _mel(high), mels + 2)
    bins = _mel(np.arange(FFT // 2 + 1) * (SAMPLE_RATE / FFT))
    slopes = edges[None, :] - bins[:, None]
    widths = np.diff(edges)
    triangles = np.minimum(-slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:])
    filters: Array = np.maximum(0.0, triangles).astype(np.float32)
    return filters


@dataclass(frozen=True)
class Phi4Audio:
    """Audio processor of Phi-4-multimodal."""

    tokens: Tokens
    mels: int
    range: tuple[float, float]
    """Frequencies of the first and the last band."""

    @property
    def max_seconds(self) -> float:
        return MAX_SECONDS

    def layout(self, samples: int) -> Layout:
        if samples < WINDOW:
            raise MediaError(f"the audio clip is shorter than {WINDOW / SAMPLE_RATE} s")
        frames = (samples - WINDOW) // HOP + 1
        return Layout(self.tokens.image, (-(-frames // REDUCTION),))

    def tensors(self, samples: Array) -> dict[str, Array]:
        frames = np.lib.stride_tricks.sliding_window_view(samples.astype(np.float32), WINDOW)[::HOP]
        logs = np.empty((len(frames), self.mels), np.float32)
        for first in range(0, len(frames), BLOCK):
            logs[first : first + BLOCK] = self._logs(frames[first : first + BLOCK])
        size = self.layout(len(samples)).count
        return {"audio_input_features": logs[None], "audio_embed_sizes": np.array([size], np.int64)}

    def _logs(self, frames: Array) -> Array:
        """[frames, WINDOW] → [frames, mels]."""
        before = np.roll(frames, 1, 1)
        before[:, 0] = before[:, 1]
        emphasised = (frames - np.float32(EMPHASIS) * before) * np.float32(SCALE)
        spectrum = np.fft.rfft(np.hamming(WINDOW) * emphasised, FFT, 1).astype(np.complex64)
        power = np.abs(spectrum) ** 2
        logs: Array = np.log(np.maximum(power @ mel_filters(self.mels, *self.range), np.float32(1.0)))
        return logs


def declare(files: Files) -> AudioProcessor:
    settings = files.audio
    for name, wanted in SETTINGS.items():
        if settings.get(name, wanted) != wanted:
            raise ValueError(f"{name} is {settings[name]}; supported is {wanted}")
    token = files.token("audio_token", "<|audio|>")
    low, high = float(settings.get("mel_min_frequency") or 0), float(settings.get("mel_max_frequency") or 7690)
    mels = int(settings.get("feature_size") or 80)
    if not 0 <= low < high <= SAMPLE_RATE / 2 or not 1 <= mels <= 1024:
        raise ValueError(
            f"there are {mels} bands from {low:g} to {high:g} Hz; supported are up to 1024 below {SAMPLE_RATE // 2} Hz"
        )
    return Phi4Audio(Tokens(token, token, beside_images=True), mels, (low, high))
