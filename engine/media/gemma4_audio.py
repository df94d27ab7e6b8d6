"""Gemma 4: the log-mel spectrogram of a clip of up to 30 s, of frames of 20 ms that are complete.

Source: transformers feature_extraction_gemma4.py, processing_gemma4.py. transformers pads clips with silence, whose
frames it masks; they are left out here.
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

FRAME = 320
FFT = 512
MAX_SECONDS = 30
FLOOR = 1e-3
SETTINGS: dict[str, Any] = {
    **{"sampling_rate": SAMPLE_RATE, "hop_length": HOP, "frame_length": FRAME, "preemphasis": 0.0, "dither": 0.0},
    **{"fft_length": FFT, "fft_overdrive": False, "input_scale_factor": 1.0},
}


def _mel(hertz: Any) -> Any:
    """Return the mel of a frequency (HTK)."""
    return 2595.0 * np.log10(1.0 + hertz / 700.0)


@lru_cache(maxsize=4)
def mel_filters(mels: int, low: float, high: float) -> Array:
    """Return the weights of each frequency bin in each band, [bins, mels]: triangles in Hz."""
    edges = 700.0 * (10.0 ** (np.linspace(_mel(low), _mel(high), mels + 2) / 2595.0) - 1.0)
    widths = np.diff(edges)
    slopes = edges[None, :] - np.linspace(0.0, SAMPLE_RATE // 2, FFT // 2 + 1)[:, None]
    return np.maximum(0.0, np.minimum(-slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]))


@dataclass(frozen=True)
class Gemma4Audio:
    """Audio processor of Gemma 4."""

    tokens: Tokens
    around: tuple[str, str]
    """Texts before and after the tokens of a clip."""
    mels: int
    range: tuple[float, float]
    """Frequencies of the first and the last band."""
    floor: float

    @property
    def max_seconds(self) -> float:
        return MAX_SECONDS

    def _frames(self, samples: int) -> int:
        """Return the number of complete frames. Half a frame of silence precedes the clip."""
        return max((samples - 1) // HOP, 0)

    def layout(self, samples: int) -> Layout:
        frames = self._frames(samples)
        if not frames:
            raise MediaError(f"the audio clip is shorter than {(HOP + 1) / SAMPLE_RATE:.3f} s")
        begin, end = self.around
        return Layout(f"{begin}{self.tokens.image}{end}", (-(-frames // 4),))

    def tensors(self, samples: Array) -> dict[str, Array]:
        count = self._frames(len(samples))
        padded = np.pad(samples.astype(np.float32), (FRAME // 2, 0))
        frames = np.lib.stride_tricks.sliding_window_view(padded, FRAME)[::HOP][:count]
        window = (0.5 - 0.5 * np.cos(2.0 * np.pi * np.arange(FRAME) / FRAME)).astype(np.float32)
        magnitudes = np.abs(np.fft.rfft(frames * window, FFT, 1))
        logs = np.log(magnitudes @ mel_filters(self.mels, *self.range) + self.floor)
        return {"input_features": np.ascontiguousarray(logs, np.float32)[None]}


def declare(files: Files) -> AudioProcessor:
    settings = files.audio
    for name, wanted in SETTINGS.items():
        if settings.get(name, wanted) != wanted:
            raise ValueError(f"{name} is {settings[name]}; supported is {wanted}")
    if settings.get("per_bin_mean") is not None or settings.get("per_bin_stddev") is not None:
        raise ValueError("per_bin_mean and per_bin_stddev are set; supported is null")
    token, mels = files.token("audio_token", "<|audio|>"), int(settings.get("feature_size") or 128)
    low, high = float(settings.get("min_frequency") or 0.0), float(settings.get("max_frequency") or 8000.0)
    if not 0 <= low < high <= SAMPLE_RATE / 2 or not 1 <= mels <= 1024:
        raise ValueError(
            f"there are {mels} bands from {low:g} to {high:g} Hz; supported are up to 1024 below {SAMPLE_RATE // 2} Hz"
        )
    around = files.token("boa_token", "<|audio>"), files.token("eoa_token", "<audio|>")
    return Gemma4Audio(Tokens(token, token), around, mels, (low, high), float(settings.get("mel_floor", FLOOR)))
