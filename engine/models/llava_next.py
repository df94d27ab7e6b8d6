"""LLaVA-NeXT, LLaVA-OneVision and Granite Vision: LLaVA with images that are cut into tiles.

Source: transformers modeling_llava_next.py, modeling_llava_onevision.py. Granite Vision has the architecture of
LLaVA-NeXT.
"""

from collections.abc import Mapping
from typing import Any

from engine.api.errors import CheckpointError
from engine.models.config import Config, shown
from engine.models.llava import CLIP_LARGE, image_token, selected, two_layers
from engine.models.media import Media, Tiles
from engine.models.towers import feature_layers, side_of, tower_of, vision_config

_NEXT, _ONE_VISION = "LlavaNextForConditionalGeneration", "LlavaOnevisionForConditionalGeneration"
ARCHITECTURES = (_NEXT, _ONE_VISION)

_DEFAULTS = {"projector_hidden_act": "gelu", "multimodal_projector_bias": True}
_SIGLIP: dict[str, Any] = {
    **{"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 26, "num_attention_heads": 16},
    **{"patch_size": 14, "image_size": 384},
}
_SIZES = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
_SIDES = range(384, 2305, 384)
_PREFIX = "anyres_max_"


def declare(config: Mapping[str, Any], hidden: int) -> Media:
    """hidden: width of the text model."""
    is_next = config["architectures"][0] == _NEXT
    kind, defaults = ("clip_vision_model", CLIP_LARGE) if is_next else ("siglip_vision_model", _SIGLIP)
    strategy = "default" if is_next else "full"
    written = {"vision_feature_select_strategy": strategy, **config}
    tower = selected(tower_of(config, feature_layers(config, -2 if is_next else -1), kind, **defaults), written)
    c = Config.of(config, **_DEFAULTS, image_token_index=32_000 if is_next else 151_646)
    act, bias = c.activation("projector_hidden_act"), c.flag("multimodal_projector_bias")
    return Media(
        tower=tower,
        projectors=(two_layers(tower.width, hidden, act, bias),),
        hidden=hidden,
        token=image_token(c),
        video_token=None if is_next else _video_token(config),
        tiles=Tiles(
            sizes=_sizes(config, _SIZES if is_next else [[high, wide] for high in _SIDES for wide in _SIDES]),
            size=side_of(vision_config(config, **defaults), "image_size"),
            newline="image_newline",
            width=hidden,
            most=0 if is_next else _most(config),
        ),
    )


def _video_token(config: Mapping[str, Any]) -> int:
    """Return the token of videos; files name it as an index or as an id."""
    c = Config.of(config, video_token_index=config.get("video_token_id", 151_647))
    return c.whole("video_token_index", least=0)


def _sizes(config: Mapping[str, Any], default: list[list[int]]) -> tuple[tuple[int, int], ...]:
    listed = config.get("image_grid_pinpoints") or default
    if not isinstance(listed, list) or not all(
        isinstance(one, list | tuple) and len(one) == 2 and all(isinstance(side, int) and side > 0 for side in one)
        for one in listed
    ):
        raise CheckpointError(
            f"config.json: image_grid_pinpoints is {shown(listed)}; it must be a list of (height, width)"
        )
    return tuple((one[0], one[1]) for one in listed)


def _most(config: Mapping[str, Any]) -> int:
    value = config.get("vision_aspect_ratio", f"{_PREFIX}9")
    number = str(value).removeprefix(_PREFIX)
    if not str(value).startswith(_PREFIX) or not number.isdigit() or int(number) < 1:
        raise CheckpointError(
            f"config.json: vision_aspect_ratio is {shown(value)}; it must be {_PREFIX} and a whole number"
        )
    return int(number)
