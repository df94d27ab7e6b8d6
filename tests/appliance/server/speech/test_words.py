"""Times of words, compared with transformers."""

import json
from typing import Any

import numpy as np
import openai
import pytest
import torch
from transformers.models.whisper.generation_whisper import _dynamic_time_warping
from transformers.models.whisper.tokenization_whisper import _combine_tokens_into_words

from appliance.server.speech import transcript
from appliance.server.speech.words import token_starts, words_of
from engine.media.spectrogram import HOP, SAMPLE_RATE, log_mel
from tests.appliance.server.http.conftest import checkpoint, make_gateway  # noqa: F401
from tests.appliance.server.speech.conftest import SpeechGateway, clip, wav
from tests.engine.speech.test_alignment import Outputs
from tests.engine.speech.whisper import WINDOW_S, Whisper

ALL_HEADS = [[1, 0], [1, 1]]  # of the upper half of the decoder


@pytest.fixture
def greedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transcript, "MOST_COMPRESSION", 1e9)
    monkeypatch.setattr(transcript, "LEAST_LOGPROB", -1e9)


def theirs(matrix: np.ndarray) -> list[int]:
    text, times = _dynamic_time_warping(-matrix.astype(np.float64))
    return times[np.pad(np.diff(text), (1, 0), constant_values=1).astype(bool)].tolist()


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (2, 2), (5, 3), (7, 40), (31, 32)])
def test_paths_equal_transformers(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(shape[1])
    for rounded in (None, 0):  # rounded numbers have ties
        matrix = rng.normal(size=shape).astype(np.float32)
        matrix = matrix if rounded is None else matrix.round(rounded)
        assert token_starts(matrix).tolist() == theirs(matrix)


class Words:
    """The part of a tokenizer that transformers' functions use."""

    eos_token_id = 10**6

    def __init__(self, whisper: Whisper) -> None:
        self._tokenizer = whisper.tokenizer

    def decode(self, tokens: list[int], **_: Any) -> str:
        return self._tokenizer.decode(tokens)


@pytest.mark.parametrize("language", ["english", "chinese"])
@pytest.mark.parametrize(
    "text",
    [
        ' The quick (brown) fox, it\'s "jumping"...',
        " 你好，世界。 é — “quoted” $ 5",
        "no space , then",
        " ¡hola! ¿qué?",
        "",
        " - - -",
        " ends (",
    ],
)
def test_words_equal_transformers(whisper: Whisper, text: str, language: str) -> None:
    ids = whisper.tokenizer.encode(text).ids
    for tokens in (ids, ids[:-1], ids[1:]):  # with incomplete characters at both ends
        expected, groups, _ = _combine_tokens_into_words(Words(whisper), tokens, language)
        found = words_of(tokens, whisper.tokenizer.decode, "zh" if language == "chinese" else "en")
        assert [word.text for word in found] == expected
        assert [word.count for word in found] == [len(group) for group in groups]


def times_of(whisper: Whisper, samples: np.ndarray, tokens: list[int]) -> list[float]:
    """Return transformers' times of the tokens of one window, from a pass of the model over them."""
    ids = torch.tensor([[*whisper.begins(), *tokens]])
    features = torch.from_numpy(log_mel(samples, mels=80, frames=int(WINDOW_S * SAMPLE_RATE) // HOP))[None]
    whisper.model.set_attn_implementation("eager")
    with torch.no_grad():
        made = whisper.model(input_features=features, decoder_input_ids=ids, output_attentions=True)
    times = whisper.model._extract_token_timestamps(
        Outputs(ids, [made.cross_attentions]), ALL_HEADS, num_frames=len(samples) // HOP, num_input_ids=3
    )
    found: list[float] = times[0, 3:].tolist()
    return found


def expected_words(whisper: Whisper, tokens: list[int], times: list[float]) -> list[dict[str, Any]]:
    words, _, places = _combine_tokens_into_words(Words(whisper), tokens, "english")
    return [
        {
            "word": word.strip(),
            **{end: pytest.approx(time, abs=0.011) for end, time in zip(("start", "end"), ends, strict=True)},
        }
        for word, at in zip(words, places, strict=True)
        for ends in [(times[at[0]], times[at[-1] + 1])]
        if word.strip()
    ]


def request(gateway: SpeechGateway, samples: np.ndarray, **fields: Any) -> dict[str, Any]:
    reply = gateway.send(wav(samples), language="en", response_format="verbose_json", **fields)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


@pytest.mark.parametrize(("seed", "seconds"), [(1, WINDOW_S), (2, WINDOW_S), (3, 1.3)])
def test_times_of_words_equal_transformers(
    gateway: SpeechGateway, whisper: Whisper, greedy: None, seed: int, seconds: float
) -> None:
    samples, seen = clip(seconds, seed), {"timestamp_granularities[]": ["word", "segment"]}
    found = request(gateway, samples, **seen)
    (first, alignment), end = gateway.submits[:2], whisper.id("<|endoftext|>")
    assert first.sampling.speech is not None and alignment.sampling.alignment is not None
    text = list(alignment.prompt[alignment.source + 4 :])
    assert text and max(text) < end and alignment.max_tokens == 0
    times, at, expected = times_of(whisper, samples, text), 0, []
    for segment in found["segments"]:
        if segment["seek"] == 0:
            own = [token for token in segment["tokens"] if token < end]
            at = next(one for one in range(at, len(text)) if text[one : one + len(own)] == own)
            expected += expected_words(whisper, own, times[at : at + len(own) + 1])
            at += len(own)
    assert expected and found["words"][: len(expected)] == expected


def test_words_replace_segments_unless_both_are_requested(gateway: SpeechGateway, greedy: None) -> None:
    samples = clip(WINDOW_S)
    plain = request(gateway, samples)
    words = request(gateway, samples, **{"timestamp_granularities[]": "word"})
    both = request(gateway, samples, **{"timestamp_granularities[]": ["segment", "word"]})
    assert "words" not in plain and "segments" not in words and words["text"] == plain["text"]
    assert both["words"] == words["words"] and both["segments"] == plain["segments"]
    assert "".join(one["word"] for one in words["words"]) == plain["text"].replace(" ", "")


def test_times_of_words_ascend_within_a_long_recording(gateway: SpeechGateway, greedy: None) -> None:
    found = request(gateway, clip(7.3, 5), **{"timestamp_granularities[]": "word"})
    starts = [one["start"] for one in found["words"]]
    assert starts == sorted(starts) and starts[-1] > 4 and max(one["end"] for one in found["words"]) <= 7.3
    assert all(one["start"] <= one["end"] for one in found["words"])


def test_streams_have_the_words_of_each_delta(gateway: SpeechGateway, greedy: None) -> None:
    samples, words = clip(3.0), {"timestamp_granularities[]": "word"}
    whole = request(gateway, samples, **words)
    reply = gateway.send(wav(samples), language="en", stream="true", **words)
    *deltas, done = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    assert done["text"] == whole["text"] and done["words"] == whole["words"]
    assert [one for delta in deltas for one in delta["words"]] == whole["words"]


def test_the_official_client_reads_words(gateway: SpeechGateway, greedy: None) -> None:
    data = wav(clip(WINDOW_S))

    async def calls(client: openai.AsyncOpenAI) -> None:
        found = await client.audio.transcriptions.create(
            model="whisper",
            file=("clip.wav", data),
            language="en",
            response_format="verbose_json",
            timestamp_granularities=["word"],
        )
        assert found.words and found.text.startswith(found.words[0].word) and found.words[0].end >= 0

    gateway.openai(calls)


@pytest.mark.parametrize("format", ["json", "text", "srt", "vtt"])
def test_other_formats_have_no_words(gateway: SpeechGateway, format: str) -> None:
    reply = gateway.send(wav(clip(0.1)), response_format=format, **{"timestamp_granularities[]": "word"})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "timestamp_granularities"
    assert not gateway.submits
