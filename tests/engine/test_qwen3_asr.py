"""Qwen3-ASR: spectrograms and replies equal transformers' for clips of several lengths."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from transformers.models.qwen3_asr.feature_extraction_qwen3_asr import Qwen3ASRFeatureExtractor

from engine.api.errors import CheckpointError
from engine.api.media import MediaItem
from engine.llm import MediaPrompt
from engine.media.families import read_processors
from engine.media.processed import Processed
from engine.media.processor import process_audio
from engine.models.checkpoint import read_checkpoint
from engine.worker.grid_positions import as_array
from kernels.cpu.library import best
from tests.engine.media_models import TEXT, Family, check, greedy, opened, saved
from tests.engine.test_audio_media import AUDIO, MELS, clip

LENGTHS = (1_000, 16_000, 16_160, 37_123, 496_000, 1_040_123)
"""Samples: less than the minimum, a whole chunk, one frame more, an odd length, 31 s and 65 s."""


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    folder = tmp_path_factory.mktemp("asr")
    config = transformers.Qwen3ASRConfig(
        audio_config={
            **{"num_mel_bins": MELS, "d_model": 24, "encoder_layers": 2, "encoder_attention_heads": 2},
            **{"encoder_ffn_dim": 40, "output_dim": 32, "downsample_hidden_size": 6, "n_window_infer": 300},
        },
        text_config={**TEXT, "model_type": "qwen3", "max_position_embeddings": 2048, "tie_word_embeddings": False},
        audio_token_id=AUDIO,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=2,
    )
    model = saved(transformers.Qwen3ASRForConditionalGeneration(config), folder)
    (folder / "preprocessor_config.json").write_text(extractor().to_json_string())
    return Family(model, folder)


def extractor() -> Qwen3ASRFeatureExtractor:
    return Qwen3ASRFeatureExtractor(feature_size=MELS)


def reference(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    found = extractor()(clip(samples), sampling_rate=16_000, padding=True, return_attention_mask=True)
    return found["input_features"], found["attention_mask"]


def processed(folder: Path, samples: int) -> Processed:
    processor = read_processors(folder).audio
    assert processor is not None
    return process_audio(processor, clip(samples))


@pytest.mark.parametrize("samples", LENGTHS)
def test_spectrograms_and_tokens_equal_transformers(family: Family, samples: int) -> None:
    found, (features, mask) = processed(family.folder, samples), reference(samples)
    own, length = as_array(found.tensors["input_features"]), int(mask.sum())
    assert own.shape == (MELS, length)
    # transformers computes in float32.
    np.testing.assert_allclose(own, features[0, :, :length].numpy(), rtol=0, atol=1e-4)
    with torch.no_grad():
        embedded = family.model.get_audio_features(features, mask).pooler_output
    assert found.runs == (len(embedded),)


def prompt(folder: Path, *lengths: int) -> MediaPrompt:
    """Return a prompt of text, and a clip after each text."""
    ids: list[int] = []
    items = []
    for number, samples in enumerate(lengths):
        ids += [3 + (11 * number + 7 * at) % 80 for at in range(3)]
        one = processed(folder, samples)
        items.append(MediaItem("audio", one.digest, ((len(ids), one.runs[0]),), one.tensors))
        ids += [AUDIO] * one.runs[0]
    return MediaPrompt((*ids, 5, 7), tuple(items))


@torch.no_grad()
def reply(family: Family, given: MediaPrompt, lengths: tuple[int, ...], count: int) -> tuple[list[int], list[float]]:
    features, masks = zip(*map(reference, lengths), strict=True)
    longest = max(one.shape[-1] for one in features)
    inputs = {
        "input_features": torch.cat([torch.nn.functional.pad(one, (0, longest - one.shape[-1])) for one in features]),
        "input_features_mask": torch.cat([torch.nn.functional.pad(one, (0, longest - one.shape[-1])) for one in masks]),
    }
    ids, logprobs = list(given.ids), []
    for _ in range(count):
        row = family.model(input_ids=torch.tensor([ids]), **inputs).logits[0, -1].log_softmax(-1)
        logprobs.append(float(row.max()))
        ids.append(int(row.argmax()))
    return ids[len(given.ids) :], logprobs


@pytest.mark.parametrize("kernels", ("torch", best()))
def test_replies_equal_transformers(family: Family, kernels: str) -> None:
    """Clips with one and several windows of attention, alone and two in a prompt."""
    cases = ((1_000,), (37_123,), (496_000,), (1_040_123,), (16_160, 80_000))
    prompts = [prompt(family.folder, *lengths) for lengths in cases]
    settings = {"max_context": 1024, "max_step_tokens": 512, "max_running": 4, "kv_bytes": 1 << 23, "block_tokens": 16}
    with opened(family, kernels, **settings) as llm:
        found = llm.generate(prompts, greedy(3))
    for lengths, given, one in zip(cases, prompts, found, strict=True):
        check(one, reply(family, given, lengths, 3))


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [("n_window_infer", 150, "must be a multiple of 2 n_window"), ("output_dim", 31, "must be the width of the text")],
)
def test_wrong_sizes_are_refused(family: Family, tmp_path: Path, key: str, value: int, what: str) -> None:
    config = json.loads((family.folder / "config.json").read_text())
    config["audio_config"][key] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=what):
        read_checkpoint(tmp_path, weights=False)
