"""Aria: a tower like SigLIP's for images of any size, and learned queries that attend to its features.

Source: transformers modeling_aria.py (AriaProjector).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.api.errors import CheckpointError
from engine.models.config import Config, shown
from engine.models.llava import image_token
from engine.models.media import Media, Projector, Resampler
from engine.models.parts import MLP, LayerNorm
from engine.models.towers import feature_layers, siglip_tower, vision_config

ARCHITECTURES = ("AriaForConditionalGeneration",)

_DEFAULTS = {"image_token_index": 9, "projector_patch_to_query_dict": {"1225": 128, "4900": 256}}
_VISION = {"hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32}
EPS = 1e-5  # of the norms in the projector


def declare(config: Mapping[str, Any], hidden: int) -> Media:
    """hidden: width of the text model."""
    c, tower = Config.of(config, **_DEFAULTS), siglip_tower(config, feature_layers(config, -1), **_VISION)
    assert tower.positions is not None, "SigLIP has learned positions"
    queries = _queries(c.values["projector_patch_to_query_dict"])
    norm = LayerNorm(size=tower.width, eps=EPS, name="layer_norm")
    heads = vision_config(config, **_VISION).heads
    feed = MLP(
        hidden=hidden,
        intermediate_size=hidden,
        act="gelu_tanh",
        gate=None,
        up="linear_in",
        down="linear_out",
        inputs=tower.width,
        name="feed_forward",
    )
    return Media(
        tower=replace(tower, positions=replace(tower.positions, fit="nearest")),
        projectors=(
            Projector(
                root="multi_modal_projector",
                steps=(Resampler(hidden=tower.width, heads=heads, eps=EPS, queries=queries), norm, feed),
            ),
        ),
        hidden=hidden,
        token=image_token(c),
    )


def _queries(table: Any) -> tuple[tuple[int, int], ...]:
    """Return the number of queries for each number of patches of a square image."""
    found = {str(key): value for key, value in table.items()} if isinstance(table, Mapping) else {}
    if not found or not all(key.isdigit() and isinstance(value, int) and value > 0 for key, value in found.items()):
        raise CheckpointError(
            f"config.json: projector_patch_to_query_dict is {shown(table)}; it must have the number of queries for "
            "each number of patches"
        )
    return tuple(sorted((int(key), value) for key, value in found.items()))
