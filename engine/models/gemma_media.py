"""Gemma 3 and PaliGemma: SigLIP, and a projector without hidden layers.

Gemma 3 reads the mean of squares of patches, and its tokens of an image attend to each other. The prompt of PaliGemma
attends to itself in both directions. Source: transformers modeling_gemma3.py, modeling_paligemma.py.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.api.errors import CheckpointError
from engine.models.config import Config
from engine.models.llava import image_token, whole
from engine.models.media import AveragePool, Media, Project, Projector, StoredTensor
from engine.models.parts import RMSNorm
from engine.models.towers import patches_per_side, siglip_tower, vision_config

_GEMMA3, _PALIGEMMA = "Gemma3ForConditionalGeneration", "PaliGemmaForConditionalGeneration"
ARCHITECTURES = (_GEMMA3, _PALIGEMMA)

_SIGLIP: dict[str, Any] = {
    **{"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16},
    **{"patch_size": 14, "image_size": 224},
}
_GEMMA3_DEFAULTS = {"mm_tokens_per_image": 256, "image_token_index": 262_144}


def declare(config: Mapping[str, Any], hidden: int) -> Media:
    """hidden: width of the text model."""
    if config["architectures"][0] == _PALIGEMMA:
        c = Config.of(config, image_token_index=256_000)
        tower = siglip_tower(config, None, **_SIGLIP)
        project = Project(linear=whole("linear", tower.hidden, hidden))
        projector = Projector(root="multi_modal_projector", steps=(project,))
        return Media(tower=tower, projectors=(projector,), hidden=hidden, token=image_token(c), attention="prefix")
    return _gemma3(config, hidden)


def _gemma3(config: Mapping[str, Any], hidden: int) -> Media:
    c, tower = Config.of(config, **_GEMMA3_DEFAULTS), siglip_tower(config, None, **_SIGLIP)
    vision = vision_config(config, layer_norm_eps=1e-6, **_SIGLIP)
    side = patches_per_side(vision) // math.isqrt(c.whole("mm_tokens_per_image"))
    if not side:
        raise CheckpointError(
            f"config.json: mm_tokens_per_image is {c.whole('mm_tokens_per_image')}, more than the patches of an image"
        )
    projector = Projector(
        root="multi_modal_projector",
        steps=(
            AveragePool(side=side),
            RMSNorm(size=tower.hidden, eps=vision.number("layer_norm_eps"), offset=1.0, name="mm_soft_emb_norm"),
            Project(linear=whole("mm_input_projection", tower.hidden, hidden, bias=False)),
        ),
        renamed=(
            (
                "mm_input_projection.weight",
                StoredTensor(name="mm_input_projection_weight", shape=(tower.hidden, hidden), transposed=True),
            ),
        ),
    )
    media = Media(tower=tower, projectors=(projector,), hidden=hidden, token=image_token(c))
    return replace(media, attention="item")
