"""Compare spectrograms and decoded files with transformers' feature extractor, soundfile and known signals."""

import io
import wave

import av
import numpy as np
import pytest
import soundfile
from transformers import WhisperFeatureExtractor
from transformers.models.whisper import feature_extraction_whisper

from engine.media import audio
from engine.media.audio import AudioError, read_audio, read_sound, windows
from engine.media.spectrogram import SAMPLE_RATE, log_mel


def tone(seconds: float, rate: int = SAMPLE_RATE, hertz: float = 440.0) -> np.ndarray:
    return (0.4 * np.sin(2 * np.pi * hertz * np.arange(int(seconds * rate)) / rate)).astype(np.float32)


def encoded(samples: np.ndarray, rate: int, format: str, subtype: str | None = None) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=format, subtype=subtype)
    return file.getvalue()


@pytest.mark.parametrize("mels", [80, 128])
def test_spectrogram_equals_transformers(mels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Its computation in float64; the one in float32 has errors of 1e-5.
    monkeypatch.setattr(feature_extraction_whisper, "is_torch_available", lambda: False)
    rng = np.random.default_rng(mels)
    speech = (rng.normal(size=SAMPLE_RATE * 3 + 77) * np.linspace(0, 0.3, SAMPLE_RATE * 3 + 77)).astype(np.float32)
    extractor = WhisperFeatureExtractor(feature_size=mels)
    for samples in (speech, tone(31), np.zeros(5, np.float32)):
        expected = extractor(samples, sampling_rate=SAMPLE_RATE, return_tensors="np")["input_features"][0]
        found = log_mel(samples, mels=mels, frames=3000)
        assert found.dtype == np.float32 and found.shape == (mels, 3000)
        np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("format", "subtype", "error"),
    [("WAV", "PCM_16", 1e-4), ("WAV", "FLOAT", 1e-6), ("FLAC", None, 1e-4), ("OGG", None, 0.1), ("MP3", None, 0.1)],
)
def test_files_are_decoded_to_mono(format: str, subtype: str | None, error: float) -> None:
    left = tone(1.0)
    both = np.stack((left, 0.5 * left), 1)
    found = read_audio(encoded(both, SAMPLE_RATE, format, subtype), max_seconds=5)
    np.testing.assert_allclose(found[4000:12000], 0.75 * left[4000:12000], atol=error)


def test_containers_with_an_unknown_codec_are_refused() -> None:
    data = io.BytesIO()
    with av.open(data, "w", format="matroska") as container:
        track = container.add_stream("pcm_s16le", rate=SAMPLE_RATE, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 160), np.int16), format="s16", layout="mono")
        frame.rate = SAMPLE_RATE
        container.mux([*track.encode(frame), *track.encode(None)])
    assert len(read_audio(data.getvalue(), max_seconds=1)) == 160
    with pytest.raises(AudioError, match="codec of the audio is not supported"):
        read_audio(data.getvalue().replace(b"A_PCM/INT/LIT", b"A_UNKNOWN/COD"), max_seconds=1)


@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100, 48_000])
def test_files_are_resampled_to_16_khz(rate: int) -> None:
    found = read_audio(encoded(tone(2.0, rate), rate, "WAV", "FLOAT"), max_seconds=5)
    assert len(found) == pytest.approx(2 * SAMPLE_RATE, abs=2)
    np.testing.assert_allclose(found[4000:28000], tone(2.0)[4000:28000], atol=2e-3)


def test_blocks_of_a_file_are_joined_without_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(tone(2.0, 44_100), 44_100, "WAV", "FLOAT")
    whole = read_audio(data, max_seconds=5)
    monkeypatch.setattr(audio, "READ_SAMPLES", 1009)
    np.testing.assert_allclose(read_audio(data, max_seconds=5), whole, atol=1e-6)


def silent_wav(frames: int) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, SAMPLE_RATE, 0, "NONE", ""))
        writer.writeframes(bytes(2 * frames))
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "The file is empty"),
        (b"not audio at all", "Invalid or unsupported audio file"),
        (silent_wav(0), "has no audio samples"),
        (silent_wav(SAMPLE_RATE * 5 + 1), "longer than 5 seconds"),
        (encoded(np.array([0.0, np.nan], np.float32), SAMPLE_RATE, "WAV", "FLOAT"), "not finite"),
        (encoded(tone(0.1, 900), 900, "WAV"), "1 channels at 900 Hz"),
    ],
    ids=["empty", "text", "no samples", "long", "not finite", "low rate"],  # files may contain the time
)
def test_unusable_files_are_refused(data: bytes, words: str) -> None:
    with pytest.raises(AudioError, match=words) as raised:
        read_audio(data, max_seconds=5)
    assert raised.value.param == "file"


def test_truncated_files_are_decoded_up_to_their_end() -> None:
    data = silent_wav(SAMPLE_RATE)
    assert len(read_audio(data[: len(data) // 2], max_seconds=5)) == pytest.approx(SAMPLE_RATE // 2, abs=50)


@pytest.mark.parametrize("seconds", [1, 30, 31, 65])
def test_windows_are_consecutive_and_end_in_silence(seconds: int) -> None:
    samples = tone(seconds)
    for at in range(27, seconds, 27):  # silences of 0.2 s
        samples[at * SAMPLE_RATE : at * SAMPLE_RATE + SAMPLE_RATE // 5] = 0
    found = windows(samples, 30.0)
    assert [one.start for one in found] == [0, *(one.end for one in found[:-1])] and found[-1].end == len(samples)
    assert all(one.end - one.start <= 30 * SAMPLE_RATE for one in found)
    assert len(found) == {1: 1, 30: 1, 31: 2, 65: 3}[seconds]
    for number, one in enumerate(found[:-1], 1):
        assert 27 * number < one.end / SAMPLE_RATE < 27 * number + 0.2


def test_sound_of_videos_is_read_from_ogg() -> None:
    """libsndfile reads Ogg files with audio alone."""
    stream = io.BytesIO()
    with av.open(stream, "w", format="ogg") as container:
        video, track = container.add_stream("vp8", rate=10), container.add_stream("libopus", rate=48_000, layout="mono")
        video.width = video.height = 16
        block = av.AudioFrame.from_ndarray(np.zeros((1, 960 * 20), np.float32), format="flt", layout="mono")
        block.rate = 48_000
        container.mux([*video.encode(av.VideoFrame(16, 16, "yuv420p")), *video.encode(None)])
        container.mux([*track.encode(block), *track.encode(None)])
    samples = read_sound(stream.getvalue(), max_seconds=1)
    assert samples is not None and len(samples) == pytest.approx(0.4 * 16_000, abs=400)
