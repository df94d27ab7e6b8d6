"""Transcriptions and translations through the application, with a tiny Whisper whose windows last 2 s."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import openai
import pytest
import torch

from appliance.config.gateway import SpeechModel, with_values
from appliance.server import live
from appliance.server.first_requests import ask_each_kind, kinds
from appliance.server.routing.refused import content_hash
from appliance.server.speech import transcript
from engine.api.messages import Delta, Submit
from engine.media.audio import windows
from engine.media.spectrogram import HOP, SAMPLE_RATE, log_mel, read_spectrogram, spectrogram_item
from tests.appliance.server.http.conftest import checkpoint, make_gateway  # noqa: F401
from tests.appliance.server.speech.conftest import SpeechGateway, clip, wav
from tests.engine.speech.whisper import WINDOW_S, Whisper


def expected_segments(whisper: Whisper, samples: np.ndarray, **options: Any) -> list[dict[str, Any]]:
    """Segments of one window by transformers, greedily."""
    features = torch.from_numpy(log_mel(samples, mels=80, frames=int(WINDOW_S * SAMPLE_RATE) // HOP))[None]
    found = whisper.model.generate(
        input_features=features, return_timestamps=True, return_segments=True, temperature=0.0, **options
    )
    return [
        {"start": float(one["start"]), "end": float(one["end"]), "tokens": one["tokens"].tolist()}
        for one in found["segments"][0]
    ]


@pytest.fixture
def greedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A random model's texts are implausible; without thresholds, each window is decoded once."""
    monkeypatch.setattr(transcript, "MOST_COMPRESSION", 1e9)
    monkeypatch.setattr(transcript, "LEAST_LOGPROB", -1e9)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_segments_of_a_window_are_those_of_transformers(
    gateway: SpeechGateway, whisper: Whisper, greedy: None, seed: int
) -> None:
    samples = clip(WINDOW_S, seed)
    reply = gateway.send(wav(samples), response_format="verbose_json", language="en")
    assert reply.status_code == 200, reply.text
    found = reply.json()["segments"]
    # At most half of the decoder's positions are sampled in a pass, as in the reference implementation.
    expected = expected_segments(whisper, samples, language="en", task="transcribe", max_new_tokens=24)
    end = whisper.id("<|endoftext|>")
    # Segments without text or duration, and those that begin after the end of the recording, are left out.
    kept = [one for one in expected if one["start"] < min(one["end"], WINDOW_S)]
    kept = [one for one in kept if any(token < end for token in one["tokens"])]
    assert len(found) == len(kept)
    for one, each in zip(found, kept, strict=True):
        tokens = [token for token in each["tokens"] if token != end]
        # transformers appends the first timestamp of the next pass to the last segment of a pass.
        assert one["tokens"] == tokens[: len(one["tokens"])] and len(tokens) <= len(one["tokens"]) + 1
        assert one["start"] == pytest.approx(each["start"], abs=0.011)
        assert one["end"] == pytest.approx(min(each["end"], WINDOW_S), abs=0.011)


def test_json_has_the_text_and_the_duration(gateway: SpeechGateway, greedy: None) -> None:
    found = gateway.send(wav(clip(1.0)), language="en").json()
    verbose = gateway.send(wav(clip(1.0)), language="en", response_format="verbose_json").json()
    assert set(found) == {"text", "usage"} and found["usage"] == {"type": "duration", "seconds": 1}
    assert found["text"] == verbose["text"] == "".join(one["text"] for one in verbose["segments"]).strip()
    assert verbose["task"] == "transcribe" and verbose["language"] == "english" and verbose["duration"] == 1.0


@pytest.mark.parametrize("seconds", [1, 31, 65])
def test_long_recordings_are_divided_in_silence(
    make_speech: Callable[..., SpeechGateway], whisper: Whisper, seconds: int
) -> None:
    """Windows of 30 s, with scripted transcripts: the n-th window has the text of the token 40 + n."""
    gateway = make_speech(speech=SpeechModel(mels=80, positions=1500, reply=48, multilingual=True))
    samples = clip(seconds)
    samples[27 * SAMPLE_RATE : int(27.5 * SAMPLE_RATE)] = 0.0
    samples[55 * SAMPLE_RATE : int(55.5 * SAMPLE_RATE)] = 0.0
    cuts = [one.start for one in windows(samples, 30.0)]
    assert len(cuts) == {1: 1, 31: 2, 65: 3}[seconds]
    assert all(not samples[cut - 100 : cut + 100].any() for cut in cuts[1:])
    parts = [samples[first:last] for first, last in zip(cuts, [*cuts[1:], len(samples)], strict=True)]
    known = [spectrogram_item(log_mel(part, mels=80, frames=3000)).digest for part in parts]
    zero, end = whisper.id("<|0.00|>"), whisper.id("<|endoftext|>")
    head = [whisper.id("<|en|>"), whisper.id("<|transcribe|>")]

    def reply(submit: Submit) -> list[Delta]:
        text = 40 + known.index(submit.media[0].digest)
        return gateway.deltas(submit, [*head, zero + 5, text, zero + 50, end], "stop", 1, {})

    gateway.router.reply = reply
    segments = gateway.send(wav(samples), language="en", response_format="verbose_json").json()["segments"]
    assert [one["tokens"][1] for one in segments] == [40 + number for number in range(len(cuts))]
    for one, cut in zip(segments, cuts, strict=True):
        assert one["start"] == pytest.approx(cut / SAMPLE_RATE, abs=0.01)
        assert one["end"] == pytest.approx(cut / SAMPLE_RATE + 1.0, abs=0.01)


