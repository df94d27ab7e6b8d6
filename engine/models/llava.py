"""LLaVA 1.5: CLIP, SigLIP or Pixtral, and a projector of two layers.

Source: transformers modeling_llava.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.api.errors import CheckpointError
from engine.models.config import Config, shown
from engine.models.media import Media, Project, Projector, Tower
from engine.models.parts import Linear, Rows
from engine.models.towers import feature_layers, tower_of

ARCHITECTURES = ("LlavaForConditionalGeneration",)

CLIP_LARGE: dict[str, Any] = {
    **{"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16},
    **{"patch_size": 14, "image_size": 336},
}
_DEFAULTS = {"projector_hidden_act": "gelu", "multimodal_projector_bias": True, "image_token_index": 32_000}


def declare(config: Mapping[str, Any], hidden: int) -> Media:
    """hidden: width of the text model."""
    c = Config.of(config, **_DEFAULTS)
    tower = selected(tower_of(config, feature_layers(config, -2), "clip_vision_model", **CLIP_LARGE), config)
    return Media(
        tower=tower,
        projectors=(
            two_layers(tower.width, hidden, c.activation("projector_hidden_act"), c.flag("multimodal_projector_bias")),
        ),
        hidden=hidden,
        token=image_token(c),
    )


def selected(tower: Tower, config: Mapping[str, Any]) -> Tower:
    """Return the tower with the features that `vision_feature_select_strategy` names: with or without the first
    token."""
    strategy = config.get("vision_feature_select_strategy", "default")
    if strategy not in ("default", "full") or (strategy == "default" and not tower.class_token):
        allowed = "default or full" if tower.class_token else "full, because this tower has no class token"
        raise CheckpointError(f"config.json: vision_feature_select_strategy is {shown(strategy)}; it must be {allowed}")
    return replace(tower, keeps_class=strategy == "full" and bool(tower.class_token))


def two_layers(inputs: int, hidden: int, act: str, bias: bool) -> Projector:
    return Projector(
        root="multi_modal_projector",
        steps=(
            Project(linear=whole("linear_1", inputs, hidden, bias), act=act),
            Project(linear=whole("linear_2", hidden, hidden, bias)),
        ),
    )


def whole(source: str, inputs: int, outputs: int, bias: bool = True) -> Linear:
    """Return a projection that every rank has."""
    return Linear(rows=(Rows(source=source, units=outputs),), inputs=inputs, split=None, bias=bias)


def image_token(c: Config) -> int:
    """Return the placeholder's id, which newer exporters write under another key."""
    key = "image_token_id" if c.values.get("image_token_id") is not None else "image_token_index"
    return c.whole(key, least=0)
