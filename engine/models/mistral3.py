"""Mistral 3 and LightOnOCR: Pixtral, and a projector that joins squares of patches.

Source: transformers modeling_mistral3.py, modeling_lighton_ocr.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.api.errors import CheckpointError
from engine.models.config import Config
from engine.models.llava import image_token, whole
from engine.models.media import Media, Merge, Project, Projector
from engine.models.parts import RMSNorm
from engine.models.towers import feature_layers, pixtral_tower

_OCR = "LightOnOcrForConditionalGeneration"
ARCHITECTURES = ("Mistral3ForConditionalGeneration", _OCR)

_DEFAULTS: dict[str, Any] = {
    **{"projector_hidden_act": "gelu", "multimodal_projector_bias": False, "spatial_merge_size": 2},
    **{"image_token_index": 10, "rms_norm_eps": 1e-6},
}
_PIXTRAL = {"patch_size": 14, "image_size": 1540}


def declare(config: Mapping[str, Any], hidden: int) -> Media:
    """hidden: width of the text model."""
    c, layers = Config.of(config, **_DEFAULTS), feature_layers(config, -1)
    if config["architectures"][0] == _OCR:
        token = Config.of(config, image_token_id=151_655).whole("image_token_id", least=0)
        tower = pixtral_tower(config, (-1,), **_PIXTRAL, hidden_act="silu")
        projector = _projector(c, tower.hidden, hidden, act="gelu", bias=False)
        return Media(
            tower=tower, projectors=(replace(projector, root="vision_projection"),), hidden=hidden, token=token
        )
    if len(layers) > 1:
        raise CheckpointError("config.json: vision_feature_layer is a list; this projector reads one feature")
    tower, act = pixtral_tower(config, layers, **_PIXTRAL), c.activation("projector_hidden_act")
    projector = _projector(c, tower.hidden, hidden, act=act, bias=c.flag("multimodal_projector_bias"))
    return Media(tower=tower, projectors=(projector,), hidden=hidden, token=image_token(c))


def _projector(c: Config, width: int, hidden: int, *, act: str, bias: bool) -> Projector:
    """width: of the features."""
    side = c.whole("spatial_merge_size")
    return Projector(
        root="multi_modal_projector",
        steps=(
            RMSNorm(size=width, eps=c.number("rms_norm_eps"), name="norm"),
            Merge(side=side, by_channel=True),
            Project(linear=whole("patch_merger.merging_layer", width * side**2, width, bias=False)),
            Project(linear=whole("linear_1", width, hidden, bias), act=act),
            Project(linear=whole("linear_2", hidden, hidden, bias)),
        ),
    )
