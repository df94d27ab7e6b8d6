"""Qwen2-Audio: processor and replies equal transformers' for clips of several lengths."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from engine.api.media import MediaItem
from engine.llm import MediaPrompt
from engine.media.families import read_processors
from engine.media.processed import MediaError, Processed
from engine.media.processor import process_audio
from kernels.cpu.library import best
from tests.engine.media_models import TEXT, VOCAB, check, counts, greedy, opened, saved

AUDIO, MELS = 94, 16
LENGTHS = (700, 16_000, 37_123, 64_000)
"""Samples: a fraction of a second, a second, an odd length, the complete window."""


def clip(samples: int) -> np.ndarray[Any, Any]:
    found: np.ndarray[Any, Any] = np.random.default_rng(samples).normal(0, 0.1, samples).astype(np.float32)
    return found


def extractor() -> transformers.WhisperFeatureExtractor:
    return transformers.WhisperFeatureExtractor(feature_size=MELS, chunk_length=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("audio")
    torch.manual_seed(1)
    text = {key: value for key, value in TEXT.items() if key != "head_dim"}
    config = transformers.Qwen2AudioConfig(
        audio_config={
            **{"num_mel_bins": MELS, "d_model": 24, "encoder_layers": 2, "encoder_attention_heads": 2},
            **{"encoder_ffn_dim": 40, "max_source_positions": 200},
        },
        text_config={"model_type": "qwen2", **text, "tie_word_embeddings": False},
        audio_token_index=AUDIO,
    )
    saved(transformers.Qwen2AudioForConditionalGeneration(config), base)
    (base / "preprocessor_config.json").write_text(extractor().to_json_string())
    return base


def reference_features(samples: np.ndarray[Any, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    found = extractor()(
        samples, sampling_rate=16_000, return_attention_mask=True, padding="max_length", return_tensors="pt"
    )
    return found["input_features"], found["attention_mask"]


def processed(folder: Path, samples: int) -> Processed:
    processor = read_processors(folder).audio
    assert processor is not None
    return process_audio(processor, clip(samples))


def prompt(folder: Path, *parts: tuple[int, int]) -> MediaPrompt:
    """Return a prompt of pairs: tokens of text, and samples of the clip after them."""
    ids: list[int] = []
    items = []
    for number, (text, samples) in enumerate(parts):
        ids += [3 + (11 * number + 7 * at) % 80 for at in range(text)]
        if samples:
            one = processed(folder, samples)
            items.append(MediaItem("audio", one.digest, ((len(ids), one.runs[0]),), one.tensors))
            ids += [AUDIO] * one.runs[0]
    return MediaPrompt((*ids, 5, 7), tuple(items))


@torch.no_grad()
def reply(folder: Path, given: MediaPrompt, lengths: tuple[int, ...], count: int = 6) -> tuple[list[int], list[float]]:
    model = transformers.Qwen2AudioForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    features = [reference_features(clip(samples)) for samples in lengths]
    inputs = {}
    if features:
        inputs["input_features"] = torch.cat([one for one, _ in features])
        inputs["feature_attention_mask"] = torch.cat([mask for _, mask in features])
    ids, logprobs = list(given.ids), []
    for _ in range(count):
        row = model(input_ids=torch.tensor([ids]), **inputs).logits[0, -1].log_softmax(-1)
        logprobs.append(float(row.max()))
        ids.append(int(row.argmax()))
    return ids[len(given.ids) :], logprobs


@pytest.mark.parametrize("samples", LENGTHS)
def test_processor_equals_transformers(folder: Path, samples: int) -> None:
    """The number of tokens and the spectrogram equal Qwen2AudioProcessor's."""
    found = processed(folder, samples)
    features, mask = reference_features(clip(samples))
    tensor = found.tensors["input_features"]
    own = np.frombuffer(tensor.data, "<f4").reshape(tensor.shape)
    np.testing.assert_allclose(own, features[0, :, : own.shape[1]].numpy(), rtol=0, atol=1e-5)
    length = int(mask.sum())
    assert sum(np.frombuffer(found.tensors["feature_attention_mask"].data, "<i8")) == length
    assert found.runs == ((((length - 1) // 2 + 1) - 2) // 2 + 1,)


@pytest.mark.parametrize("kernels", ("torch", best()))
def test_replies_equal_those_of_transformers(folder: Path, kernels: str) -> None:
    """Prompts with none, one and several clips run together; repeated clips have a prefix hit."""
    cases = (((4, 0),), ((3, 16_000),), ((2, 37_123), (1, 700)), ((1, 64_000),))
    prompts = [prompt(folder, *parts) for parts in cases]
    settings = {"max_context": 192, "max_step_tokens": 40, "max_running": 4}
    with opened(_Folder(folder), kernels, **settings) as llm:
        found = llm.generate(prompts, greedy())
        assert counts(llm)[0] == 4
        again = llm.generate(prompts[1], greedy())[0]
    for parts, given, one in zip(cases, prompts, found, strict=True):
        check(one, reply(folder, given, tuple(samples for _, samples in parts if samples)))
    assert again.ids == found[1].ids and again.timing.cached_tokens >= 16
    assert len({tuple(one.ids) for one in found}) == len(found)


def test_two_ranks_return_the_same_replies(folder: Path) -> None:
    given = prompt(folder, (3, 16_000))
    with opened(_Folder(folder), best(), tensor=2, max_context=96) as llm:
        check(llm.generate(given, greedy())[0], reply(folder, given, (16_000,)))


class _Folder:
    """A family with the attribute that `opened` reads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder


def test_too_short_clips_and_other_settings_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(MediaError, match="shorter"):
        processed(folder, 100)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_audio"}))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"sampling_rate": 8000}))
    with pytest.raises(Exception, match="sampling_rate is 8000"):
        read_processors(tmp_path)


def test_other_tensors_fail_their_request_alone(folder: Path) -> None:
    given = prompt(folder, (3, 16_000))
    item = given.media[0]
    wrong = MediaItem(item.modality, b"other", item.spans, {"pixel_values": item.tensors["input_features"]})
    with opened(_Folder(folder), "torch", max_context=96) as llm:
        failed, good = llm.generate([MediaPrompt(given.ids, (wrong,)), given], greedy())
    assert "the tower reads input_features" in (failed.error or "")
    assert len(good.ids) == 6 and max(good.ids) < VOCAB