def test_a_pass_continues_where_the_last_one_ended(gateway: SpeechGateway, whisper: Whisper) -> None:
    """The first pass ends with a pair of timestamps after 0.5 s; the second one reads the audio from there."""
    zero, end = whisper.id("<|0.00|>"), whisper.id("<|endoftext|>")
    head = [whisper.id("<|en|>"), whisper.id("<|transcribe|>")]
    replies = iter([[zero, 40, zero + 25, zero + 25, end], [zero, 41, zero + 25, end]])
    gateway.router.reply = lambda submit: gateway.deltas(submit, [*head, *next(replies)], "stop", 1, {})
    samples = clip(1.5)
    segments = gateway.send(wav(samples), language="en", response_format="verbose_json").json()["segments"]
    assert [(one["start"], one["end"]) for one in segments] == [(0.0, 0.5), (0.5, 1.0)]
    first, second = (read_spectrogram(submit.media[0]) for submit in gateway.submits)
    np.testing.assert_array_equal(second[:, :150], first[:, 50:])
    assert not second[:, 150:].any()


def test_a_window_has_the_same_text_wherever_it_is(gateway: SpeechGateway, greedy: None) -> None:
    """The second window of a recording equals a recording of this part, except for its times."""
    samples, cut = clip(3.4), 27_040
    assert windows(clip(3.4), WINDOW_S)[1].start == cut
    whole = gateway.send(wav(samples), language="en", response_format="verbose_json").json()["segments"]
    part = gateway.send(wav(samples[cut:]), language="en", response_format="verbose_json").json()["segments"]
    later = [one for one in whole if one["seek"] * HOP >= cut]
    assert part and [one["tokens"] for one in later] == [one["tokens"] for one in part]
    for one, each in zip(later, part, strict=True):
        assert one["start"] == pytest.approx(each["start"] + cut / SAMPLE_RATE, abs=0.011)


def test_the_language_is_detected_in_the_first_window_and_kept(
    gateway: SpeechGateway, whisper: Whisper, greedy: None
) -> None:
    found = gateway.send(wav(clip(5.0)), response_format="verbose_json").json()
    first, *rest = (submit.sampling.speech for submit in gateway.submits)
    codes = [whisper.id(f"<|{code}|>") for code in ("en", "zh", "fr")]
    assert first is not None and sorted(first.begin[0]) == sorted(codes)
    kept = {one.begin[0] for one in rest if one is not None}
    assert len(kept) == 1 and len(kept.pop()) == 1
    assert found["language"] in ("english", "french", "chinese")


def test_a_translation_uses_the_task_of_translation(gateway: SpeechGateway, whisper: Whisper, greedy: None) -> None:
    reply = gateway.send(wav(clip(1.0)), "/v1/audio/translations", language="fr", response_format="verbose_json")
    rules = gateway.submits[0].sampling.speech
    assert rules is not None and rules.begin == ((whisper.id("<|fr|>"),), (whisper.id("<|translate|>"),))
    assert reply.json()["task"] == "translate" and reply.json()["language"] == "english"
    assert reply.json()["text"] != gateway.send(wav(clip(1.0)), language="fr").json()["text"]


def test_the_prompt_precedes_every_window(gateway: SpeechGateway, whisper: Whisper, greedy: None) -> None:
    gateway.send(wav(clip(3.0)), language="en", prompt="the lazy dog")
    before = (whisper.id("<|startofprev|>"), *whisper.tokenizer.encode(" the lazy dog").ids)
    for submit in gateway.submits:
        assert submit.prompt[submit.source :] == (*before, whisper.id("<|startoftranscript|>"))
    gateway.send(wav(clip(1.0)), language="en", prompt="the lazy dog " * 50)
    assert len(gateway.submits[-1].prompt) - gateway.submits[-1].source == 48 // 2 + 1


