"""Qwen2.5-Omni and Qwen3-Omni: replies equal transformers' for images, videos and audio clips in one prompt."""

import hashlib
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn.functional import pad
from transformers.models.qwen2_5_omni.processing_qwen2_5_omni import Qwen2_5OmniProcessor

from engine.api.config import TaskConfig
from engine.api.errors import CheckpointError
from engine.api.media import MediaItem, MediaTensor, Modality
from engine.api.messages import Pooling
from engine.llm import MediaPrompt
from engine.media.families import read_processors
from engine.media.processed import Known, MediaError, Processed, Tokens
from engine.media.processor import process_audio
from engine.media.prompt import expand
from engine.models.checkpoint import check_tensors, read_checkpoint
from engine.models.media import media_sources
from kernels.cpu.library import best
from tests.engine.layers.test_footprint import compare
from tests.engine.media_models import QWEN_EYES, SECTIONS, TEXT, check, greedy, opened
from tests.engine.test_audio_media import MELS, clip

VISION_START, VISION_END, AUDIO_START, AUDIO_END, AUDIO, IMAGE, VIDEO = range(86, 93)
LENGTHS = (700, 16_000, 37_123)
"""Samples: a fraction of a chunk, two and a half chunks of 40 frames, an odd length."""


@dataclass(frozen=True, eq=False)
class Part:
    """An item of a prompt, as transformers and Slipway read it."""

    modality: Modality
    count: int  # tokens
    item: dict[str, MediaTensor]
    theirs: dict[str, torch.Tensor]


AUDIO_CONFIG = {
    **{"num_mel_bins": MELS, "d_model": 24, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 40},
    **{"output_dim": 32, "max_source_positions": 200},
}
TEXT_CONFIG = {"rope_parameters": SECTIONS, "max_position_embeddings": 512}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
TOKENS = {
    **{"audio_start_token_id": AUDIO_START, "audio_end_token_id": AUDIO_END, "vision_start_token_id": VISION_START},
}


def qwen2_5() -> Any:
    config = transformers.Qwen2_5OmniThinkerConfig(
        audio_config={**AUDIO_CONFIG, "n_window": 20},
        vision_config={**QWEN_EYES, "window_size": 16, "fullatt_block_indexes": [1]},
        text_config={**{key: value for key, value in TEXT.items() if key != "head_dim"}, **TEXT_CONFIG},
        audio_token_index=AUDIO,
        image_token_index=IMAGE,
        video_token_index=VIDEO,
        **TOKENS,
    )
    return transformers.Qwen2_5OmniThinkerForConditionalGeneration(config)


def qwen3() -> Any:
    """The reference counts 13 tokens for a chunk, so that it has 100 frames; two chunks attend to one another."""
    config = transformers.Qwen3OmniMoeThinkerConfig(
        audio_config={**AUDIO_CONFIG, "downsample_hidden_size": 6, "n_window_infer": 200},
        vision_config={**QWEN_EYES, "num_position_embeddings": 25, "deepstack_visual_indexes": [0, 1]},
        text_config={**TEXT, **TEXT_CONFIG, **EXPERTS},
        audio_token_id=AUDIO,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        **TOKENS,
    )
    return transformers.Qwen3OmniMoeThinkerForConditionalGeneration(config)


@pytest.fixture(scope="module", params=[qwen2_5, qwen3])
def thinker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("omni")
    torch.manual_seed(5)
    model = request.param().float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1 and ("norm" in name or "ln_" in name):
                weight.add_(0.1 * torch.randn_like(weight))
            else:
                weight.normal_(0, 0.25 if weight.ndim > 1 else 0.1)
        model.lm_head.weight[VISION_START:] = 0  # a reply without placeholders
    model.save_pretrained(folder)
    settings = json.loads(transformers.Qwen2VLImageProcessor(patch_size=4).to_json_string())
    (folder / "preprocessor_config.json").write_text(json.dumps({**settings, **extractor().to_dict()}))
    return model, folder


def extractor() -> Any:
    return transformers.WhisperFeatureExtractor(feature_size=MELS, chunk_length=4)


def as_tensor(tensor: torch.Tensor) -> MediaTensor:
    types = {torch.float32: "float32", torch.int64: "int64"}
    return MediaTensor(types[tensor.dtype], tuple(tensor.shape), tensor.numpy().tobytes())


