"""Phi-4-multimodal: replies equal transformers' for prompts with images and clips, and with LoRA adapters."""

import copy
import hashlib
import json
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.api.config import TaskConfig
from engine.api.errors import CheckpointError
from engine.api.media import BESIDE_IMAGES, MediaItem, MediaTensor
from engine.distributed.world import Single
from engine.layers import conformer
from engine.layers.linear import Target
from engine.layers.tower import TowerModel
from engine.llm import MediaPrompt
from engine.lowering.media_memory import media_bytes, tower_operations, tower_sizes
from engine.models.checkpoint import check_tensors, read_checkpoint
from engine.models.media import media_sources
from engine.models.phi4_multimodal import declare
from engine.weights.files import Weights
from kernels.cpu.library import best
from kernels.cpu.memory import HUGE
from kernels.cpu.program import Team
from tests.engine.adapters import merge, random_pairs, write_adapter
from tests.engine.layers.test_footprint import compare
from tests.engine.layers.towers import EYES, PHI4_EARS, phi4, phi4_image
from tests.engine.media_models import TEXT, check, greedy, opened, saved

IMAGE, AUDIO = 95, 94


@dataclass(frozen=True, eq=False)
class Part:
    """An item of a prompt: its tensors, and the number of its tokens."""

    kind: Any
    tensors: dict[str, Tensor]
    count: int

    @property
    def token(self) -> int:
        return IMAGE if self.kind == "image" else AUDIO


def picture(*tiles: int, seed: int = 3) -> Part:
    return Part("image", *phi4_image(*tiles, seed))  # type: ignore[call-arg]


