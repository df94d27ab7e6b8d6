"""Mistral 3: Pixtral, and a projector that joins squares of patches.

Source: transformers modeling_mistral3.py.
"""

from collections.abc import Mapping
from typing import Any

from engine.api.errors import CheckpointError
from engine.models.config import Config
from engine.models.llava import image_token, whole
from engine.models.media import Media, Merge, Project, Projector
from engine.models.parts import RMSNorm
from engine.models.towers import feature_layers, pixtral_tower

ARCHITECTURES = ("Mistral3ForConditionalGeneration",)

_DEFAULTS: dict[str, Any] = {
    **{"projector_hidden_act": "gelu", "multimodal_projector_bias": False, "spatial_merge_size": 2},
    **{"image_token_index": 10, "rms_norm_eps": 1e-6},
}
_PIXTRAL = {"patch_size": 14, "image_size": 1540}


def declare(config: Mapping[str, Any], hidden: int) -> Media:
    """hidden: width of the text model."""
    c, layers = Config.of(config, **_DEFAULTS), feature_layers(config, -1)
    if len(layers) > 1:
        raise CheckpointError("config.json: vision_feature_layer is a list; this projector reads one feature")
    tower, side = pixtral_tower(config, layers, **_PIXTRAL), c.whole("spatial_merge_size")
    bias = c.flag("multimodal_projector_bias")
    merge = whole("patch_merger.merging_layer", tower.hidden * side**2, tower.hidden, bias=False)
    projector = Projector(
        root="multi_modal_projector",
        steps=(
            RMSNorm(size=tower.hidden, eps=c.number("rms_norm_eps"), name="norm"),
            Merge(side=side, by_channel=True),
            Project(linear=merge),
            Project(linear=whole("linear_1", tower.hidden, hidden, bias), act=c.activation("projector_hidden_act")),
            Project(linear=whole("linear_2", hidden, hidden, bias)),
        ),
    )
    return Media(tower=tower, projectors=(projector,), hidden=hidden, token=image_token(c))
