"""Positions of M-RoPE, compared with transformers."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from engine.api.media import MediaItem, MediaTensor
from engine.models.media import GridPositions
from engine.worker.grid_positions import PromptPositions, prompt_positions

SIDE = 2
EYES = {"depth": 1, "hidden_size": 8, "num_heads": 1, "spatial_merge_size": SIDE}
MODELS = {
    "frames": (transformers.Qwen2VLConfig, transformers.Qwen2VLModel),
    "seconds": (transformers.Qwen2_5_VLConfig, transformers.Qwen2_5_VLModel),
    "separate": (transformers.Qwen3VLConfig, transformers.Qwen3VLModel),
}


def indexes_of(time: str) -> Any:
    """Return the method of transformers; it needs no weights."""
    kind, model = MODELS[time]
    eyes = EYES | ({"tokens_per_second": 3} if time == "seconds" else {})
    with torch.device("meta"):
        return model(kind(vision_config=eyes)).get_rope_index


def item(modality: str, grid: tuple[int, int, int], first: int, gap: int, seconds: float | None) -> MediaItem:
    """Return an item with its tokens from `first` on, with `gap` tokens of text between frames."""
    tensors = {f"{modality}_grid_thw": MediaTensor("int64", (1, 3), np.array([grid], "<i8").tobytes())}
    if seconds is not None:
        tensors["second_per_grid_ts"] = MediaTensor("float32", (1,), np.array([seconds], "<f4").tobytes())
    frames, each = grid[0], grid[1] * grid[2] // SIDE**2
    spans = tuple((first + frame * (each + gap), each) for frame in range(frames)) if gap else ((first, frames * each),)
    return MediaItem(modality, b"d", spans, tensors)


@pytest.mark.parametrize("time", MODELS)
@pytest.mark.parametrize("ends", [0, 3])
def test_positions_equal_those_of_transformers(time, ends):
    gap = 2 if time == "separate" else 0
    seconds = 0.75 if time == "seconds" else None
    items, types, at = [], [0] * 5, 5
    for modality, grid in (("image", (1, 4, 6)), ("video", (3, 2, 4)), ("image", (1, 2, 2)), ("video", (2, 8, 2))):
        one = item(modality, grid, at, gap, seconds if modality == "video" else None)
        items.append(one)
        end = sum(one.spans[-1])
        own = [0] * (end - at)
        for first, count in one.spans:
            own[first - at : first - at + count] = [1 if modality == "image" else 2] * count
        types += own + [0, 0]
        at = end + 2
    types += [0] * ends
    given: dict[str, Any] = {"second_per_grid_ts": torch.tensor([seconds, seconds])} if seconds else {}
    expected, delta = indexes_of(time)(
        torch.zeros(1, len(types), dtype=torch.long),
        torch.tensor([types]),
        image_grid_thw=torch.tensor([[1, 4, 6], [1, 2, 2]]),
        video_grid_thw=torch.tensor([[3, 2, 4], [2, 8, 2]]),
        **given,
    )
    declared = GridPositions(sections=(1, 1, 1), interleaved=False, side=SIDE, time=time, tokens_per_second=3)
    found = prompt_positions(len(types), tuple(items), declared)
    np.testing.assert_array_equal(found.prompt, expected[:, 0].T.numpy())
    assert found.delta == int(delta)


def test_positions_of_a_chunk_continue_with_those_of_the_reply():
    whole = PromptPositions(np.array([[0, 0, 0], [1, 1, 2]]), delta=1)
    np.testing.assert_array_equal(whole.of(1, 3), [[1, 1, 2], [3, 3, 3], [4, 4, 4]])
    np.testing.assert_array_equal(whole.of(4, 1), [[5, 5, 5]])
