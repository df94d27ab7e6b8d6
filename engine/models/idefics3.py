"""Idefics3 and SmolVLM: a tower like SigLIP's for images of any size, and a projection of joined patches.

Source: transformers modeling_idefics3.py, modeling_smolvlm.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.models.config import Config
from engine.models.llava import whole
from engine.models.media import Media, Merge, Project, Projector
from engine.models.towers import siglip_tower

ARCHITECTURES = ("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration")

_VISION = {"hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32}
_DEFAULTS = {"scale_factor": 2, "image_token_id": 128_257}


def declare(config: Mapping[str, Any], hidden: int) -> Media:
    """hidden: width of the text model."""
    c, tower = Config.of(config, **_DEFAULTS), siglip_tower(config, None, **_VISION)
    assert tower.positions is not None, "SigLIP has learned positions"
    side = c.whole("scale_factor")
    project = Project(linear=whole("modality_projection.proj", tower.hidden * side**2, hidden, bias=False))
    return Media(
        tower=replace(tower, root="vision_model", positions=replace(tower.positions, fit="nearest")),
        projectors=(Projector(root="connector", steps=(Merge(side=side), project)),),
        hidden=hidden,
        token=c.whole("image_token_id", least=0),
    )
