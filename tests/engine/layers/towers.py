"""Tiny random checkpoints of multimodal families, items, and their embeddings as transformers computes them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

Item = dict[str, Tensor]
TEXT: dict[str, Any] = {
    **{"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"num_key_value_heads": 1, "head_dim": 12, "vocab_size": 96, "max_position_embeddings": 64},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
EYES: dict[str, Any] = {
    **{"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 3, "num_attention_heads": 2, "patch_size": 4},
    "image_size": 12,
}


@dataclass(frozen=True)
class Case:
    """A family: its model, items of several sizes, and the embeddings of each of several items."""

    make: Callable[[], Any]
    items: Callable[[], list[Item]]
    features: Callable[[Any, list[Item]], list[Tensor]]


def save(case: Case, path: Path) -> Any:
    """Write a checkpoint with random weights, norms among them; return its model."""
    torch.manual_seed(7)
    model = case.make().eval().float()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.2)
    model.save_pretrained(path)
    return model


def images(*sizes: tuple[int, ...]) -> list[Item]:
    """Return an item for each shape of pixels."""
    torch.manual_seed(3)
    return [{"pixel_values": torch.randn(size)} for size in sizes]


def one_by_one(model: Any, items: list[Item]) -> list[Tensor]:
    """Return the embeddings of each item, computed alone."""
    found = [model.get_image_features(**item) for item in items]
    pooled = [getattr(one, "pooler_output", one) for one in found]
    return [
        one.flatten(0, -2) if isinstance(one, Tensor) else torch.cat([x.flatten(0, -2) for x in one]) for one in pooled
    ]


def llava(**more: Any) -> Case:
    def make() -> Any:
        eyes = transformers.CLIPVisionConfig(**EYES)
        text = transformers.LlamaConfig(**TEXT)
        return transformers.LlavaForConditionalGeneration(
            transformers.LlavaConfig(vision_config=eyes, text_config=text, **more)
        )

    return Case(make, lambda: images(*[(1, 3, 12, 12)] * 3), one_by_one)


CASES = {
    "llava": llava(),
    "llava-layers": llava(vision_feature_layer=[-3, 2, -1], vision_feature_select_strategy="full"),
}
