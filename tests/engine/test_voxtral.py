"""Voxtral: spectrograms and replies equal transformers' for clips of 1, 31 and 65 seconds."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from engine.api.media import MediaItem
from engine.llm import MediaPrompt
from engine.media.families import read_processors
from engine.media.processed import Processed
from engine.media.processor import process_audio
from engine.worker.grid_positions import as_array
from kernels.cpu.library import best
from tests.engine.media_models import TEXT, Family, check, counts, greedy, opened, saved
from tests.engine.test_audio_media import AUDIO, MELS, clip

SECONDS = {1: 375, 31: 750, 65: 1125}
"""Durations of clips, and their numbers of tokens."""


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    folder = tmp_path_factory.mktemp("voxtral")
    config = transformers.VoxtralConfig(
        audio_config={
            **{"num_mel_bins": MELS, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2},
            **{"intermediate_size": 32, "max_source_positions": 1500},
        },
        text_config={**TEXT, "model_type": "llama", "max_position_embeddings": 2048, "num_hidden_layers": 2},
        audio_token_id=AUDIO,
    )
    model = saved(transformers.VoxtralForConditionalGeneration(config), folder)
    (folder / "preprocessor_config.json").write_text(extractor().to_json_string())
    return Family(model, folder)


def extractor() -> transformers.WhisperFeatureExtractor:
    return transformers.WhisperFeatureExtractor(feature_size=MELS)


def reference(samples: int) -> torch.Tensor:
    """Return the spectrograms of transformers, [windows, mels, frames], as VoxtralProcessor cuts them."""
    options = {"sampling_rate": 16_000, "padding": True, "truncation": False, "pad_to_multiple_of": 480_000}
    found = extractor()(clip(samples), return_tensors="pt", **options)["input_features"]
    return found.reshape(MELS, -1, 3000).transpose(0, 1).contiguous()


def processed(folder: Path, samples: int) -> Processed:
    processor = read_processors(folder).audio
    assert processor is not None
    return process_audio(processor, clip(samples))


@pytest.mark.parametrize("seconds", SECONDS)
def test_spectrograms_and_tokens_equal_transformers(family: Family, seconds: int) -> None:
    samples = 16_000 * seconds + 37
    found, want = processed(family.folder, samples), reference(samples)
    np.testing.assert_allclose(as_array(found.tensors["input_features"]), want.numpy(), rtol=0, atol=1e-5)
    assert found.runs == (SECONDS[seconds],) == (want.shape[0] * 375,)


def prompt(folder: Path, *parts: tuple[int, int]) -> MediaPrompt:
    """Return a prompt of pairs: tokens of text, and samples of the clip after them."""
    ids: list[int] = []
    items = []
    for number, (text, samples) in enumerate(parts):
        ids += [3 + (11 * number + 7 * at) % 80 for at in range(text)]
        one = processed(folder, samples)
        items.append(MediaItem("audio", one.digest, ((len(ids), one.runs[0]),), one.tensors))
        ids += [AUDIO] * one.runs[0]
    return MediaPrompt((*ids, 5, 7), tuple(items))


@torch.no_grad()
def reply(family: Family, given: MediaPrompt, lengths: tuple[int, ...], count: int) -> tuple[list[int], list[float]]:
    features = torch.cat([reference(samples) for samples in lengths])
    ids, logprobs = list(given.ids), []
    for _ in range(count):
        row = family.model(input_ids=torch.tensor([ids]), input_features=features).logits[0, -1].log_softmax(-1)
        logprobs.append(float(row.max()))
        ids.append(int(row.argmax()))
    return ids[len(given.ids) :], logprobs


@pytest.mark.parametrize("kernels", ("torch", best()))
def test_replies_equal_transformers(family: Family, kernels: str) -> None:
    """Clips of 1, 31 and 65 s, and two in one prompt; a repeated prompt has a prefix hit."""
    cases = [((2, 16_000 * seconds),) for seconds in SECONDS] + [((1, 9_000), (3, 31 * 16_000))]
    prompts = [prompt(family.folder, *parts) for parts in cases]
    settings = {"max_context": 1200, "max_step_tokens": 512, "max_running": 4, "kv_bytes": 1 << 23, "block_tokens": 16}
    with opened(family, kernels, **settings) as llm:
        found = llm.generate(prompts, greedy(3))
        assert counts(llm)[0] == 4  # of five clips, one is repeated
        again = llm.generate(prompts[0], greedy(3))[0]
    for parts, given, one in zip(cases, prompts, found, strict=True):
        check(one, reply(family, given, tuple(samples for _, samples in parts), 3))
    assert again.ids == found[0].ids and again.timing.cached_tokens >= 300


def test_wrong_sizes_are_refused(family: Family, tmp_path: Path) -> None:
    from engine.api.errors import CheckpointError
    from engine.models.checkpoint import read_checkpoint

    config = json.loads((family.folder / "config.json").read_text())
    config["audio_config"]["intermediate_size"] = 33
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="intermediate_size of audio_config is 33"):
        read_checkpoint(tmp_path, weights=False)
