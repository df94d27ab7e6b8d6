"""Log-mel spectrograms of speech, as encoder inputs.

They equal those of transformers' WhisperFeatureExtractor: power of a short-time Fourier transform (Hann window of 400
samples, hop of 160), triangular filters on the Slaney mel scale, log10, the largest value less 8 as the floor, and
(x + 4) / 4. Source: transformers feature_extraction_whisper.py, audio_utils.py.
"""

from functools import lru_cache
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

from engine.api.media import MediaItem, MediaTensor

SAMPLE_RATE = 16_000
HOP = 160  # samples from one frame to the next
FFT = 400
BINS = FFT // 2 + 1
FEATURES = "input_features"  # name of the tensor of an item

Samples = NDArray[np.float32]


@lru_cache(maxsize=4)
def mel_filters(mels: int) -> NDArray[np.float64]:
    """Return the weights of each frequency bin in each mel band, [BINS, mels]: triangles of equal area (Slaney)."""
    edges = _hertz(np.linspace(0.0, _mel(SAMPLE_RATE / 2), mels + 2))
    widths = np.diff(edges)
    slopes = edges[None, :] - np.linspace(0.0, SAMPLE_RATE / 2, BINS)[:, None]
    triangles = np.maximum(0.0, np.minimum(-slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]))
    return triangles * (2.0 / (edges[2:] - edges[:-2]))


_LINEAR_HZ, _LINEAR_MEL = 1000.0, 15.0  # the Slaney scale is linear below, logarithmic above
_LOG_STEP = np.log(6.4) / 27.0


def _mel(hertz: float) -> float:
    return float(_LINEAR_MEL + np.log(hertz / _LINEAR_HZ) / _LOG_STEP if hertz >= _LINEAR_HZ else 3.0 * hertz / 200.0)


def _hertz(mels: NDArray[np.float64]) -> NDArray[np.float64]:
    above = _LINEAR_HZ * np.exp(_LOG_STEP * (mels - _LINEAR_MEL))
    return np.where(mels >= _LINEAR_MEL, above, 200.0 * mels / 3.0)


def log_mel(samples: Samples, *, mels: int, frames: int) -> Samples:
    """Return the log-mel spectrogram of the first `frames` · HOP samples, padded with silence, [mels, frames]."""
    count = frames * HOP
    padded = np.zeros(count, np.float32)
    padded[: min(count, len(samples))] = samples[:count]
    return _log_mel(padded, mels, frames)


def log_mel_of_all(samples: Samples, *, mels: int) -> Samples:
    """Return the log-mel spectrogram of a clip without silence after it, [mels, samples // HOP]."""
    return _log_mel(samples, mels, len(samples) // HOP)


def _log_mel(samples: Samples, mels: int, frames: int) -> Samples:
    signal = np.pad(samples, FFT // 2, mode="reflect")
    pieces = np.lib.stride_tricks.sliding_window_view(signal, FFT)[::HOP][:frames]
    window = 0.5 - 0.5 * np.cos(2.0 * np.pi * np.arange(FFT) / FFT)
    power = np.abs(np.fft.rfft(pieces * window, axis=1)) ** 2
    logs = np.log10(np.maximum(power @ mel_filters(mels), 1e-10))
    logs = np.maximum(logs, logs.max() - 8.0)
    return np.ascontiguousarray(((logs + 4.0) / 4.0).T, np.float32)


def spectrogram_item(spectrogram: Samples) -> MediaItem:
    """Return the encoder input of a window, whose spectrogram is [mels, frames]. A position has two frames."""
    data = np.ascontiguousarray(spectrogram, "<f4").tobytes()
    shape = tuple(map(int, spectrogram.shape))
    digest = sha256(f"{FEATURES} float32 {shape}".encode() + data).digest()
    return MediaItem("audio", digest, ((0, shape[1] // 2),), {FEATURES: MediaTensor("float32", shape, data)})


def read_spectrogram(item: MediaItem) -> Samples:
    """Return the spectrogram of a window, [mels, frames]."""
    tensor = item.tensors[FEATURES]
    return np.frombuffer(tensor.data, "<f4").reshape(tensor.shape)
