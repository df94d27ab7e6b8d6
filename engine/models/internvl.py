"""InternVL 2.5 and 3 with InternViT, whose blocks scale the outputs of attention and MLP by vectors.

Source: transformers modeling_internvl.py.
"""

from collections.abc import Mapping
from typing import Any

from engine.api.errors import CheckpointError
from engine.models.config import Config, shown
from engine.models.llava import selected, whole
from engine.models.media import Media, Merge, PatchPositions, Project, Projector, Tower
from engine.models.parts import Attention, LayerNorm, RMSNorm, named
from engine.models.towers import (
    feature_layers,
    patches_of,
    patches_per_side,
    plain_mlp,
    pre_norm_block,
    rest_of,
    taken_blocks,
    vision_config,
)

ARCHITECTURES = ("InternVLForConditionalGeneration",)

_VIT: dict[str, Any] = {
    **{"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16},
    **{"num_channels": 3, "image_size": 448, "patch_size": 14, "hidden_act": "gelu", "layer_norm_eps": 1e-6},
    **{"norm_type": "layer_norm", "use_absolute_position_embeddings": True, "use_mean_pooling": True},
}
_DEFAULTS = {"downsample_ratio": 0.5, "projector_hidden_act": "gelu", "image_token_id": 151_667}


def declare(config: Mapping[str, Any], hidden: int) -> Media:
    """hidden: width of the text model."""
    c, layers = Config.of(config, **_DEFAULTS), feature_layers(config, -1)
    if len(layers) > 1:
        raise CheckpointError("config.json: vision_feature_layer is a list; this projector reads one feature")
    tower, ratio = selected(_tower(config, layers[0]), config), c.positive("downsample_ratio")
    side = int(1 / ratio)
    if side < 1 or side * ratio != 1 or tower.keeps_class:
        raise CheckpointError(
            f"config.json: downsample_ratio is {ratio:g} and vision_feature_select_strategy "
            f"{shown(config.get('vision_feature_select_strategy', 'default'))}; they must be one over a whole number, "
            "and default"
        )
    wide = tower.hidden * side**2
    projector = Projector(
        root="multi_modal_projector",
        steps=(
            Merge(side=side),
            LayerNorm(size=wide, eps=1e-5, name="layer_norm"),
            Project(linear=whole("linear_1", wide, hidden), act=c.activation("projector_hidden_act")),
            Project(linear=whole("linear_2", hidden, hidden)),
        ),
    )
    return Media(tower=tower, projectors=(projector,), hidden=hidden, token=c.whole("image_token_id", least=0))


def _tower(config: Mapping[str, Any], layer: int) -> Tower:
    c = vision_config(config, **_VIT)
    eps, kind = c.number("layer_norm_eps"), c.values["norm_type"]
    if kind not in ("layer_norm", "rms_norm"):
        raise CheckpointError(f"config.json: norm_type is {shown(kind)}; supported are layer_norm and rms_norm")
    norm = LayerNorm(size=c.hidden, eps=eps) if kind == "layer_norm" else RMSNorm(size=c.hidden, eps=1e-6)
    attention = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.heads,
        head_dim=c.head_dim,
        rope=None,
        bias=(c.flag("attention_bias"), True),
        qk_norm=RMSNorm(size=c.head_dim, eps=1e-6) if c.flag("use_qk_norm") else None,
        qk_norm_span="all",
        causal=False,
        sources=("q_proj", "k_proj", "v_proj", "projection_layer"),
        name="attention",
    )
    block = pre_norm_block(attention, plain_mlp(c, ("fc1", "fc2")), norm, ("layernorm_before", "layernorm_after"))
    (taken,) = taken_blocks(c.layers, (layer,))
    side, last = patches_per_side(c), LayerNorm(size=c.hidden, eps=eps, name="layernorm")
    is_normed = layer == -1 and not c.flag("use_mean_pooling")
    positions = PatchPositions(
        name="embeddings.position_embeddings",
        side=side,
        fit="bicubic",
        class_row=True,
        stored=(1, side**2 + 1, c.hidden),
    )
    return Tower(
        root="vision_tower",
        patches=patches_of(c, "embeddings.patch_embeddings.projection"),
        positions=positions if c.flag("use_absolute_position_embeddings") else None,
        class_token="embeddings.cls_token",
        class_shape=(1, 1, c.hidden),
        blocks=(block,) * taken,
        layers="encoder.layer",
        taken=(taken,),
        norm=named(last, "layernorm") if is_normed else None,
        scales=(("attention.projection_layer", "lambda_1"), ("mlp.fc2", "lambda_2")),
        unread=(
            *("embeddings.mask_token", *(() if is_normed else ("layernorm.",))),
            *rest_of("encoder.layer", taken, c.layers),
        ),
    )