def clip(frames: int) -> Part:
    features = torch.randn(1, frames, 10, generator=torch.Generator().manual_seed(frames))
    count = -(-frames // 8)
    return Part("audio", {"audio_input_features": features, "audio_embed_sizes": torch.tensor([count])}, count)


@dataclass(frozen=True)
class Phi4:
    """The model of transformers, and its folder."""

    model: Any
    folder: Path

    def embedded(self, part: Part, beside: bool) -> Tensor:
        """Return the embeddings of an item that transformers computes for it alone."""
        extended = self.model.model.embed_tokens_extend
        ids, zeros = torch.full((1, part.count), part.token), torch.zeros(1, part.count, 32)
        if part.kind == "image":
            return extended.image_embed(ids, zeros, **part.tensors)[0]
        mode = "vision" if beside else "speech"
        return extended.audio_embed(ids, zeros, **part.tensors, audio_projection_mode=mode)[0]

    @torch.no_grad()
    def reply(self, parts: tuple[Part | int, ...], count: int = 6) -> tuple[list[int], list[float]]:
        beside = any(isinstance(part, Part) and part.kind == "image" for part in parts)
        table = self.model.get_input_embeddings()
        each = (
            self.embedded(part, beside) if isinstance(part, Part) else table(text(at, part))
            for at, part in enumerate(parts)
        )
        rows = torch.cat(list(each))
        ids, logprobs = list[int](), list[float]()
        for _ in range(count):
            row = self.model(inputs_embeds=rows.unsqueeze(0)).logits[0, -1].log_softmax(-1)
            logprobs.append(float(row.max()))
            ids.append(int(row.argmax()))
            rows = torch.cat((rows, table(torch.tensor(ids[-1:]))))
        return ids, logprobs


def text(number: int, count: int) -> Tensor:
    return torch.tensor([3 + (11 * number + 7 * i) % 80 for i in range(count)])


def prompt(parts: tuple[Part | int, ...]) -> MediaPrompt:
    types = {torch.float32: "float32", torch.int64: "int64"}
    beside = any(isinstance(part, Part) and part.kind == "image" for part in parts)
    ids, items = list[int](), []
    for at, part in enumerate(parts):
        if isinstance(part, int):
            ids += text(at, part).tolist()
            continue
        given = part.tensors | ({BESIDE_IMAGES: torch.tensor([1])} if beside and part.kind == "audio" else {})
        tensors = {
            name: MediaTensor(types[one.dtype], tuple(one.shape), one.numpy().tobytes())  # type: ignore[arg-type]
            for name, one in given.items()
        }
        digest = hashlib.sha256(repr(sorted(tensors.items())).encode()).digest()
        items.append(MediaItem(part.kind, digest, ((len(ids), part.count),), tensors))
        ids += [part.token] * part.count
    return MediaPrompt(tuple(ids), tuple(items))


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Phi4:
    folder, inner = tmp_path_factory.mktemp("phi4"), {key: value for key, value in TEXT.items() if key != "head_dim"}
    torch.manual_seed(1)
    model = phi4(IMAGE, AUDIO, **inner)
    saved(model, folder)
    with torch.no_grad():
        model.lm_head.weight[AUDIO] = 0
    model.save_pretrained(folder)
    return Phi4(model, folder)


def hearing(family: Phi4) -> TowerModel:
    """Return the tower for clips."""
    media = read_checkpoint(family.folder).model.media
    assert media is not None and media.audio is not None
    tower = TowerModel(media.audio, Single(), Target(torch.float32, torch.device("cpu")))
    tower.load(Weights(read_checkpoint(family.folder).tensors, lambda fraction: None).read)
    return tower


PARTS: tuple[tuple[Part | int, ...], ...] = (
    (7,),
    (3, picture(2, 1, 3, 3), 5),
    (picture(1, 1, 4, 4), 2, picture(1, 2, 2, 1), 1),
    (2, clip(30), 1),
    (1, clip(30), picture(1, 1, 4, 3), 2, clip(9), 1),
)
"""Prompts with no item, one image, several images, a clip, and clips beside an image."""


@pytest.mark.parametrize("kernels", ("torch", best()))
def test_replies_equal_those_of_transformers(family: Phi4, kernels: str) -> None:
    """Prompts run together, in chunks that divide the placeholders of an image; repeated ones have a prefix hit."""
    prompts = [prompt(parts) for parts in PARTS]
    with opened(family, kernels, max_step_tokens=13, max_running=3) as llm:  # type: ignore[arg-type]
        found, again = llm.generate(prompts, greedy()), llm.generate(prompts, greedy())
    for parts, cold, warm in zip(PARTS, found, again, strict=True):
        expected = family.reply(parts)
        check(cold, expected)
        check(warm, expected)
    assert all(one.timing.cached_tokens for one in again[1:])
    assert len({tuple(one.ids) for one in found}) == len(found)


def test_adapters_for_a_modality_equal_merged_weights(family: Phi4, tmp_path: Path) -> None:
    """The adapters change the same projections as Microsoft's adapters for images and speech. Requests select them."""
    targets = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    pairs = random_pairs(family.model, targets, chosen=lambda name: name.startswith("model.layers."))
    merged = Phi4(copy.deepcopy(family.model), family.folder)
    merge(merged.model, pairs)
    folder = write_adapter(tmp_path / "vision-lora", pairs)
    with opened(family, best(), adapters={"vision": folder}) as llm:  # type: ignore[arg-type]
        given = prompt(PARTS[1])
        plain, adapted = llm.generate([given, given], [greedy(), greedy(adapter="vision")])
    check(plain, family.reply(PARTS[1]))
    check(adapted, merged.reply(PARTS[1]))
    assert plain.ids != adapted.ids


def test_two_ranks_return_the_same_replies(family: Phi4) -> None:
    with opened(family, best(), tensor=2) as llm:  # type: ignore[arg-type]
        check(llm.generate(prompt(PARTS[4]), greedy())[0], family.reply(PARTS[4]))


@pytest.mark.parametrize("frames", [1, 40, 48, 49, 97, 300])
def test_spectrograms_are_convolved_in_blocks(family: Phi4, monkeypatch: pytest.MonkeyPatch, frames: int) -> None:
    """A long clip takes no more memory for its convolutions than a block."""
    monkeypatch.setattr(conformer, "CONVOLVED_POSITIONS", 6)
    sizes, convolved = list[int](), torch.nn.functional.conv2d

    def recorded(*arguments: Any, **options: Any) -> Tensor:
        found = convolved(*arguments, **options)
        sizes.append(found.shape[2])
        return found

    part, tower = clip(frames), hearing(family)
    wanted = family.embedded(part, False)
    monkeypatch.setattr(torch.nn.functional, "conv2d", recorded)
    with torch.no_grad():
        (found,) = tower.encode([part.tensors])
    assert found.shape == wanted.shape and (found - wanted).abs().max() < 1e-5 * wanted.abs().max()
    assert max(sizes) <= 7 * 8 // 2


@pytest.mark.parametrize(
    ("kernels", "channels", "inner"), [("torch", 64, 14), ("base", 64, 14), ("base", 4, 600)], ids=str
)
@pytest.mark.parametrize("clips", [(700,), (4_008,), (4_008, 4_008)])
def test_planned_memory_of_clips_is_used(kernels: str, clips: tuple[int, ...], channels: int, inner: int) -> None:
    """A short clip, and long ones, which are convolved in blocks and of which zeros fill the last window. Convolutions
    take most of the memory, or blocks do."""
    ears = {**PHI4_EARS, "input_size": 40, "nemo_conv_channels": channels, "intermediate_size": inner}
    media = declare({"vision_config": {**EYES, "image_size": 16, "crop_size": 16}, "audio_config": ears}, 24).audio
    assert media is not None
    shapes, team = media_sources(media), Team("base", 1) if kernels == "base" else None
    tower = TowerModel(media, Single(), Target(torch.float32, torch.device("cpu"), team))
    tower.load(lambda name: torch.randn(shapes[name]))
    items = [{"audio_input_features": torch.randn(1, frames, 40)} for frames in clips]
    tokens = sum(-(-frames // 8) for frames in clips)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        for _ in range(2):  # compiled kernels keep the buffers of the first step
            tower.encode(items)
    sizes = [event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    mapped = [one.buffer_bytes for one in tower._executors.values() if one.buffer_bytes >= HUGE]
    used = max(accumulate(sizes)) + sum(mapped)
    planned = media_bytes(media, tokens, 0, 4)
    most = 1.2 if team else 1.4  # torch frees buffers before the end of a step
    assert 0.95 * used <= planned <= most * used, f"{used:,} bytes are used, {planned:,} are planned"


@pytest.mark.parametrize("seconds", [1, 41, 82])
def test_long_clips_are_encoded_in_windows(family: Phi4, seconds: int) -> None:
    """500 positions, of 80 ms each, attend to one another; the last window is filled with zeros."""
    tower, part = hearing(family), clip(100 * seconds - 2)
    with torch.no_grad():
        for beside in (False, True):
            more = {BESIDE_IMAGES: torch.tensor([1])} if beside else {}
            wanted, (found,) = family.embedded(part, beside), tower.encode([part.tensors | more])
            assert found.shape == wanted.shape and (found - wanted).abs().max() < 1e-5 * wanted.abs().max()


def test_wrong_tensors_fail_their_request_alone(family: Phi4) -> None:
    good, image = prompt(PARTS[1]), picture(2, 1, 3, 3)
    holes = image.tensors["image_attention_mask"].clone()
    holes[0, 1, 0, 0] = 0
    wrong = [
        {"audio_input_features": torch.zeros(1, 30, 9)},
        {"image_pixel_values": image.tensors["image_pixel_values"]},
        image.tensors | {"image_sizes": torch.tensor([[16, 16]])},
        image.tensors | {"image_attention_mask": holes},
        image.tensors | {"image_attention_mask": image.tensors["image_attention_mask"][..., :3]},
    ]
    prompts = [prompt((2, Part("image", one, image.count), 3)) for one in wrong]
    with opened(family, "torch") as llm:  # type: ignore[arg-type]
        *failed, found = llm.generate([*prompts, good], greedy())
    assert all(one.finish == "error" and "an item of media has" in (one.error or "") for one in failed)
    check(found, family.reply(PARTS[1]))


def test_towers_can_be_left_out(family: Phi4) -> None:
    whole, sight, hearing = (
        read_checkpoint(family.folder, task=TaskConfig(images=images, audio=audio))
        for images, audio in ((True, True), (True, False), (False, True))
    )
    alone = read_checkpoint(family.folder, task=TaskConfig(text_only=True))
    for one in (whole, sight, hearing, alone):
        check_tensors(one.model, one.tensors, one.quantization)
    assert whole.model.media is not None and sight.model.media is not None and hearing.model.media is not None
    assert alone.model.media is None and alone.architecture == "Phi3ForCausalLM"
    assert sight.model.media.modalities == ("image",) and hearing.model.media.modalities == ("audio",)
    seen, heard = media_sources(sight.model.media), media_sources(hearing.model.media)
    assert {**seen, **heard} == media_sources(whole.model.media) and not seen.keys() & heard.keys()
    assert tower_sizes(hearing.model.media).patches == 1 and tower_operations(hearing.model.media, 10) > 0
    for kernels in ("torch", best()):
        compare(whole, kernels)


@pytest.mark.parametrize(
    ("part", "settings", "message"),
    [
        ("vision_config", {"crop_size": 32}, "tiles of 32 pixels"),
        ("vision_config", {"patch_size": 16}, "1 patches in a row"),
        ("vision_config", {"feature_layer": None}, "feature_layer"),
        ("audio_config", {"time_reduction": 6}, "time_reduction of 6"),
        ("audio_config", {"chunk_size": 18}, "chunk_size of audio_config is 18; supported is -1"),
        ("audio_config", {"ext_pw_out_channel": 16}, "ext_pw_out_channel"),
        ("audio_config", {"num_attention_heads": 5}, "5 heads for a hidden_size of 12"),
    ],
)
def test_other_settings_are_refused(
    family: Phi4, tmp_path: Path, part: str, settings: dict[str, Any], message: str
) -> None:
    config = json.loads((family.folder / "config.json").read_text())
    config[part] |= settings
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(tmp_path, weights=False)
