"""Compare audio clips of Gemma 4 with transformers: the processor, and replies to prompts with clips and images."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor

from engine.api.config import TaskConfig
from engine.api.errors import CheckpointError
from engine.api.media import MediaItem
from engine.llm import MediaPrompt
from engine.lowering.media_memory import tower_operations
from engine.media.families import read_processors
from engine.media.processed import MediaError, Processed
from engine.media.processor import process_audio
from engine.models.checkpoint import check_tensors, read_checkpoint
from engine.worker.grid_positions import as_array
from kernels.cpu.library import best
from tests.engine.layers.test_footprint import compare
from tests.engine.media_models import IMAGE, Family, Picture, check, gemma4, gemma4_picture, greedy, opened
from tests.engine.test_audio_media import clip

AUDIO, MELS = IMAGE - 2, 16
LENGTHS = (161, 700, 16_000, 37_123)
"""Samples: one frame, a few, a second, an odd length."""
EARS = {
    **{"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "subsampling_conv_channels": [16, 6]},
    **{"attention_chunk_size": 4, "attention_context_left": 5, "output_proj_dims": 20, "rms_norm_eps": 1e-4},
    **{"attention_logit_cap": 2.0, "conv_kernel_size": 3, "gradient_clipping": 0.8},
}


def extractor() -> Gemma4AudioFeatureExtractor:
    return Gemma4AudioFeatureExtractor(feature_size=MELS)


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """Tokens of images attend to one another, tokens of clips are causal. Projections have narrow limits."""
    folder = tmp_path_factory.mktemp("gemma4-audio")
    made = gemma4(folder, EARS, hidden_size_per_layer_input=6, use_bidirectional_attention="vision")
    with torch.no_grad():
        for name, buffer in made.model.named_buffers():
            if "audio" in name and ("_min" in name or "_max" in name):
                buffer.fill_((0.8 if "_max" in name else -0.7) * (2 if "output" in name else 1))
        made.model.get_output_embeddings().weight[AUDIO] = 0
    made.model.save_pretrained(folder)
    settings = {"feature_extractor": extractor().to_dict()}
    (folder / "processor_config.json").write_text(json.dumps(settings, default=lambda one: np.asarray(one).tolist()))
    return made


def processed(family: Family, samples: int) -> Processed:
    processor = read_processors(family.folder).audio
    assert processor is not None
    return process_audio(processor, clip(samples))


Part = int | Picture | Processed


def prompt(*parts: Part) -> MediaPrompt:
    ids, items = list[int](), list[MediaItem]()
    for number, part in enumerate(parts):
        if isinstance(part, int):
            ids += [3 + (11 * number + 7 * at) % 80 for at in range(part)]
        elif isinstance(part, Picture):
            digest = hashlib.sha256(repr(sorted(part.item_tensors.items())).encode()).digest()
            items.append(MediaItem("image", digest, ((len(ids), part.tokens),), part.item_tensors))
            ids += [IMAGE] * part.tokens
        else:
            items.append(MediaItem("audio", part.digest, ((len(ids), part.runs[0]),), part.tensors))
            ids += [AUDIO] * part.runs[0]
    return MediaPrompt(tuple(ids), tuple(items))


@torch.no_grad()
def reply(family: Family, lengths: tuple[int, ...], *parts: Part, count: int = 5) -> tuple[list[int], list[float]]:
    """lengths: samples of the clips."""
    inputs: dict[str, torch.Tensor] = {}
    pictures = [part for part in parts if isinstance(part, Picture)]
    for name in pictures[0].tensors if pictures else ():
        inputs[name] = torch.cat([one.tensors[name] for one in pictures])
    if lengths:
        inputs |= dict(extractor()([clip(samples) for samples in lengths], return_tensors="pt"))
    given = prompt(*parts)
    ids, logprobs = list(given.ids), list[float]()
    for _ in range(count):
        tokens = torch.tensor([ids])
        kinds = (tokens == IMAGE).long() + 3 * (tokens == AUDIO).long()
        row = family.model(input_ids=tokens, mm_token_type_ids=kinds, **inputs).logits[0, -1].log_softmax(-1)
        logprobs.append(float(row.max()))
        ids.append(int(row.argmax()))
    return ids[len(given.ids) :], logprobs


@pytest.mark.parametrize("samples", LENGTHS)
def test_processor_equals_transformers(family: Family, samples: int) -> None:
    found, wanted = processed(family, samples), extractor()([clip(samples)], return_tensors="np")
    (mask,), (features,) = wanted["input_features_mask"], wanted["input_features"]
    assert mask[: mask.sum()].all()
    np.testing.assert_allclose(as_array(found.tensors["input_features"])[0], features[mask], rtol=0, atol=1e-5)
    own = type("", (), {"boa_token": "<|audio>", "audio_token": "#", "eoa_token": "<audio|>"})()
    text = Gemma4Processor.replace_audio_token(own, wanted, 0)
    assert found.text.replace("<|audio|>", "#" * found.runs[0]) == text


@pytest.mark.parametrize("kernels", ("torch", best()))
def test_replies_equal_those_of_transformers(family: Family, kernels: str) -> None:
    """Prompts run together, in chunks that divide the placeholders of a clip; repeated ones have a prefix hit."""
    sounds = {samples: processed(family, samples) for samples in LENGTHS}
    cases: list[tuple[tuple[int, ...], tuple[Part, ...]]] = [
        ((), (7,)),
        ((16_000,), (3, sounds[16_000], 2)),
        ((700, 37_123), (1, sounds[700], 2, sounds[37_123])),
        ((161,), (2, gemma4_picture(1), sounds[161], 1, gemma4_picture(2), 1)),
    ]
    prompts = [prompt(*parts) for _, parts in cases]
    with opened(family, kernels, max_step_tokens=13, max_running=4, max_context=128) as llm:
        found, again = llm.generate(prompts, greedy(5)), llm.generate(prompts, greedy(5))
    for (lengths, parts), cold, warm in zip(cases, found, again, strict=True):
        expected = reply(family, lengths, *parts)
        check(cold, expected)
        check(warm, expected)
    assert all(one.timing.cached_tokens for one in again[1:])
    assert len({tuple(one.ids) for one in found}) == len(found)


def test_towers_can_be_left_out(family: Family) -> None:
    each = {
        (images, audio): read_checkpoint(family.folder, task=TaskConfig(images=images, audio=audio))
        for images, audio in ((True, True), (True, False), (False, True), (False, False))
    }
    for (images, audio), one in each.items():
        check_tensors(one.model, one.tensors, one.quantization)
        wanted = (("image", "video") if images else ()) + (("audio",) if audio else ())
        assert (() if one.model.media is None else one.model.media.modalities) == wanted
    for kernels in ("torch", best()):
        compare(each[True, True], kernels)
    assert each[False, True].model.media is not None and tower_operations(each[False, True].model.media, 9) > 0
    sound = processed(family, 700)
    with opened(family, best(), task=TaskConfig(images=False)) as llm:
        check(llm.generate(prompt(3, sound, 2), greedy(3))[0], reply(family, (700,), 3, sound, 2, count=3))


def test_models_without_a_tower_for_audio_read_none(family: Family, tmp_path: Path) -> None:
    """The larger models have no tower, but the same preprocessor_config.json."""
    config = json.loads((family.folder / "config.json").read_text()) | {"audio_config": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "preprocessor_config.json").write_text('{"patch_size": 4}')
    assert read_processors(tmp_path).audio is None and read_processors(tmp_path).image is not None
    found = read_checkpoint(tmp_path, weights=False)
    assert found.model.media is not None and found.model.media.modalities == ("image", "video")
    assert read_checkpoint(tmp_path, weights=False, task=TaskConfig(images=False)).model.media is None


def test_wrong_tensors_fail_their_request_alone(family: Family) -> None:
    good = prompt(3, processed(family, 700), 2)
    wrong = MediaItem(
        "audio",
        b"other",
        good.media[0].spans,
        {"input_features": prompt(gemma4_picture(1)).media[0].tensors["pixel_values"]},
    )
    with opened(family, "torch") as llm:
        failed, found = llm.generate([MediaPrompt(good.ids, (wrong,)), good], greedy(3))
    assert "the tower reads input_features" in (failed.error or "") and found.error is None


def test_short_clips_and_other_settings_are_refused(family: Family, tmp_path: Path) -> None:
    with pytest.raises(MediaError, match="shorter"):
        processed(family, 160)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma4", "audio_config": EARS}))
    for settings, message in (
        ({"fft_overdrive": True}, "fft_overdrive is True"),
        ({"per_bin_mean": [1.0]}, "per_bin_mean"),
        ({"max_frequency": 9000}, "to 9000 Hz"),
    ):
        (tmp_path / "processor_config.json").write_text(json.dumps({"feature_extractor": settings}))
        with pytest.raises(CheckpointError, match=message):
            read_processors(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attention_context_right": 2}, "2 to the right"),
        ({"attention_chunk_size": 9}, "chunks of 9 positions"),
        ({"subsampling_conv_channels": [16]}, "must be two numbers"),
        ({"num_attention_heads": 5}, "even multiple of num_attention_heads, 5"),
    ],
)
def test_other_towers_are_refused(family: Family, tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    config = json.loads((family.folder / "config.json").read_text())
    config["audio_config"] |= settings
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(tmp_path, weights=False)
