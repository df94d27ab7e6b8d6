"""Towers that several multimodal families share: CLIP, SigLIP and Pixtral.

Source: transformers modeling_clip.py, modeling_siglip.py, modeling_pixtral.py.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.api.errors import CheckpointError
from engine.models.config import Config, shown
from engine.models.media import GridRope, Patches, PatchPositions, Tower
from engine.models.parts import MLP, Attention, Block, LayerNorm, Norm, ResidualBlock, RMSNorm, Rope, named

_CLIP: dict[str, Any] = {
    **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
    **{"num_channels": 3, "image_size": 224, "patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
}
SIGLIP = {**_CLIP, "patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}
_PIXTRAL: dict[str, Any] = {
    **{"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16},
    **{"num_channels": 3, "image_size": 1024, "patch_size": 16, "hidden_act": "gelu", "rope_theta": 10_000.0},
}


def vision_config(config: Mapping[str, Any], **defaults: Any) -> Config:
    """Return the settings of the tower."""
    inner = config.get("vision_config")
    return Config.of(inner if isinstance(inner, dict) else {}, **defaults)


def patches_of(c: Config, source: str, **more: Any) -> Patches:
    """Return the projection of the patches, with the sizes of the tower's configuration."""
    size, channels = side_of(c, "patch_size"), c.whole("num_channels")
    return Patches(source=source, hidden=c.hidden, size=size, channels=channels, **more)


def side_of(c: Config, key: str) -> int:
    """Return the side of a square in pixels, which exporters write as a number or as two equal ones."""
    value = c.values.get(key)
    if isinstance(value, list | tuple) and len(value) == 2 and value[0] == value[1]:
        return Config({key: value[0]}, c.names).whole(key)
    return c.whole(key)


def patches_per_side(c: Config) -> int:
    count, rest = divmod(side_of(c, "image_size"), side_of(c, "patch_size"))
    if rest or not count:
        raise CheckpointError(
            f"config.json: image_size is {shown(c.values.get('image_size'))} and patch_size "
            f"{shown(c.values.get('patch_size'))}; the first must be a multiple of the second"
        )
    return count


def pre_norm_block(attention: Attention, mlp: MLP, norm: Norm, names: tuple[str, str]) -> Block:
    """Return a block with norms of these names before its attention and its MLP."""
    return (
        ResidualBlock(before=named(norm, names[0]), body=attention),
        ResidualBlock(before=named(norm, names[1]), body=mlp),
    )


def encoder_block(c: Config, *, causal: bool = False) -> Block:
    """Return the block that CLIP, SigLIP and Idefics3 have."""
    attention = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.heads,
        head_dim=c.head_dim,
        rope=None,
        bias=(True, True),
        causal=causal,
        sources=("q_proj", "k_proj", "v_proj", "out_proj"),
    )
    mlp = plain_mlp(c, ("fc1", "fc2"))
    return pre_norm_block(attention, mlp, LayerNorm(size=c.hidden, eps=c.number("layer_norm_eps")), _NORMS)


_NORMS = ("layer_norm1", "layer_norm2")


def plain_mlp(c: Config, names: tuple[str, str]) -> MLP:
    """Return an MLP without a gate, with biases. names: of its projections."""
    return MLP(
        hidden=c.hidden,
        intermediate_size=c.intermediate_size,
        act=c.activation(),
        bias=True,
        gate=None,
        up=names[0],
        down=names[1],
    )


def clip_tower(config: Mapping[str, Any], layers: Sequence[int], **defaults: Any) -> Tower:
    """layers: numbers of the features among the hidden states, which begin with the embedded patches."""
    c = vision_config(config, **{**_CLIP, **defaults})
    norm, taken = LayerNorm(size=c.hidden, eps=c.number("layer_norm_eps")), taken_blocks(c.layers, layers)
    side = patches_per_side(c)
    return Tower(
        root="vision_tower",
        patches=patches_of(c, "embeddings.patch_embedding", bias=False),
        positions=PatchPositions(name="embeddings.position_embedding.weight", side=side, class_row=True),
        class_token="embeddings.class_embedding",
        before=named(norm, "pre_layrnorm"),
        blocks=(encoder_block(c),) * max(taken),
        layers="encoder.layers",
        taken=taken,
        unread=("post_layernorm.", "embeddings.position_ids", *rest_of("encoder.layers", max(taken), c.layers)),
    )


def siglip_tower(config: Mapping[str, Any], layers: Sequence[int] | None, **defaults: Any) -> Tower:
    """layers: as in `clip_tower`, or None for the normalised output."""
    c = vision_config(config, **{**SIGLIP, **defaults})
    taken = (c.layers,) if layers is None else taken_blocks(c.layers, layers)
    norm = LayerNorm(size=c.hidden, eps=c.number("layer_norm_eps"), name="post_layernorm")
    unused = ("post_layernorm.",) if layers is not None else ()
    return Tower(
        root="vision_tower",
        patches=patches_of(c, "embeddings.patch_embedding"),
        positions=PatchPositions(name="embeddings.position_embedding.weight", side=patches_per_side(c)),
        blocks=(encoder_block(c),) * max(taken),
        layers="encoder.layers",
        taken=taken,
        norm=norm if layers is None else None,
        unread=(*unused, "head.", "embeddings.position_ids", *rest_of("encoder.layers", max(taken), c.layers)),
    )


