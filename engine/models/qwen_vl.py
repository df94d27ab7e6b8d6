"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: a tower for images and videos of any size, with rotary positions, whose
patches are joined to tokens in squares.

Qwen2.5-VL limits attention to windows except in some blocks. Qwen3-VL has learned positions too, and projects the
features of several blocks, which the text model adds to its first hidden states. Source: transformers
modeling_qwen2_vl.py, modeling_qwen2_5_vl.py, modeling_qwen3_vl.py, modeling_qwen3_5.py.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine.api.errors import CheckpointError
from engine.models.config import Config, shown
from engine.models.llava import whole
from engine.models.media import GridPositions, Media, Merge, Patches, PatchPositions, Project, Projector, Tower
from engine.models.parts import MLP, Attention, LayerNorm, Norm, RMSNorm, named
from engine.models.towers import axial_rope, pre_norm_block, side_of, text_sections, vision_config, whole_numbers

_QWEN2, _QWEN2_5 = "Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"
_QWEN3 = ("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration")
_QWEN3_5 = ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration")
ARCHITECTURES = (_QWEN2, _QWEN2_5, *_QWEN3, *_QWEN3_5)

_COMMON: dict[str, Any] = {
    **{"num_heads": 16, "in_channels": 3, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2},
    "rope_theta": 10_000.0,
}
_DEFAULTS_2 = {**_COMMON, "depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "hidden_act": "quick_gelu"}
_DEFAULTS_2_5: dict[str, Any] = {
    **{**_COMMON, "depth": 32, "hidden_size": 3584, "intermediate_size": 3420, "hidden_act": "silu"},
    **{"window_size": 112, "fullatt_block_indexes": (7, 15, 23, 31), "tokens_per_second": 4},
}
_DEFAULTS_3: dict[str, Any] = {
    **{**_COMMON, "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "hidden_act": "gelu_pytorch_tanh"},
    **{"patch_size": 16, "num_position_embeddings": 2304, "deepstack_visual_indexes": (8, 16, 24)},
}
_NAMES = {"num_hidden_layers": "depth", "num_attention_heads": "num_heads"}
_EPS = 1e-6
_BLOCK = ("norm1", "norm2")


@dataclass(frozen=True)
class MergerNames:
    """Names in the projectors of Qwen3-VL's tower: norm, two layers, and the list of projectors of inner features."""

    norm: str = "norm"
    first: str = "linear_fc1"
    second: str = "linear_fc2"
    deepstack: str = "deepstack_merger_list"


QWEN3_VL = MergerNames()


def declare(config: Mapping[str, Any], hidden: int) -> Media:
    """hidden: width of the text model."""
    architecture = config["architectures"][0]
    if architecture == _QWEN2:
        return _with_tokens(_qwen2(config, hidden), config, (16, 24, 24))
    if architecture == _QWEN2_5:
        return _with_tokens(qwen2_5_media(config, hidden), config, (16, 24, 24))
    if architecture in _QWEN3:
        return _with_tokens(qwen3_media(config, hidden), config, (24, 20, 20))
    return _with_tokens(_qwen3(config, hidden, QWEN3_VL, deepstack=False), config, (11, 11, 10))


def _settings(config: Mapping[str, Any], defaults: Mapping[str, Any], width: str = "hidden_size") -> Config:
    """Return the tower's settings by their usual names."""
    c = vision_config(config, **defaults)
    values = {**c.values, **{key: c.values[name] for key, name in _NAMES.items()}, "hidden_size": c.values[width]}
    if "in_chans" in values:  # older files
        values["in_channels"] = values["in_chans"]
    return Config(values, {**_NAMES, "hidden_size": width})


def _patches(c: Config, *, bias: bool) -> Patches:
    return Patches(
        source="patch_embed.proj",
        hidden=c.hidden,
        size=side_of(c, "patch_size"),
        channels=c.whole("in_channels"),
        frames=side_of(c, "temporal_patch_size"),
        bias=bias,
        flat=True,
        dimensions=3,
    )


def _attention(c: Config) -> Attention:
    c.check_multiple("hidden_size", c.hidden, "num_attention_heads", c.heads)
    return Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.heads,
        head_dim=c.head_dim,
        rope=axial_rope(c).rope,
        bias=(True, True),
        causal=False,
        sources=("qkv", "qkv", "qkv", "proj"),
        name="attn",
    )


def _merger(c: Config, norm: Norm, hidden: int) -> Projector:
    """Return the projector of Qwen2-VL and Qwen2.5-VL."""
    side = c.whole("spatial_merge_size")
    wide = c.hidden * side**2
    return Projector(
        root="merger",
        steps=(
            named(norm, "ln_q"),
            Merge(side=side),
            Project(linear=whole("mlp.0", wide, wide), act="gelu"),
            Project(linear=whole("mlp.2", wide, hidden)),
        ),
    )


def _qwen2(config: Mapping[str, Any], hidden: int) -> Media:
    c = _settings(config, _DEFAULTS_2, "embed_dim")
    norm = LayerNorm(size=c.hidden, eps=_EPS)
    mlp = MLP(
        hidden=c.hidden,
        intermediate_size=int(c.hidden * c.positive("mlp_ratio")),
        act=c.activation(),
        bias=True,
        gate=None,
        up="fc1",
        down="fc2",
    )
    return _media(c, _tower(c, _attention(c), mlp, norm), (_merger(c, norm, hidden),), hidden, "frames")


def qwen2_5_media(config: Mapping[str, Any], hidden: int, sources: tuple[str, str, str] = ("qkv",) * 3) -> Media:
    """Return the tower of Qwen2.5-VL, without placeholders and sections. sources: names of the projections to queries,
    keys and values."""
    c = _settings(config, _DEFAULTS_2_5)
    norm = RMSNorm(size=c.hidden, eps=_EPS)
    mlp = MLP(hidden=c.hidden, intermediate_size=c.intermediate_size, act=c.activation(), bias=True)
    side, size = c.whole("spatial_merge_size"), side_of(c, "patch_size")
    squares = c.whole("window_size") // side // size
    if not squares:
        raise CheckpointError(
            f"config.json: window_size is {c.whole('window_size')}; it must be at least {side * size}, the side of a "
            "token in pixels"
        )
    tower = replace(
        _tower(c, replace(_attention(c), sources=(*sources, "proj")), mlp, norm),
        window=squares * side,
        whole=whole_numbers(c.values[_WHOLE], _WHOLE),
    )
    made = _media(c, tower, (_merger(c, norm, hidden),), hidden, "seconds")
    assert made.positions is not None, "Qwen has positions in three directions"
    return replace(made, positions=replace(made.positions, tokens_per_second=c.number("tokens_per_second")))


_WHOLE = "fullatt_block_indexes"


def qwen3_media(config: Mapping[str, Any], hidden: int, names: MergerNames = QWEN3_VL) -> Media:
    """Return the tower of Qwen3-VL, without placeholders and sections."""
    return _qwen3(config, hidden, names, deepstack=True)


def _qwen3(config: Mapping[str, Any], hidden: int, names: MergerNames, *, deepstack: bool) -> Media:
    c = _settings(config, _DEFAULTS_3)
    norm = LayerNorm(size=c.hidden, eps=_EPS)
    mlp = MLP(
        hidden=c.hidden,
        intermediate_size=c.intermediate_size,
        act=c.activation(),
        bias=True,
        gate=None,
        up="linear_fc1",
        down="linear_fc2",
    )
    rows = c.whole("num_position_embeddings")
    positions = PatchPositions(name="pos_embed.weight", side=math.isqrt(rows), fit="corners")
    if positions.rows != rows:
        raise CheckpointError(f"config.json: num_position_embeddings is {rows}; it must be a square number")
    indexes = _listed(c, "deepstack_visual_indexes") if deepstack else ()
    tower = replace(
        _tower(c, _attention(c), mlp, norm),
        patches=_patches(c, bias=True),
        positions=positions,
        taken=(c.layers, *(index + 1 for index in indexes)),
    )
    side = c.whole("spatial_merge_size")
    wide = c.hidden * side**2
    layers = (
        Project(linear=whole(names.first, wide, wide), act="gelu"),
        Project(linear=whole(names.second, wide, hidden)),
    )
    main = Projector(root="merger", steps=(named(norm, names.norm), Merge(side=side), *layers), feature=0)
    joined = LayerNorm(size=wide, eps=_EPS, name=names.norm)
    others = (
        Projector(root=f"{names.deepstack}.{number}", steps=(Merge(side=side), joined, *layers), feature=number + 1)
        for number in range(len(indexes))
    )
    made = _media(c, tower, (main, *others), hidden, "separate")
    assert made.positions is not None, "Qwen has positions in three directions"
    return replace(made, deepstack=tuple(range(len(indexes))), positions=replace(made.positions, interleaved=True))


def _tower(c: Config, attention: Attention, mlp: MLP, norm: Norm) -> Tower:
    return Tower(
        root="visual",
        patches=_patches(c, bias=False),
        blocks=(pre_norm_block(attention, mlp, norm, _BLOCK),) * c.layers,
        layers="blocks",
        taken=(c.layers,),
        rope=axial_rope(c),
        side=c.whole("spatial_merge_size"),
    )


def _media(c: Config, tower: Tower, projectors: tuple[Projector, ...], hidden: int, time: Any) -> Media:
    positions = GridPositions(sections=(), interleaved=False, side=c.whole("spatial_merge_size"), time=time)
    return Media(tower=tower, projectors=projectors, hidden=hidden, token=0, positions=positions)


def _with_tokens(media: Media, config: Mapping[str, Any], sections: tuple[int, ...]) -> Media:
    """Return the declaration with placeholders and sections. sections: those of files that do not name them."""
    is_new = config["architectures"][0] in _QWEN3_5
    c = Config.of(config, image_token_id=248_056 if is_new else 151_655, video_token_id=248_057 if is_new else 151_656)
    assert media.positions is not None, "Qwen has positions in three directions"
    return replace(
        media,
        token=c.whole("image_token_id", least=0),
        video_token=c.whole("video_token_id", least=0),
        positions=replace(media.positions, sections=text_sections(config, sections)),
    )


def _listed(c: Config, key: str) -> tuple[int, ...]:
    """Return the numbers of blocks in a list."""
    found = whole_numbers(c.values[key], key)
    if any(not 0 <= one < c.layers for one in found):
        raise CheckpointError(f"config.json: {key} is {shown(list(found))}, but the tower has {c.layers} layers")
    return found
