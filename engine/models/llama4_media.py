"""The tower of Llama 4: rotary positions of rows and columns, a class token after the patches, and a projector that
joins squares of patches.

Source: transformers modeling_llama4.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.api.errors import CheckpointError
from engine.models.config import Config
from engine.models.llava import image_token, whole
from engine.models.media import GridRope, Media, Merge, PatchPositions, Project, Projector, Tower
from engine.models.parts import Attention, LayerNorm, named
from engine.models.towers import (
    axial_rope,
    patches_of,
    patches_per_side,
    plain_mlp,
    pre_norm_block,
    vision_config,
)

ARCHITECTURES = ("Llama4ForConditionalGeneration",)

_VISION: dict[str, Any] = {
    **{"hidden_size": 768, "intermediate_size": 5632, "num_hidden_layers": 34, "num_attention_heads": 16},
    **{"num_channels": 3, "image_size": 448, "patch_size": 14, "hidden_act": "gelu", "rope_theta": 10_000.0},
    **{"pixel_shuffle_ratio": 0.5, "projector_input_dim": 4096, "projector_output_dim": 4096},
    "vision_output_dim": 7680,
}
_EPS = 1e-5


def declare(config: Mapping[str, Any], hidden: int) -> Media:
    """hidden: width of the text model."""
    c = vision_config(config, **_VISION)
    ratio, out = c.positive("pixel_shuffle_ratio"), c.whole("projector_output_dim")
    side = int(1 / ratio)
    if side < 1 or side * ratio != 1:
        raise CheckpointError(f"config.json: pixel_shuffle_ratio is {ratio:g}; it must be one over a whole number")
    inner = c.whole("projector_input_dim")
    adapter = Projector(
        steps=(
            Merge(side=side),
            Project(linear=whole("vision_model.vision_adapter.mlp.fc1", c.hidden * side**2, inner, False), act="gelu"),
            Project(linear=whole("vision_model.vision_adapter.mlp.fc2", inner, out, False), act="gelu"),
            Project(linear=whole("multi_modal_projector.linear_1", out, hidden, False)),
        )
    )
    token = image_token(Config.of(config, image_token_index=200_092))
    return Media(tower=_tower(c), projectors=(adapter,), hidden=hidden, token=token)


def _tower(c: Config) -> Tower:
    rope, norm, side = _rope(c), LayerNorm(size=c.hidden, eps=_EPS), patches_per_side(c)
    attention = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.heads,
        head_dim=c.head_dim,
        rope=rope.rope,
        bias=(True, True),
        causal=False,
    )
    block = pre_norm_block(
        attention, plain_mlp(c, ("fc1", "fc2")), norm, ("input_layernorm", "post_attention_layernorm")
    )
    return Tower(
        root="vision_model",
        patches=patches_of(c, "patch_embedding.linear", bias=False, dimensions=0),
        positions=PatchPositions(name="positional_embedding_vlm", side=side, class_row=True),
        class_token="class_embedding",
        class_last=True,
        before=named(norm, "layernorm_pre"),
        blocks=(block,) * c.layers,
        layers="model.layers",
        taken=(c.layers,),
        norm=named(norm, "layernorm_post"),
        rope=rope,
    )


def _rope(c: Config) -> GridRope:
    """Return rotary positions whose first half of pairs, each of neighbours, rotates by the column and the second half
    by the row. The class token does not rotate."""
    rope = axial_rope(c)
    return replace(rope, rope=replace(rope.rope, interleaved=True), axes=rope.axes[::-1], first=1)
