"""Compare Whisper in the whole engine with transformers in float32."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from engine.api.errors import RequestError
from engine.api.messages import SpeechRules
from engine.kv.layout import layout
from engine.llm import LLM, AudioPrompt, Generation, Params
from engine.models.checkpoint import read_checkpoint
from tests.engine.speech.whisper import SIZES, Whisper, spectrogram, write

WINDOW = SIZES["max_source_positions"]
SMALL = {"block_tokens": 16, "kv_bytes": 4 << 20, "threads": 1, "max_running": 4, "max_step_tokens": 2 * WINDOW + 9}


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Whisper:
    return write(tmp_path_factory.mktemp("whisper"))


def greedy(count: int, **more: object) -> Params:
    return Params(temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=2, **more)  # type: ignore[arg-type]


def prompts(whisper: Whisper) -> list[AudioPrompt]:
    previous = (whisper.id("<|startofprev|>"), *whisper.tokenizer.encode(" the lazy dog").ids)
    begins = [
        whisper.begins(),
        whisper.begins("fr", "translate"),
        whisper.begins("zh", timestamps=True),
        (*previous, *whisper.begins()),
        (whisper.id("<|startoftranscript|>"),),
    ]
    return [AudioPrompt(spectrogram(seed), ids) for seed, ids in enumerate(begins)]


def assert_same(whisper: Whisper, prompt: AudioPrompt, made: Generation) -> None:
    reply = [*prompt.ids, *made.ids]
    expected = whisper.logits(prompt.spectrogram, reply[:-1])[len(prompt.ids) - 1 :].log_softmax(-1)
    assert made.ids == expected.argmax(-1).tolist()
    for position, found in enumerate(made.logprobs):
        assert found.logprob == pytest.approx(expected[position, found.token].item(), abs=1e-4)


def test_replies_equal_transformers_alone_and_in_a_batch(whisper: Whisper) -> None:
    each = prompts(whisper)
    with LLM(whisper.path, **SMALL) as llm:
        together = llm.generate(each, greedy(12))
        alone = [llm.generate(one, greedy(12))[0] for one in each[:2]]
    for prompt, made in zip(each, together, strict=True):
        assert_same(whisper, prompt, made)
    assert [one.ids for one in alone] == [one.ids for one in together[:2]]
    assert len({tuple(one.ids) for one in together}) > 1, "the replies do not depend on the audio"


def test_replies_depend_on_the_audio(whisper: Whisper) -> None:
    with LLM(whisper.path, **SMALL) as llm:
        one, other = llm.generate([AudioPrompt(spectrogram(seed), whisper.begins()) for seed in (1, 2)], greedy(6))
    assert [a.logprob for a in one.logprobs] != [b.logprob for b in other.logprobs]


def test_preempted_requests_encode_their_audio_again(whisper: Whisper) -> None:
    form = layout(read_checkpoint(whisper.path).model, block_tokens=16, element_bytes=4)
    longest = WINDOW + SIZES["max_target_positions"]
    blocks = 2 * form.blocks_for(WINDOW + 16) + 1
    with LLM(whisper.path, **{**SMALL, "max_context": longest, "kv_bytes": blocks * form.block_bytes}) as llm:
        made = llm.generate(prompts(whisper), greedy(30))
    assert sum(one.timing.preemptions for one in made if one.timing) > 0, "the cache was large enough for all"
    for prompt, one in zip(prompts(whisper), made, strict=True):
        assert_same(whisper, prompt, one)


def test_a_request_is_resumed_after_emitted_tokens(whisper: Whisper) -> None:
    prompt = prompts(whisper)[0]
    with LLM(whisper.path, **SMALL) as llm:
        whole = llm.generate(prompt, greedy(10))[0]
        submit, reply = llm._submit(prompt, greedy(10))
        llm._loop.post([msgspec.structs.replace(submit, emitted=tuple(whole.ids[:4]))])
        llm._collect({submit.id: reply})
    assert reply.generation.ids == whole.ids[4:]


def test_a_reply_ends_where_the_decoder_has_no_positions_left(whisper: Whisper) -> None:
    prompt = prompts(whisper)[0]
    with LLM(whisper.path, **SMALL) as llm:
        made = llm.generate(prompt, greedy(1000))[0]
    assert made.finish == "length" and len(made.ids) == SIZES["max_target_positions"] - len(prompt.ids)
    assert_same(whisper, prompt, made)


def test_rules_of_timestamps_give_the_tokens_of_transformers(whisper: Whisper) -> None:
    generation = whisper.model.generation_config
    rules = SpeechRules(
        begin=((whisper.id("<|en|>"),), (whisper.id("<|transcribe|>"),)),
        timestamps=whisper.id("<|0.00|>"),
        no_timestamps=generation.no_timestamps_token_id,
        latest_first=generation.max_initial_timestamp_index,
        end=whisper.id("<|endoftext|>"),
        suppressed=tuple(generation.suppress_tokens),
        suppressed_first=tuple(generation.begin_suppress_tokens),
    )
    params = Params(temperature=0.0, max_tokens=40, speech=rules)
    start = (whisper.id("<|startoftranscript|>"),)
    with LLM(whisper.path, **SMALL) as llm:
        made = llm.generate([AudioPrompt(spectrogram(seed), start) for seed in range(3)], params)
    for seed, one in enumerate(made):
        expected = whisper.model.generate(
            input_features=torch.from_numpy(spectrogram(seed))[None],
            language="en",
            task="transcribe",
            return_timestamps=True,
            max_new_tokens=38,
            return_segments=True,
        )["segments"][0]
        tokens = [token for segment in expected for token in segment["tokens"].tolist()]
        found = [token for token in one.ids[2:] if token != rules.end]
        assert one.ids[:2] == [rules.begin[0][0], rules.begin[1][0]]
        assert found[: len(tokens)] == tokens and len(tokens) > 5


@pytest.mark.parametrize(
    ("shape", "words"), [((80, 2 * WINDOW - 2), "one window of audio"), ((128, 2 * WINDOW), "no input_features")]
)
def test_windows_of_other_shapes_are_refused(whisper: Whisper, shape: Sequence[int], words: str) -> None:
    with LLM(whisper.path, **SMALL) as llm, pytest.raises(RequestError, match=words):
        llm.generate(AudioPrompt(np.zeros(shape, np.float32), whisper.begins()), greedy(3))


def test_prompts_of_text_are_refused(whisper: Whisper) -> None:
    with LLM(whisper.path, **SMALL) as llm, pytest.raises(RequestError, match="one window of audio"):
        llm.generate([[0] * WINDOW], greedy(3))


def test_models_with_128_mels_are_read(tmp_path: Path) -> None:
    whisper = write(tmp_path, num_mel_bins=128, encoder_layers=1, decoder_layers=1)
    prompt = AudioPrompt(spectrogram(1, 128), whisper.begins())
    with LLM(whisper.path, **SMALL) as llm:
        assert_same(whisper, prompt, llm.generate(prompt, greedy(5))[0])
