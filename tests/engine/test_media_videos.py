"""Videos whose frames are images of the prompt (GLM-4.1V), or whose embeddings are scaled down (LLaVA-OneVision),
through the whole engine: replies equal transformers'. tests/engine/media compares the processors."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.api.media import MediaItem, Modality
from engine.llm import MediaPrompt
from kernels.cpu.library import best
from tests.engine.media_models import (
    IMAGE,
    REPLY,
    TEXT,
    Family,
    Picture,
    check,
    glm,
    greedy,
    minicpm_v,
    opened,
    saved,
)

VIDEO = 94
FRAMES = 3


def one_vision(folder: Path) -> Family:
    eyes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlavaOnevisionConfig(
        vision_config=transformers.SiglipVisionConfig(**eyes, patch_size=4, image_size=12, vision_use_head=False),
        text_config=transformers.Qwen2Config(**{key: value for key, value in TEXT.items() if key != "head_dim"}),
        image_grid_pinpoints=[[12, 24]],
        image_token_index=IMAGE,
        video_token_index=VIDEO,
    )
    model = transformers.LlavaOnevisionForConditionalGeneration(config)
    with torch.no_grad():
        model.model.image_newline.normal_(0, 0.3)
    return Family(saved(model, folder), folder)


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(4))


@torch.no_grad()
def reply(model: Any, prompt: MediaPrompt, kind: int, **given: torch.Tensor) -> tuple[list[int], list[float]]:
    """Return the greedy reply of transformers. kind: type of media tokens for M-RoPE, or 0 without it."""
    ids, logprobs = list(prompt.ids), []
    for _ in range(REPLY):
        tokens = torch.tensor([ids])
        types = {"mm_token_type_ids": kind * (tokens == IMAGE).long()} if kind else {}
        row = model(input_ids=tokens, **given, **types).logits[0, -1].log_softmax(-1)
        logprobs.append(float(row.max()))
        ids.append(int(row.argmax()))
    return ids[len(prompt.ids) :], logprobs


def prompt_of(token: int, modality: Modality, counts: list[int], tensors: dict[str, torch.Tensor]) -> MediaPrompt:
    """Return a prompt with runs of media tokens of one item between texts."""
    ids, spans = [5, 6, 7], []
    for number, count in enumerate(counts):
        spans.append((len(ids), count))
        ids += [token] * count + [10 + number, 11]
    item = MediaItem(modality, b"video", tuple(spans), Picture(tensors, 0).item_tensors)
    return MediaPrompt((*ids, 12), (item,))


@pytest.mark.parametrize("kernels", ("torch", best()))
def test_each_frame_is_an_image_between_texts(kernels: str, tmp_path: Path) -> None:
    family = glm(tmp_path, "Glm4v")
    pixels, high, wide = noise(FRAMES * 24, 3 * 2 * 16), 4, 6
    own = {"pixel_values": pixels, "image_grid_thw": torch.tensor([(1, high, wide)] * FRAMES)}
    prompt = prompt_of(IMAGE, "image", [high * wide // 4] * FRAMES, own)
    wanted = reply(
        family.model, prompt, 2, pixel_values_videos=pixels, video_grid_thw=torch.tensor([(FRAMES, high, wide)])
    )
    with opened(family, kernels, max_step_tokens=7, max_running=2) as llm:
        check(llm.generate(prompt, greedy())[0], wanted)


@pytest.mark.parametrize("kernels", ("torch", best()))
def test_embeddings_of_frames_are_scaled_down(kernels: str, tmp_path: Path) -> None:
    family = one_vision(tmp_path)
    own = {"pixel_values_videos": noise(1, FRAMES, 3, 12, 12)}
    prompt = prompt_of(VIDEO, "video", [FRAMES * 4 + 1], own)
    with opened(family, kernels, max_step_tokens=7, max_running=2) as llm:
        check(llm.generate(prompt, greedy())[0], reply(family.model, prompt, 0, **own))


@pytest.mark.parametrize("kernels", ("torch", best()))
def test_frames_of_minicpm_v_have_slices(kernels: str, tmp_path: Path) -> None:
    """Two frames of the whole image and two slices; tokens of texts are between them."""
    family = minicpm_v(tmp_path, video_token_id=VIDEO)
    sizes = torch.tensor(((8, 4), (4, 4), (4, 4)) * 2)
    counts = [int(high * wide) // 16 for high, wide in sizes.tolist()]
    pixels = noise(1, 3, 4, 4 * 16 * sum(counts))
    prompt = prompt_of(VIDEO, "video", counts, {"pixel_values_videos": pixels, "target_sizes": sizes})
    wanted = reply(family.model, prompt, 0, pixel_values_videos=pixels, target_sizes_videos=sizes)
    with opened(family, kernels, max_step_tokens=7, max_running=2) as llm:
        found, again = llm.generate(prompt, greedy())[0], llm.generate(prompt, greedy())[0]
        check(found, wanted)
        check(again, wanted)
