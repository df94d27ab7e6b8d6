"""Compare Whisper in the whole engine with transformers in float32."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

from engine.api.errors import RequestError
from engine.api.messages import SpeechRules
from engine.kv.layout import layout
from engine.llm import LLM, AudioPrompt, Generation, Params
from engine.models.checkpoint import read_checkpoint
from engine.sampling.speech import apply_rules
from kernels.cpu.library import best
from tests.cells import Shows
from tests.engine.layers.test_footprint import compare
from tests.engine.speech.whisper import LANGUAGES, SIZES, Whisper, spectrogram, write

WINDOW = SIZES["max_source_positions"]
SMALL = {"block_tokens": 16, "kv_bytes": 4 << 20, "threads": 1, "max_running": 4, "max_step_tokens": 2 * WINDOW + 9}


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Whisper:
    return write(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def llm(whisper: Whisper) -> Iterator[LLM]:
    with LLM(whisper.path, **SMALL) as made:
        yield made


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


def test_torch_kernels_give_the_same_replies(whisper: Whisper, llm: LLM, shows: Shows) -> None:
    each = prompts(whisper)[:3]
    with LLM(whisper.path, **SMALL, kernels="torch") as torch_llm:
        made = torch_llm.generate(each, greedy(8))
    for prompt, one, other in zip(each, made, llm.generate(each, greedy(8)), strict=True):
        assert_same(whisper, prompt, one)
        assert one.ids == other.ids
    shows(whisper.path, "equals transformers", "compiled CPU")


def test_two_processes_equal_transformers(whisper: Whisper, shows: Shows) -> None:
    with LLM(whisper.path, **SMALL, tensor=2) as two:
        for prompt, made in zip(prompts(whisper)[:2], two.generate(prompts(whisper)[:2], greedy(6)), strict=True):
            assert_same(whisper, prompt, made)
    shows(whisper.path, "2 ranks")


def test_weights_take_the_planned_bytes(whisper: Whisper, shows: Shows) -> None:
    for kernels in ("torch", best()):
        compare(read_checkpoint(whisper.path), kernels)
    shows(whisper.path, "loads", "planned bytes = loaded bytes")


def test_replies_equal_transformers_alone_and_in_a_batch(whisper: Whisper, llm: LLM) -> None:
    each = prompts(whisper)
    together = llm.generate(each, greedy(12))
    alone = [llm.generate(one, greedy(12))[0] for one in each[:2]]
    for prompt, made in zip(each, together, strict=True):
        assert_same(whisper, prompt, made)
    assert [one.ids for one in alone] == [one.ids for one in together[:2]]
    assert len({tuple(one.ids) for one in together}) > 1, "the replies do not depend on the audio"


def test_replies_depend_on_the_audio(whisper: Whisper, llm: LLM) -> None:
    one, other = llm.generate([AudioPrompt(spectrogram(seed), whisper.begins()) for seed in (1, 2)], greedy(6))
    assert [a.logprob for a in one.logprobs] != [b.logprob for b in other.logprobs]


def test_preempted_requests_encode_their_audio_again(whisper: Whisper, shows: Shows) -> None:
    form = layout(read_checkpoint(whisper.path).model, block_tokens=16, element_bytes=4)
    longest = WINDOW + SIZES["max_target_positions"]
    blocks = 2 * form.blocks_for(WINDOW + 16) + 1
    with LLM(whisper.path, **{**SMALL, "max_context": longest, "kv_bytes": blocks * form.block_bytes}) as llm:
        made = llm.generate(prompts(whisper), greedy(30))
    assert sum(one.timing.preemptions for one in made if one.timing) > 0, "the cache was large enough for all"
    for prompt, one in zip(prompts(whisper), made, strict=True):
        assert_same(whisper, prompt, one)
    shows(whisper.path, "preempted")


def test_a_request_is_resumed_after_emitted_tokens(whisper: Whisper, llm: LLM) -> None:
    prompt = prompts(whisper)[0]
    whole = llm.generate(prompt, greedy(10))[0]
    submit, reply = llm._submit(prompt, greedy(10))
    llm._loop.post([msgspec.structs.replace(submit, emitted=tuple(whole.ids[:4]))])
    llm._collect({submit.id: reply})
    assert reply.generation.ids == whole.ids[4:]


def test_a_reply_ends_where_the_decoder_has_no_positions_left(whisper: Whisper, llm: LLM) -> None:
    prompt = prompts(whisper)[0]
    made = llm.generate(prompt, greedy(1000))[0]
    assert made.finish == "length" and len(made.ids) == SIZES["max_target_positions"] - len(prompt.ids)
    assert_same(whisper, prompt, made)


def rules_of(whisper: Whisper) -> SpeechRules:
    generation = whisper.model.generation_config
    return SpeechRules(
        begin=((whisper.id("<|en|>"),), (whisper.id("<|transcribe|>"),)),
        timestamps=whisper.id("<|0.00|>"),
        no_timestamps=generation.no_timestamps_token_id,
        latest_first=generation.max_initial_timestamp_index,
        end=whisper.id("<|endoftext|>"),
        suppressed=tuple(generation.suppress_tokens),
        suppressed_first=tuple(generation.begin_suppress_tokens),
    )


def processors(whisper: Whisper, begins: int) -> list[Any]:
    """Those that transformers uses for a transcript with timestamps, in its order."""
    generation = whisper.model.generation_config
    return [
        SuppressTokensAtBeginLogitsProcessor(generation.begin_suppress_tokens, begin_index=begins),
        SuppressTokensLogitsProcessor(generation.suppress_tokens),
        WhisperTimeStampLogitsProcessor(generation, begin_index=begins),
    ]


def test_replies_with_timestamps_are_those_of_transformers_logits_processors(whisper: Whisper, llm: LLM) -> None:
    rules = rules_of(whisper)
    params = Params(temperature=0.0, max_tokens=30, speech=rules, logprobs=0)
    start = whisper.id("<|startoftranscript|>")
    made = llm.generate([AudioPrompt(spectrogram(seed), (start,)) for seed in range(3)], params)
    for seed, one in enumerate(made):
        assert one.ids[:2] == [rules.begin[0][0], rules.begin[1][0]]
        reply = [start, *one.ids]
        logits = whisper.logits(spectrogram(seed), reply[:-1])
        for at in range(3, len(reply)):
            scores = logits[None, at - 1].clone()
            for processor in processors(whisper, 3):
                scores = processor(torch.tensor([reply[:at]]), scores)
            assert reply[at] == int(scores.argmax()), (seed, at)
            found = one.logprobs[at - 1].logprob
            assert found == pytest.approx(float(scores.log_softmax(-1)[0, reply[at]]), abs=1e-4)
        assert sum(token >= rules.timestamps for token in one.ids) > 0


def test_rules_equal_transformers_for_random_transcripts(whisper: Whisper) -> None:
    rules, rng = rules_of(whisper), np.random.default_rng(5)
    zero, vocab = rules.timestamps, whisper.tokenizer.get_vocab_size()
    assert zero is not None
    for _ in range(200):
        length = int(rng.integers(0, 6))
        times = np.sort(rng.integers(zero, vocab, length))
        transcript = [int(rng.choice((time, 40))) for time in times]
        logits = torch.from_numpy(rng.normal(size=vocab).astype(np.float32) * rng.choice((0.5, 3)))
        expected = logits[None].clone()
        for processor in processors(whisper, 3):
            expected = processor(torch.tensor([[301, 302, 306, *transcript]]), expected)
        apply_rules(logits, rules, transcript)
        torch.testing.assert_close(logits, expected[0])


def test_first_tokens_are_restricted_but_their_logprobs_are_not(whisper: Whisper, llm: LLM) -> None:
    """The most likely language is sampled, and the probability of no speech is known."""
    start, codes = whisper.id("<|startoftranscript|>"), [whisper.id(f"<|{code}|>") for code in LANGUAGES]
    rules = msgspec.structs.replace(rules_of(whisper), begin=(tuple(codes),))
    params = Params(temperature=0.0, max_tokens=2, speech=rules, logprobs=0, logprob_ids=(whisper.id("<|nospeech|>"),))
    (made,) = llm.generate(AudioPrompt(spectrogram(4), (start,)), params)
    expected = whisper.logits(spectrogram(4), [start])[0].log_softmax(-1)
    assert made.ids[0] == max(codes, key=lambda code: float(expected[code]))
    assert made.logprobs[0].logprob == pytest.approx(float(expected[made.ids[0]]), abs=1e-4)
    assert made.logprobs[0].top_logprobs[0] == pytest.approx(float(expected[whisper.id("<|nospeech|>")]), abs=1e-4)


@pytest.mark.parametrize(
    ("shape", "words"), [((80, 2 * WINDOW - 2), "one window of audio"), ((128, 2 * WINDOW), "no input_features")]
)
def test_windows_of_other_shapes_are_refused(whisper: Whisper, llm: LLM, shape: Sequence[int], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        llm.generate(AudioPrompt(np.zeros(shape, np.float32), whisper.begins()), greedy(3))


def test_prompts_of_text_are_refused(whisper: Whisper, llm: LLM) -> None:
    with pytest.raises(RequestError, match="one window of audio"):
        llm.generate([[0] * WINDOW], greedy(3))


def test_models_with_128_mels_are_read(tmp_path: Path) -> None:
    whisper = write(tmp_path, num_mel_bins=128, encoder_layers=1, decoder_layers=1)
    prompt = AudioPrompt(spectrogram(1, 128), whisper.begins())
    with LLM(whisper.path, **SMALL) as llm:
        assert_same(whisper, prompt, llm.generate(prompt, greedy(5))[0])