def test_sampling_fields_are_passed_on(gateway: SpeechGateway) -> None:
    fields = {"temperature": "0.4", "seed": "7", "top_p": "0.9", "top_k": "5", "max_completion_tokens": "3"}
    assert gateway.send(wav(clip(1.0)), language="en", **fields).status_code == 200
    (submit, *_), sampling = gateway.submits, gateway.submits[0].sampling
    assert (sampling.temperature, sampling.seed, sampling.top_p, sampling.top_k) == (0.4, 7, 0.9, 5)
    assert submit.max_tokens == 3 + 2


def test_implausible_windows_are_decoded_again_at_higher_temperatures(
    gateway: SpeechGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transcript, "MOST_COMPRESSION", 1e9)
    monkeypatch.setattr(transcript, "LEAST_LOGPROB", 0.0)
    monkeypatch.setattr(transcript, "NO_SPEECH", 1.0)
    found = gateway.send(wav(clip(1.0)), language="en", response_format="verbose_json", seed="3").json()
    temperatures = [submit.sampling.temperature for submit in gateway.submits][:6]
    assert temperatures == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert len({submit.sampling.seed for submit in gateway.submits[:6]}) == 6
    assert all(one["temperature"] == 1.0 for one in found["segments"])
    assert gateway.service.metrics.total("audio_fallbacks") == len(gateway.submits) * 5 / 6


def test_silence_has_no_text(gateway: SpeechGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transcript, "LEAST_LOGPROB", 0.0)
    monkeypatch.setattr(transcript, "NO_SPEECH", 0.0)
    found = gateway.send(wav(clip(1.0)), language="en", response_format="verbose_json").json()
    assert found["text"] == "" and found["segments"] == [] and len(gateway.submits) == 1


def test_quarantine_tells_recordings_apart(gateway: SpeechGateway, greedy: None) -> None:
    """All windows have the same token ids; a recording that crashes engines must not isolate the others."""
    for seed in (1, 2, 1):
        gateway.send(wav(clip(0.5, seed)), language="en", max_completion_tokens="1")
    one, other, again = (content_hash(submit) for submit in gateway.submits[:3])
    assert one == again != other


def test_seconds_of_audio_are_counted(gateway: SpeechGateway, greedy: None) -> None:
    gateway.send(wav(clip(1.5)), language="en")
    assert gateway.service.metrics.total("audio_seconds") == pytest.approx(1.5)


def events(text: str) -> list[dict[str, Any]]:
    lines = text.split("\n\n")[:-1]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_a_stream_has_the_text_of_the_complete_reply(gateway: SpeechGateway, greedy: None) -> None:
    data = wav(clip(5.0))
    whole = gateway.send(data, language="en").json()
    *deltas, done = events(gateway.send(data, language="en", stream="true").text)
    assert {one["type"] for one in deltas} == {"transcript.text.delta"} and len(deltas) > 2
    assert "".join(one["delta"] for one in deltas) == done["text"] == whole["text"]
    assert done == {"type": "transcript.text.done", "text": whole["text"], "usage": whole["usage"]}


def test_an_error_in_a_stream_is_a_record(gateway: SpeechGateway, greedy: None) -> None:
    gateway.router.failure = RuntimeError("secret")
    gateway.router.reply = lambda submit: []
    (error,) = events(gateway.send(wav(clip(1.0)), language="en", stream="true").text)
    assert error["error"]["code"] == 500 and "secret" not in str(error)


def test_texts_srt_and_vtt(gateway: SpeechGateway, greedy: None) -> None:
    data = wav(clip(2.0))
    verbose = gateway.send(data, language="en", response_format="verbose_json").json()
    text = gateway.send(data, language="en", response_format="text")
    assert text.headers["content-type"].startswith("text/plain") and text.text == verbose["text"] + "\n"
    srt = gateway.send(data, language="en", response_format="srt").text
    vtt = gateway.send(data, language="en", response_format="vtt").text
    first = verbose["segments"][0]
    assert srt.startswith(f"1\n00:00:00,{round(first['start'] * 1000):03} --> 00:00:0")
    assert vtt.startswith(f"WEBVTT\n\n00:00:00.{round(first['start'] * 1000):03} --> 00:00:0")
    assert srt.count(" --> ") == vtt.count(" --> ") == len(verbose["segments"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"language": "klingon"}, "language"),
        ({"response_format": "diarized_json"}, "response_format"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": "3"}, "temperature"),
        ({"top_p": "0"}, "top_p"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities"),
        ({"response_format": "verbose_json", "stream": "true"}, "response_format"),
        ({"max_completion_tokens": "-1"}, "max_completion_tokens"),
    ],
)
def test_invalid_fields_are_named(gateway: SpeechGateway, fields: dict[str, str], param: str) -> None:
    reply = gateway.send(wav(clip(0.1)), **fields)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param, reply.text
    assert not gateway.submits


