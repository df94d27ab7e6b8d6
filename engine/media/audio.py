"""Audio files: decoding, resampling, and windows of long recordings."""

import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import soundfile
import soxr

from engine.api.errors import RequestError
from engine.media.processed import MediaError
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
    """Decode WAV, FLAC, Ogg (Vorbis, Opus), MP3, MP4 or WebM to mono samples at 16 kHz. Channels are averaged.

    Files are decoded piece by piece, so that a small file that expands to more than `max_seconds` needs little memory.
    Raises AudioError."""
    if not data:
        raise AudioError("The file is empty. Send an audio file.", param)
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            _check_format(file.samplerate, file.channels, param)
            return _heard(_resampled(_pieces(file), file.samplerate, max_seconds, param), param)
    except soundfile.LibsndfileError as error:
        if _has_other_container(data):
            return _from_container(data, max_seconds, param)
        raise _unknown(_reason(error), param) from error


def _unknown(reason: str, param: str) -> AudioError:
    return AudioError(
        f"Invalid or unsupported audio file: {reason} Send WAV, FLAC, Ogg (Vorbis or Opus), MP3, MP4 or WebM.", param
    )


def _reason(error: soundfile.LibsndfileError) -> str:
    return str(error.error_string).removeprefix("Error : ").strip().rstrip(".") + "."


def _check_format(rate: int, channels: int, param: str) -> None:
    if not SAMPLE_RATES[0] <= rate <= SAMPLE_RATES[1] or not 1 <= channels <= MAX_CHANNELS:
        raise AudioError(
            f"The file has {channels} channels at {rate} Hz; supported are 1 to {MAX_CHANNELS} channels at "
            f"{SAMPLE_RATES[0]} to {SAMPLE_RATES[1]} Hz.",
            param,
        )


def _pieces(file: soundfile.SoundFile) -> Iterator[Samples]:
    """Yield mono samples at the file's rate."""
    while len(block := file.read(READ_SAMPLES // file.channels + 1, dtype="float32", always_2d=True)):
        yield block[:, 0] if file.channels == 1 else block.mean(1, dtype=np.float32)


def _resampled(pieces: Iterable[Samples], rate: int, max_seconds: float, param: str) -> Samples:
    resampler = None if rate == SAMPLE_RATE else soxr.ResampleStream(rate, SAMPLE_RATE, 1, dtype="float32")
    found: list[Samples] = []
    read, most = 0, int(max_seconds * rate)
    for mono in pieces:
        read += len(mono)
        if read > most:
            raise TooLong(
                f"The recording is longer than {max_seconds:g} seconds, the maximum. Send it in parts.",
                param,
            )
        found.append(mono if resampler is None else resampler.resample_chunk(mono))
    if resampler is not None:
        found.append(resampler.resample_chunk(np.zeros(0, np.float32), last=True))
    samples = np.concatenate(found) if found else np.zeros(0, np.float32)
    if not np.isfinite(samples).all():
        raise AudioError("The file has samples that are not finite numbers.", param)
    return np.ascontiguousarray(samples, np.float32)


def _heard(samples: Samples, param: str) -> Samples:
    """Return the samples of an audio file. Raises AudioError if there are none."""
    if not len(samples):
        raise AudioError("The file has no audio samples.", param)
    return samples


def _has_other_container(data: bytes) -> bool:
    """Return True for MP4 (and M4A) and Matroska (and WebM), which browsers record and libsndfile does not read."""
    return data[4:8] == b"ftyp" or data[:4] == b"\x1a\x45\xdf\xa3"


def read_sound(data: bytes, *, max_seconds: float, param: str = "file") -> Samples | None:
    """Decode the sound of a video file as `read_audio` does, without samples if its stream of sound has none. Return
    None for a file without such a stream. Raises MediaError, AudioError."""
    from engine.media.video import opened  # loads FFmpeg

    with opened(data) as container:
        return _sound(container, max_seconds, param)


def _from_container(data: bytes, max_seconds: float, param: str) -> Samples:
    try:
        found = read_sound(data, max_seconds=max_seconds, param=param)
        if found is None:
            raise MediaError("the file has no audio")
    except MediaError as error:
        raise _unknown(f"{error}.", param) from error
    return _heard(found, param)


def _sound(container: Any, max_seconds: float, param: str) -> Samples | None:
    if not container.streams.audio:
        return None
    stream = container.streams.audio[0]
    if stream.codec_context is None:
        raise MediaError("the codec of the audio is not supported")
    _check_format(stream.rate, stream.channels, param)
    return _resampled(_frames(container, stream), stream.rate, max_seconds, param)


def _frames(container: Any, stream: Any) -> Iterator[Samples]:
    """Yield mono samples at the stream's rate."""
    from av.audio.resampler import AudioResampler

    planar = AudioResampler(format="fltp", layout=stream.layout, rate=stream.rate)
    for frame in container.decode(stream):
        for part in planar.resample(frame):
            yield part.to_ndarray().mean(0, dtype=np.float32)


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
