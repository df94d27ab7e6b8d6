"""Compare the alignment of transcripts with their audio with transformers."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from engine.api.errors import CheckpointError, RequestError
from engine.api.messages import AlignmentOptions
from engine.llm import LLM, AudioPrompt, Generation, Params
from engine.models.checkpoint import read_checkpoint
from engine.worker.alignment import median_filter
from tests.engine.speech.whisper import SIZES, Whisper, spectrogram, write

WINDOW = SIZES["max_source_positions"]
HEADS = [[1, 0], [0, 1], [1, 1]]
SMALL = {"block_tokens": 16, "kv_bytes": 4 << 20, "threads": 1, "max_running": 4, "max_step_tokens": WINDOW + 9}
FIRST = 3


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Whisper:
    return write(tmp_path_factory.mktemp("whisper"), alignment_heads=HEADS)


@pytest.fixture(scope="module")
def llm(whisper: Whisper) -> Iterator[LLM]:
    with LLM(whisper.path, **SMALL) as made:
        yield made


@dataclass
class Outputs:
    """Output of transformers' generation, made by one pass over a complete transcript."""

    sequences: torch.Tensor
    cross_attentions: Sequence[Any]

    def __contains__(self, name: str) -> bool:
        return name in vars(self)


@torch.no_grad()
def expected(whisper: Whisper, prompt: AudioPrompt, positions: int, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """Return the matrix that transformers gives to dynamic time warping."""
    from transformers.models.whisper import generation_whisper

    ids = torch.tensor([prompt.ids])
    whisper.model.set_attn_implementation("eager")
    made = whisper.model(
        input_features=torch.from_numpy(prompt.spectrogram)[None], decoder_input_ids=ids, output_attentions=True
    )
    seen: list[np.ndarray] = []
    original = generation_whisper._dynamic_time_warping

    def warped(matrix: np.ndarray) -> Any:
        seen.append(-matrix)
        return original(matrix)

    monkeypatch.setattr(generation_whisper, "_dynamic_time_warping", warped)
    whisper.model._extract_token_timestamps(
        Outputs(ids, [made.cross_attentions]), HEADS, num_frames=2 * positions, num_input_ids=FIRST
    )
    return seen[0]


def prompts(whisper: Whisper) -> list[AudioPrompt]:
    texts = (" the quick brown fox", "hello world, what is 17 + 25?", " a")
    return [
        AudioPrompt(spectrogram(seed), (*whisper.begins(), *whisper.tokenizer.encode(text).ids))
        for seed, text in enumerate(texts)
    ]


def aligned(positions: int) -> Params:
    return Params(alignment=AlignmentOptions(FIRST, positions))


def matrix(made: Generation) -> np.ndarray:
    assert made.alignment is not None and made.finish == "length" and made.error is None
    return np.frombuffer(made.alignment.values, "<f4").reshape(made.alignment.shape)


@pytest.mark.parametrize("positions", [WINDOW, 37, 2])
def test_alignments_equal_transformers(
    whisper: Whisper, llm: LLM, positions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = prompts(whisper)
    for prompt, made in zip(each, llm.generate(each, aligned(positions)), strict=True):
        assert made.ids == []
        np.testing.assert_allclose(matrix(made), expected(whisper, prompt, positions, monkeypatch), atol=2e-3)


def test_alignments_are_the_same_in_chunks_beside_replies_and_with_torch(
    whisper: Whisper, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step has room for the audio and 9 tokens, so prompts are computed in chunks, together with others."""
    each = prompts(whisper)
    alone = [matrix(llm.generate(prompt, aligned(50))[0]) for prompt in each]
    replies = [AudioPrompt(spectrogram(9), whisper.begins())] * 2
    params = [Params(temperature=0.0, max_tokens=9, ignore_eos=True)] * 2 + [aligned(50)] * 3
    for found, made in zip(alone, llm.generate([*replies, *each], params)[2:], strict=True):
        np.testing.assert_allclose(matrix(made), found, atol=2e-3)
    with LLM(whisper.path, **SMALL, kernels="torch") as other:
        np.testing.assert_allclose(matrix(other.generate(each[0], aligned(50))[0]), alone[0], atol=2e-3)


@pytest.mark.parametrize(("bits", "kernels", "most"), [(8, None, 0.02), (4, None, 0.2), (4, "torch", 0.2)])
def test_keys_of_few_bits_give_nearly_the_same(
    whisper: Whisper, llm: LLM, bits: int, kernels: str | None, most: float
) -> None:
    prompt = prompts(whisper)[1]
    chosen = {} if kernels is None else {"kernels": kernels}
    with LLM(whisper.path, **SMALL, kv_dtype=f"int{bits}", **chosen) as other:
        found = matrix(other.generate(prompt, aligned(WINDOW))[0])
    away = np.abs(found - matrix(llm.generate(prompt, aligned(WINDOW))[0])).mean()
    assert 0 < away < most


def test_two_ranks_share_the_alignment_heads(whisper: Whisper, llm: LLM) -> None:
    prompt = prompts(whisper)[0]
    with LLM(whisper.path, **SMALL, tensor=2) as two:
        found = matrix(two.generate(prompt, aligned(WINDOW))[0])
    np.testing.assert_allclose(found, matrix(llm.generate(prompt, aligned(WINDOW))[0]), atol=2e-3)


@pytest.mark.parametrize("options", [AlignmentOptions(-1, 5), AlignmentOptions(99, 5), AlignmentOptions(3, WINDOW + 1)])
def test_alignments_outside_of_the_prompt_are_refused(whisper: Whisper, llm: LLM, options: AlignmentOptions) -> None:
    with pytest.raises(RequestError, match="positions of audio"):
        llm.generate(prompts(whisper)[0], Params(alignment=options))


def test_replies_are_not_aligned(whisper: Whisper, llm: LLM) -> None:
    submit, _ = llm._submit(prompts(whisper)[0], aligned(5))
    with pytest.raises(RequestError, match="without a reply"):
        llm._loop.scheduler.config.check(msgspec.structs.replace(submit, max_tokens=1))


@pytest.mark.parametrize("heads", [[[2, 0]], [[0, 2]], [[0]], [], "all", [[True, 0]]])
def test_alignment_heads_outside_of_the_decoder_are_refused(tmp_path: Path, heads: Any) -> None:
    whisper = write(tmp_path, alignment_heads=heads)
    with pytest.raises(CheckpointError, match="alignment_heads"):
        read_checkpoint(whisper.path)


@pytest.mark.parametrize("width", [4, 1_499])
def test_filters_of_other_widths_are_refused(tmp_path: Path, width: int) -> None:
    """A copy of the weights has this many times their size."""
    file = write(tmp_path).path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"median_filter_width": width}))
    with pytest.raises(CheckpointError, match="median_filter_width"):
        read_checkpoint(tmp_path)


def test_the_upper_half_of_the_decoder_has_the_alignment_heads_by_default(tmp_path: Path) -> None:
    encoder = read_checkpoint(write(tmp_path).path).model.encoder
    assert encoder is not None and encoder.alignment is not None
    assert encoder.alignment.heads == ((1, 0), (1, 1))


@pytest.mark.parametrize("width", [1, 3, 7, 31])
@pytest.mark.parametrize("columns", [1, 4, 16, 37, 200])
def test_medians_are_those_of_sorted_windows(width: int, columns: int) -> None:
    """Edges are mirrored. Rows that are too short for a mirror are unchanged."""
    x = torch.randn((5, columns), generator=torch.Generator().manual_seed(width)).round(decimals=1)
    half, wanted = width // 2, x.numpy()
    if columns > half:
        padded = np.pad(wanted, ((0, 0), (half, half)), mode="reflect")
        wanted = np.median(np.lib.stride_tricks.sliding_window_view(padded, width, 1), -1)
    np.testing.assert_array_equal(median_filter(x, width).numpy(), wanted)