def test_files_that_cannot_be_read_are_refused(make_speech: Callable[..., SpeechGateway]) -> None:
    gateway = make_speech(**{"limits.max_audio_file": 400_000, "limits.max_audio_seconds": 2.0})
    for data, status, words in (
        (b"", 400, "empty"),
        (b"RIFF but no audio", 400, "Invalid or unsupported audio file"),
        (wav(clip(2.5)), 400, "limits.max_audio_seconds"),
        (bytes(400_001), 413, "limits.max_audio_file"),
    ):
        reply = gateway.send(data)
        assert reply.status_code == status and words in reply.json()["error"]["message"], reply.text
        assert reply.json()["error"]["param"] == "file"
    assert not gateway.submits


@pytest.mark.parametrize(
    ("key", "value", "status"), [("limits.max_audio_file", 1000, 413), ("limits.max_audio_seconds", 0.05, 400)]
)
def test_limits_of_audio_files_change_in_a_running_gateway(
    gateway: SpeechGateway, key: str, value: float, status: int
) -> None:
    assert gateway.send(wav(clip(0.1))).status_code == 200
    asyncio.run(live.apply(gateway.service, with_values(gateway.service.config, {key: value})))
    reply = gateway.send(wav(clip(0.1)))
    assert reply.status_code == status and key in reply.json()["error"]["message"], reply.text


def test_forms_that_have_no_file_are_refused(gateway: SpeechGateway) -> None:
    async def post(**options: Any) -> tuple[int, Any]:
        async with gateway.client() as client:
            reply = await client.post("/v1/audio/transcriptions", **options)
            return reply.status_code, reply.json()["error"]

    for options, param in (
        ({"json": {"file": "x"}}, "content-type"),
        ({"data": {"file": "text"}, "files": {"other": ("a.wav", b"x")}}, "file"),
        ({"data": {"model": "whisper"}, "files": {"other": ("a.wav", b"x")}}, "file"),
        ({"content": b"--x", "headers": {"content-type": "multipart/form-data"}}, "body"),
    ):
        status, error = asyncio.run(post(**options))
        assert (status, error["param"]) == (400, param), error


def test_other_models_and_routes_are_refused(
    gateway: SpeechGateway,
    make_gateway: Callable[..., Any],  # noqa: F811
) -> None:
    assert gateway.send(wav(clip(0.1)), model="other").status_code == 404
    status, found = gateway.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
    assert status == 404 and "serves generate; it serves transcribe" in found["error"]["message"]
    text = make_gateway()
    reply = asyncio.run(_posted(text))
    assert reply.status_code == 501 and "/v1/audio/transcriptions" in reply.json()["error"]["message"]


async def _posted(gateway: Any) -> Any:
    async with gateway.client() as client:
        return await client.post("/v1/audio/transcriptions", files={"file": ("a.wav", b"x")})


def test_the_official_client_sends_a_file(gateway: SpeechGateway, greedy: None) -> None:
    data = wav(clip(3.0))
    whole = gateway.send(data, language="en", response_format="verbose_json").json()

    async def calls(client: openai.AsyncOpenAI) -> None:
        file = ("clip.wav", data)
        audio, options = client.audio, {"model": "whisper", "file": file}
        found = await audio.transcriptions.create(**options, language="en")
        assert found.text == whole["text"] and found.usage.seconds == 3
        verbose = await audio.transcriptions.create(
            **options, language="en", response_format="verbose_json", timestamp_granularities=["segment"]
        )
        assert verbose.duration == 3.0 and len(verbose.segments) == len(whole["segments"])
        assert verbose.segments[0].avg_logprob == whole["segments"][0]["avg_logprob"]
        text = await audio.transcriptions.create(**options, language="en", response_format="text")
        assert text.strip() == whole["text"]
        stream = await audio.transcriptions.create(**options, language="en", stream=True)
        *deltas, done = [event async for event in stream]
        assert done.type == "transcript.text.done" and done.text == whole["text"]
        assert "".join(event.delta for event in deltas) == whole["text"]
        with pytest.warns(DeprecationWarning):
            assert (await audio.translations.create(**options)).text
        with pytest.raises(openai.BadRequestError, match="language"):
            await audio.transcriptions.create(**options, language="klingon")

    gateway.openai(calls)


def test_an_engine_is_ready_when_it_has_transcribed_a_second_of_silence(gateway: SpeechGateway) -> None:
    assert list(kinds(gateway.service)) == ["/v1/audio/transcriptions"]
    assert asyncio.run(ask_each_kind(gateway.service, gateway.app.router, 0))
    assert gateway.submits and {submit.max_tokens for submit in gateway.submits} == {4}