def pixtral_tower(config: Mapping[str, Any], layers: Sequence[int], **defaults: Any) -> Tower:
    """layers: as in `clip_tower`."""
    c = vision_config(config, **{**_PIXTRAL, **defaults})
    taken, rope = taken_blocks(c.layers, layers), axial_rope(c, alternating=True)
    attention = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.heads,
        head_dim=c.head_dim,
        rope=rope.rope,
        causal=False,
        name="attention",
    )
    mlp = MLP(hidden=c.hidden, intermediate_size=c.intermediate_size, act=c.activation(), name="feed_forward")
    norm = RMSNorm(size=c.hidden, eps=1e-5)
    return Tower(
        root="vision_tower",
        patches=patches_of(c, "patch_conv", bias=False),
        before=named(norm, "ln_pre"),
        blocks=(pre_norm_block(attention, mlp, norm, ("attention_norm", "ffn_norm")),) * max(taken),
        layers="transformer.layers",
        taken=taken,
        rope=rope,
        unread=rest_of("transformer.layers", max(taken), c.layers),
    )


def axial_rope(c: Config, *, alternating: bool = False) -> GridRope:
    """Return rotary positions whose first half of pairs rotates by the row and the second by the column. Both halves
    have the same frequencies, or with `alternating` every second one of a head's (Pixtral)."""
    dim, parameters = c.head_dim, c.values.get("rope_parameters")
    if dim % 4:
        raise CheckpointError(f"config.json: the tower's heads have {dim} dimensions; it must be a multiple of 4")
    inside = Config({**c.values, **parameters} if isinstance(parameters, dict) else c.values, c.names)
    theta = inside.positive("rope_theta")
    quarter = dim // 4
    if alternating:
        exponents = tuple((4 * pair + 2 * axis) / dim for axis in (0, 1) for pair in range(quarter))
    else:
        exponents = tuple(2 * pair / (dim // 2) for pair in range(quarter)) * 2
    return GridRope(rope=Rope(dim=dim, theta=theta), axes=(0,) * quarter + (1,) * quarter, exponents=exponents)


def feature_layers(config: Mapping[str, Any], default: int) -> tuple[int, ...]:
    """Return `vision_feature_layer`, a number or a list of numbers."""
    value = config.get("vision_feature_layer", default)
    found = value if isinstance(value, list | tuple) else [value]
    if not found or not all(isinstance(one, int) and not isinstance(one, bool) for one in found):
        raise CheckpointError(
            f"config.json: vision_feature_layer is {shown(value)}; it must be a whole number or a list of them"
        )
    return tuple(found)


def taken_blocks(count: int, layers: Sequence[int]) -> tuple[int, ...]:
    """Return the number of blocks computed before each hidden state of a tower with `count` blocks."""
    wrong = [layer for layer in layers if not -count - 1 <= layer <= count]
    if wrong:
        raise CheckpointError(
            f"config.json: vision_feature_layer is {wrong[0]}, but the tower has {count} layers; it must be "
            f"{-count - 1} to {count}"
        )
    return tuple(layer if layer >= 0 else count + 1 + layer for layer in layers)


def rest_of(layers: str, first: int, count: int) -> tuple[str, ...]:
    """Return the prefixes of blocks that are not computed."""
    return tuple(f"{layers}.{index}." for index in range(first, count))


BY_TYPE: dict[str, Callable[..., Tower]] = {
    "clip_vision_model": clip_tower,
    "siglip_vision_model": siglip_tower,
    "pixtral": pixtral_tower,
}


def tower_of(config: Mapping[str, Any], layers: Sequence[int], default: str, **defaults: Any) -> Tower:
    """Return the tower of the type that the configuration names."""
    inner = config.get("vision_config")
    name = inner.get("model_type", default) if isinstance(inner, dict) else default
    if not isinstance(name, str) or name not in BY_TYPE:
        raise CheckpointError(
            f"config.json: model_type of vision_config is {shown(name)}; supported are {', '.join(BY_TYPE)}"
        )
    return BY_TYPE[name](config, layers, **(defaults if name == default else {}))


def text_sections(config: Mapping[str, Any], default: tuple[int, ...]) -> tuple[int, ...]:
    """Return the numbers of pairs of a head that the text model rotates by time, height and width."""
    c, sections = Config.of(config), default
    for key in ("rope_parameters", "rope_scaling"):
        settings = c.values.get(key)
        if isinstance(settings, dict) and settings.get("mrope_section") is not None:
            sections = whole_numbers(settings["mrope_section"], "mrope_section")
    if len(sections) != 3:
        raise CheckpointError(f"config.json: mrope_section is {shown(list(sections))}; it must be three numbers")
    return sections


def whole_numbers(value: Any, key: str) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(one, int) and one >= 0 for one in value):
        raise CheckpointError(f"config.json: {key} is {shown(value)}; it must be a list of whole numbers")
    return tuple(value)