def image(seed: int, grid: tuple[int, int] = (4, 6)) -> Part:
    count = grid[0] * grid[1]
    pixels = torch.randn((count, 3 * 2 * 16), generator=torch.Generator().manual_seed(seed))
    theirs = {"pixel_values": pixels, "image_grid_thw": torch.tensor([(1, *grid)])}
    return Part("image", count // 4, {name: as_tensor(one) for name, one in theirs.items()}, theirs)


def video(seed: int, seconds: float) -> Part:
    pixels = torch.randn((3 * 16, 3 * 2 * 16), generator=torch.Generator().manual_seed(seed))
    theirs = {"pixel_values_videos": pixels, "video_grid_thw": torch.tensor([(3, 4, 4)])}
    item = {name: as_tensor(one) for name, one in theirs.items()}
    item["second_per_grid_ts"] = as_tensor(torch.tensor([seconds]))
    return Part("video", 12, item, {**theirs, "video_second_per_grid": torch.tensor([seconds])})


def model_type(folder: Path) -> str:
    return str(json.loads((folder / "config.json").read_text())["model_type"])


def audio(folder: Path, samples: int) -> Part:
    processor = read_processors(folder).audio
    assert processor is not None
    found = process_audio(processor, clip(samples))
    complete = {"padding": True, "truncation": False} if "qwen3" in model_type(folder) else {"padding": "max_length"}
    theirs = extractor()(
        clip(samples), sampling_rate=16_000, return_attention_mask=True, return_tensors="pt", **complete
    )
    features = {"input_features": theirs["input_features"], "feature_attention_mask": theirs["attention_mask"]}
    # Clips of one prompt have one length in transformers.
    features = {name: pad(one, (0, 400 - one.shape[-1])) for name, one in features.items()}
    return Part("audio", found.runs[0], found.tensors, features)


def prompt(*parts: Part | int) -> MediaPrompt:
    ids: list[int] = []
    items = []
    for number, part in enumerate(parts):
        if isinstance(part, int):
            ids += [3 + (11 * number + 7 * at) % 80 for at in range(part)]
            continue
        begin, token, end = {
            "image": (VISION_START, IMAGE, VISION_END),
            "video": (VISION_START, VIDEO, VISION_END),
            "audio": (AUDIO_START, AUDIO, AUDIO_END),
        }[part.modality]
        digest = hashlib.sha256(repr(sorted(part.item.items())).encode()).digest()
        items.append(MediaItem(part.modality, digest, ((len(ids) + 1, part.count),), part.item))
        ids += [begin, *[token] * part.count, end]
    return MediaPrompt(tuple(ids), tuple(items))


@torch.no_grad()
def reply(model: Any, *parts: Part | int, count: int = 5) -> tuple[list[int], list[float]]:
    inputs: dict[str, Any] = {}
    for part in parts:
        for name, tensor in part.theirs.items() if isinstance(part, Part) else ():
            inputs[name] = torch.cat([inputs[name], tensor]) if name in inputs else tensor
    given = prompt(*parts)
    ids, logprobs = list(given.ids), []
    for _ in range(count):
        tokens = torch.tensor([ids])
        # Positions are kept between calls, so that every call needs new ones.
        model.rope_deltas = model.model.rope_deltas = None
        row = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), **inputs).logits[0, -1].log_softmax(-1)
        logprobs.append(float(row.max()))
        ids.append(int(row.argmax()))
    return ids[len(given.ids) :], logprobs


def cases(folder: Path) -> list[tuple[Part | int, ...]]:
    return [
        (7,),
        (3, audio(folder, 700), 2),
        (2, image(1), 4),
        (2, video(2, 1.0), 3),
        (1, video(3, 0.4), 2, audio(folder, 16_000), image(4, (6, 2)), 3, audio(folder, 37_123), 1),
    ]


@pytest.mark.parametrize("kernels", ("torch", best()))
def test_replies_equal_transformers(thinker: tuple[Any, Path], kernels: str) -> None:
    """Prompts run together, in chunks."""
    model, folder = thinker
    each = cases(folder)
    prompts = [prompt(*parts) for parts in each]
    with opened(_Folder(folder), kernels, max_context=256, max_step_tokens=32, max_running=4) as llm:
        found = llm.generate(prompts, greedy(5))
        again = llm.generate(prompts[4], greedy(5))[0]
    for parts, one in zip(each, found, strict=True):
        check(one, reply(model, *parts))
    assert again.ids == found[4].ids and again.timing is not None and again.timing.cached_tokens > 70


