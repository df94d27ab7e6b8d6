"""Audio files: decoding, resampling, and windows of long recordings."""

import io
from dataclasses import dataclass

import numpy as np
import soundfile
import soxr

from engine.api.errors import RequestError
from engine.media.spectrogram import SAMPLE_RATE, Samples

READ_SAMPLES = 1 << 18  # samples of each channel that are decoded at a time
SAMPLE_RATES = (1_000, 768_000)  # accepted sampling rates
MAX_CHANNELS = 64

SILENCE_S = 5.0  # the end of a window in which the quietest place is sought
LEVEL_SAMPLES = SAMPLE_RATE // 50  # samples over which the loudness of a place is measured


class AudioError(RequestError):
    """The file cannot be decoded, or is too long."""


class TooLong(AudioError):
    """The recording is longer than its limit."""


@dataclass(frozen=True)
class Window:
    """Part of a recording: samples [start, end)."""

    start: int
    end: int

    @property
    def seconds(self) -> float:
        """Start of the window in the recording."""
        return self.start / SAMPLE_RATE


def read_audio(data: bytes, *, max_seconds: float, param: str = "file") -> Samples:
    """Decode WAV, FLAC, Ogg (Vorbis, Opus) or MP3 to mono samples at 16 kHz. Channels are averaged.

    Files are decoded piece by piece, so that a small file that expands to more than `max_seconds` needs little memory.
    Raises AudioError."""
    if not data:
        raise AudioError("The file is empty. Send an audio file.", param)
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            return _decoded(file, max_seconds, param)
    except soundfile.LibsndfileError as error:
        raise AudioError(
            f"Invalid or unsupported audio file: {_reason(error)} Send WAV, FLAC, Ogg (Vorbis or Opus) or MP3.", param
        ) from error


def _reason(error: soundfile.LibsndfileError) -> str:
    return str(error.error_string).removeprefix("Error : ").strip().rstrip(".") + "."


def _decoded(file: soundfile.SoundFile, max_seconds: float, param: str) -> Samples:
    rate, channels = file.samplerate, file.channels
    if not SAMPLE_RATES[0] <= rate <= SAMPLE_RATES[1] or not 1 <= channels <= MAX_CHANNELS:
        raise AudioError(
            f"The file has {channels} channels at {rate} Hz; supported are 1 to {MAX_CHANNELS} channels at "
            f"{SAMPLE_RATES[0]} to {SAMPLE_RATES[1]} Hz.",
            param,
        )
    resampler = None if rate == SAMPLE_RATE else soxr.ResampleStream(rate, SAMPLE_RATE, 1, dtype="float32")
    pieces: list[Samples] = []
    read, most = 0, int(max_seconds * rate)
    while len(block := file.read(READ_SAMPLES // channels + 1, dtype="float32", always_2d=True)):
        read += len(block)
        if read > most:
            raise TooLong(
                f"The recording is longer than {max_seconds:g} seconds, the maximum. Send it in parts.",
                param,
            )
        mono = block[:, 0] if channels == 1 else block.mean(1, dtype=np.float32)
        pieces.append(mono if resampler is None else resampler.resample_chunk(mono))
    if resampler is not None:
        pieces.append(resampler.resample_chunk(np.zeros(0, np.float32), last=True))
    samples = np.concatenate(pieces) if pieces else np.zeros(0, np.float32)
    if not len(samples):
        raise AudioError("The file has no audio samples.", param)
    if not np.isfinite(samples).all():
        raise AudioError("The file has samples that are not finite numbers.", param)
    return np.ascontiguousarray(samples, np.float32)


def windows(samples: Samples, window_s: float) -> tuple[Window, ...]:
    """Divide a recording into consecutive windows of at most `window_s` seconds. All but the last end at the quietest
    place of their last SILENCE_S seconds, or of their last half if they are shorter than twice that."""
    longest = int(window_s * SAMPLE_RATE)
    searched = min(int(SILENCE_S * SAMPLE_RATE), longest // 2)
    found, start = [], 0
    while len(samples) - start > longest:
        end = start + longest - searched + quietest(samples[start + longest - searched : start + longest])
        found.append(Window(start, end))
        start = end
    return (*found, Window(start, len(samples)))


def quietest(samples: Samples) -> int:
    """Return the middle of the quietest LEVEL_SAMPLES samples, of several the last ones; the end if there are fewer."""
    if len(samples) < LEVEL_SAMPLES:
        return len(samples)
    squares = np.concatenate(([0.0], np.cumsum(samples.astype(np.float64) ** 2)))
    levels = np.round(squares[LEVEL_SAMPLES:] - squares[:-LEVEL_SAMPLES], 9)
    return len(levels) - 1 - int(np.argmin(levels[::-1])) + LEVEL_SAMPLES // 2
