"""Idefics2: a tower like SigLIP's for images of any size, and learned queries that attend to its projected features.

Source: transformers modeling_idefics2.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.api.errors import CheckpointError
from engine.models.config import MAX_LAYERS, Config
from engine.models.media import Media, Perceiver, Projector
from engine.models.parts import MLP
from engine.models.towers import siglip_tower

ARCHITECTURES = ("Idefics2ForConditionalGeneration",)

_VISION = {"patch_size": 32}
_PERCEIVER: dict[str, Any] = {
    **{"hidden_size": 4096, "hidden_act": "silu", "rms_norm_eps": 1e-6, "num_key_value_heads": 4},
    **{"resampler_n_latents": 64, "resampler_depth": 3, "resampler_n_heads": 16, "resampler_head_dim": 96},
}
_TEXT = {"intermediate_size": 14_336, "hidden_act": "silu", "rms_norm_eps": 1e-5}


def declare(config: Mapping[str, Any], hidden: int) -> Media:
    """hidden: width of the text model."""
    tower, inner = siglip_tower(config, None, **_VISION), config.get("text_config")
    text = Config.of(inner if isinstance(inner, dict) else {}, **_TEXT)
    assert tower.positions is not None, "SigLIP has learned positions"
    modality = MLP(
        hidden=hidden,
        intermediate_size=text.intermediate_size,
        act=text.activation(),
        inputs=tower.hidden,
        name="modality_projection",
    )
    perceiver = _perceiver(config, hidden, text, tower.positions.side**2)
    return Media(
        tower=replace(tower, root="vision_model", positions=replace(tower.positions, fit="nearest")),
        projectors=(Projector(root="connector", steps=(modality, perceiver)),),
        hidden=hidden,
        token=Config.of(config, image_token_id=32_001).whole("image_token_id", least=0),
    )


def _perceiver(config: Mapping[str, Any], hidden: int, text: Config, rows: int) -> Perceiver:
    """rows: patches of an image of the usual size."""
    inner = config.get("perceiver_config")
    c = Config.of(inner if isinstance(inner, dict) else {}, **_PERCEIVER)
    # transformers replaces a width that differs from the text model's, and its eps, by the text model's settings.
    eps = (c if c.hidden == hidden else text).number("rms_norm_eps")
    heads, kv_heads = c.whole("resampler_n_heads"), c.whole("num_key_value_heads")
    if heads % kv_heads:
        raise CheckpointError(
            f"config.json: resampler_n_heads of perceiver_config is {heads}; it must be a multiple of "
            f"num_key_value_heads, {kv_heads}"
        )
    return Perceiver(
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=c.whole("resampler_head_dim"),
        layers=c.whole("resampler_depth", most=MAX_LAYERS),
        act=c.activation(),
        eps=eps,
        queries=c.whole("resampler_n_latents"),
        rows=rows,
    )