def test_two_ranks_return_the_same_replies(thinker: tuple[Any, Path]) -> None:
    model, folder = thinker
    parts = cases(folder)[4]
    with opened(_Folder(folder), best(), tensor=2, max_context=256) as llm:
        check(llm.generate(prompt(*parts), greedy(5))[0], reply(model, *parts))


def test_a_complete_checkpoint_is_read_without_the_parts_that_speak(thinker: tuple[Any, Path], tmp_path: Path) -> None:
    model, folder = thinker
    tensors = {f"thinker.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    spoken = {name: torch.zeros(4, 4) for name in ("talker.model.embed_tokens.weight", "talker.codec_head.weight")}
    save_file({**tensors, **spoken, "token2wav.conv1.weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    inner = json.loads((folder / "config.json").read_text())
    del inner["tie_word_embeddings"]  # exporters omit it; the text model's own default is another one
    named = {
        "qwen2_5_omni_thinker": "Qwen2_5OmniModel",
        "qwen3_omni_moe_thinker": "Qwen3OmniMoeForConditionalGeneration",
    }
    kind = model_type(folder)
    outer = {"architectures": [named[kind]], "model_type": kind.removesuffix("_thinker"), "thinker_config": inner}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    (tmp_path / "preprocessor_config.json").write_bytes((folder / "preprocessor_config.json").read_bytes())
    assert read_processors(tmp_path).video is not None
    parts = cases(folder)[4]
    with opened(_Folder(tmp_path), best(), max_context=256) as llm:
        check(llm.generate(prompt(*parts), greedy(5))[0], reply(model, *parts))


def test_planned_bytes_are_loaded(thinker: tuple[Any, Path]) -> None:
    for kernels in ("torch", best()):
        compare(read_checkpoint(thinker[1]), kernels)


def test_embeddings_of_audio_have_the_width_of_those_of_images(thinker: tuple[Any, Path]) -> None:
    """A service of the towers that turns images off computes them for a decoder without towers."""
    model, folder = thinker
    sound = audio(folder, 700)
    only = TaskConfig(encoder_only=True, images=False)
    found = read_checkpoint(folder, task=only)
    check_tensors(found.model, found.tensors)
    compare(found, "torch")
    alone = MediaPrompt((AUDIO,) * sound.count, (MediaItem("audio", b"sound", ((0, sound.count),), sound.item),))
    with opened(_Folder(folder), "torch", task=only, max_context=256) as llm:
        (rows,) = llm.pool([alone], Pooling("token_embed"))
    given = TaskConfig(accepts_embeddings=True, images=False, audio=False)
    embedded = replace(sound, item={"embeddings": as_tensor(torch.from_numpy(rows.copy()))})
    with opened(_Folder(folder), "torch", task=given, max_context=256) as llm:
        check(llm.generate(prompt(3, embedded, 2), greedy(5))[0], reply(model, 3, sound, 2))


def test_each_tower_is_left_out_if_its_items_are_turned_off(thinker: tuple[Any, Path]) -> None:
    _, folder = thinker
    whole, eyes, ears, neither = (
        read_checkpoint(folder, task=TaskConfig(images=images, audio=audio)).model
        for images, audio in ((True, True), (True, False), (False, True), (False, False))
    )
    assert whole.media is not None and eyes.media is not None and ears.media is not None and neither.media is None
    assert whole.media.modalities == ("image", "video", "audio")
    assert eyes.media.modalities == ("image", "video") and ears.media.modalities == ("audio",)
    seen, heard = media_sources(eyes.media), media_sources(ears.media)
    assert {**seen, **heard} == media_sources(whole.media) and not seen.keys() & heard.keys()


@pytest.mark.parametrize(("turned_off", "case"), [("images", 1), ("audio", 3)])
def test_replies_are_the_same_without_the_other_tower(thinker: tuple[Any, Path], turned_off: str, case: int) -> None:
    model, folder = thinker
    parts = cases(folder)[case]
    with opened(_Folder(folder), best(), max_context=64, task=TaskConfig(**{turned_off: False})) as llm:
        check(llm.generate(prompt(*parts), greedy(3))[0], reply(model, *parts, count=3))


def test_wrong_sizes_are_refused(thinker: tuple[Any, Path], tmp_path: Path) -> None:
    windows = {"qwen2_5_omni_thinker": ("n_window", 15, "must be even")}
    wrong = windows.get(model_type(thinker[1]), ("n_window_infer", 250, "must be a multiple of 2 n_window"))
    for key, value, what in (wrong, ("output_dim", 31, "width of the text model")):
        config = json.loads((thinker[1] / "config.json").read_text())
        config["audio_config"][key] = value
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match=what):
            read_checkpoint(tmp_path, weights=False)


class _Folder:
    """A family with the attribute that `opened` reads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder


def test_spectrograms_equal_transformers(thinker: tuple[Any, Path]) -> None:
    model, folder = thinker
    for samples in (*LENGTHS, 64_000):
        part = audio(folder, samples)
        tensor = part.item["input_features"]
        own = np.frombuffer(tensor.data, "<f4").reshape(tensor.shape)
        np.testing.assert_allclose(own, part.theirs["input_features"][0, :, : own.shape[1]].numpy(), rtol=0, atol=1e-5)
        with torch.no_grad():
            embedded = model.get_audio_features(**part.theirs)
        assert part.count == len(getattr(embedded, "pooler_output", embedded))


def test_clips_of_qwen3_omni_may_exceed_a_window_of_whisper(thinker: tuple[Any, Path]) -> None:
    """A clip of 65 s, and one shorter than the transform."""
    _, folder = thinker
    processor = read_processors(folder).audio
    assert processor is not None
    if "qwen3" not in model_type(folder):
        assert processor.max_seconds == 4
        return
    assert processor.layout(1_040_123).runs == (65 * 13 + 0,)
    assert processor.layout(100).runs == (1,)


def with_sound(folder: Path, seconds: float, pairs: int, samples: int) -> tuple[Processed, dict[str, torch.Tensor]]:
    """Return a video with its sound as a processor returns it, and the tensors of transformers. Pairs of frames are
    `seconds` apart."""
    processors = read_processors(folder, {"use_audio_in_video": True})
    assert processors.sound is not None and processors.audio is not None
    pixels = torch.randn((pairs * 16, 3 * 2 * 16), generator=torch.Generator().manual_seed(pairs))
    grid, apart = torch.tensor([(pairs, 4, 4)]), torch.tensor([seconds])
    theirs = {"pixel_values_videos": pixels, "video_grid_thw": grid, "video_second_per_grid": apart}
    own = {"pixel_values_videos": pixels, "video_grid_thw": grid, "second_per_grid_ts": apart}
    video = Processed(b"", "<|VIDEO|>", (4 * pairs,), {name: as_tensor(one) for name, one in own.items()}, "video")
    return processors.sound.joined(video, clip(samples)), theirs | audio(folder, samples).theirs


SOUNDS = ((1.0, 3, 64_000), (2.0, 3, 20_000), (0.4, 2, 64_000), (1.0, 5, 700))
"""Seconds of a pair of frames, pairs, samples of sound: sound and video end in one piece, or one of them first."""


@pytest.mark.parametrize("kernels", ("torch", best()))
def test_videos_with_their_sound_equal_transformers(thinker: tuple[Any, Path], kernels: str) -> None:
    """Pieces of both take turns, with positions that are counted from the same one."""
    model, folder = thinker
    if "qwen3" in model_type(folder):
        with pytest.raises(MediaError, match="supported for Qwen2.5-Omni"):
            read_processors(folder, {"use_audio_in_video": True})
        return
    names = {"<|VIDEO|>": VIDEO, "<|AUDIO|>": AUDIO, "<|audio_bos|>": AUDIO_START, "<|audio_eos|>": AUDIO_END}
    known = {
        "video": Known(Tokens("<|VIDEO|>", "<|VIDEO|>"), VIDEO),
        "audio": Known(Tokens("<|AUDIO|>", "<|AUDIO|>"), AUDIO),
    }

    def encode(text: str) -> list[int]:
        return [names[one] if one in names else int(one) for one in re.findall(r"<[^>]+>|\d+", text)]

    prompts, wanted = list[MediaPrompt](), list[Any]()
    processor = Qwen2_5OmniProcessor.__new__(Qwen2_5OmniProcessor)
    processor.video_processor = type("", (), {"merge_size": 2})()
    for name in ("audio_bos", "audio_eos", "audio", "video"):
        setattr(processor, f"{name}_token", {"audio": "<|AUDIO|>", "video": "<|VIDEO|>"}.get(name, f"<|{name}|>"))
    for seconds, pairs, samples in SOUNDS:
        item, theirs = with_sound(folder, seconds, pairs, samples)
        expanded = expand(f"3 4 {VISION_START} <|VIDEO|> {VISION_END} 5 6 7", [item], known, encode)
        count = audio(folder, samples).count
        text = processor.replace_video_with_audio_token(
            {"video_grid_thw": theirs["video_grid_thw"].numpy(), "video_second_per_grid": [seconds]},
            0,
            {"num_audio_tokens": [count]},
            0,
            position_id_per_seconds=25,
            seconds_per_chunk=2.0,
        )
        assert expanded.ids == [3, 4, VISION_START, *encode(text), VISION_END, 5, 6, 7]
        prompts.append(MediaPrompt(tuple(expanded.ids), expanded.media))
        wanted.append(greedy_reply(model, expanded.ids, theirs))
    with opened(_Folder(folder), kernels, max_context=256, max_step_tokens=32, max_running=4) as llm:
        found, again = llm.generate(prompts, greedy(5)), llm.generate(prompts, greedy(5))
    for one, other, expected in zip(found, again, wanted, strict=True):
        check(one, expected)
        check(other, expected)
        assert other.timing is not None and other.timing.cached_tokens
    with pytest.raises(MediaError, match="one in each 2.1 s.* raise fps"):
        with_sound(folder, 2.1, 2, 700)


@pytest.mark.parametrize("kernels", ("torch", best()))
def test_a_block_before_a_video_with_sound_is_not_used_before_another_item(
    thinker: tuple[Any, Path], kernels: str
) -> None:
    """Both tokens before the pieces have one position, and those before a clip have two. They end a block."""
    model, folder = thinker
    if "qwen3" in model_type(folder):
        return
    start = [*range(3, 17), VISION_START, AUDIO_START]
    item, _ = with_sound(folder, 1.0, 3, 20_000)
    places, media = len(start), list[MediaItem]()
    ids = list(start)
    for part, count in zip(item.parts, item.runs, strict=True):
        media.append(MediaItem(part.modality, part.digest, ((places, count),), part.tensors))
        ids += [VIDEO if part.modality == "video" else AUDIO] * count
        places += count
    sound = audio(folder, 20_000)
    other = [*start, *[AUDIO] * sound.count, AUDIO_END, 5, 6]
    plain = MediaPrompt(tuple(other), (MediaItem("audio", b"clip", ((len(start), sound.count),), sound.item),))
    with opened(_Folder(folder), kernels, max_context=256, max_step_tokens=32, max_running=4) as llm:
        llm.generate(MediaPrompt((*ids, AUDIO_END, VISION_END, 5), tuple(media)), greedy(1))
        after = llm.generate(plain, greedy(5))[0]
    with opened(_Folder(folder), kernels, max_context=256, max_step_tokens=32, max_running=4) as llm:
        alone = llm.generate(plain, greedy(5))[0]
    assert after.timing is not None and after.timing.cached_tokens == 12  # three of four blocks
    check(after, (list(alone.ids), [one.logprob for one in alone.logprobs]))


@torch.no_grad()
def greedy_reply(model: Any, prompt: list[int], inputs: dict[str, torch.Tensor]) -> tuple[list[int], list[float]]:
    ids, logprobs = list(prompt), list[float]()
    for _ in range(5):
        tokens = torch.tensor([ids])
        model.rope_deltas = model.model.rope_deltas = None
        given = {"attention_mask": torch.ones_like(tokens), "use_audio_in_video": True, **inputs}
        row = model(input_ids=tokens, **given).logits[0, -1].log_softmax(-1)
        logprobs.append(float(row.max()))
        ids.append(int(row.argmax()))
    return ids[len(prompt) :], logprobs
