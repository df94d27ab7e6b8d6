"""GLM-4.1V, GLM-4.5V, GLM-4.6V and GLM-OCR: a tower for images of any size with rotary positions. A convolution joins
squares of patches, and a gated MLP projects them.

GLM-OCR normalises queries and keys, and has biases; the others have learned positions too, and a norm of the embedded
patches. Source: transformers modeling_glm4v.py, modeling_glm4v_moe.py, modeling_glm46v.py, modeling_glm_ocr.py. Each
pair of frames of a video is an image for the tower.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.models.config import Config
from engine.models.llava import whole
from engine.models.media import (
    Activate,
    GridPositions,
    Media,
    Merge,
    Patches,
    PatchPositions,
    Project,
    Projector,
    StoredTensor,
    Tower,
)
from engine.models.parts import MLP, Attention, LayerNorm, RMSNorm, named
from engine.models.towers import axial_rope, patches_per_side, pre_norm_block, side_of, text_sections, vision_config

_OCR = "GlmOcrForConditionalGeneration"
ARCHITECTURES = (
    *("Glm4vForConditionalGeneration", "Glm4vMoeForConditionalGeneration", "Glm46VForConditionalGeneration"),
    _OCR,
)

_VISION: dict[str, Any] = {
    **{"depth": 24, "hidden_size": 1536, "hidden_act": "silu", "num_heads": 12, "in_channels": 3, "image_size": 336},
    **{"patch_size": 14, "rms_norm_eps": 1e-5, "spatial_merge_size": 2, "temporal_patch_size": 2},
    **{"out_hidden_size": 4096, "intermediate_size": 13_696, "rope_theta": 10_000.0},
}
_OCR_VISION: dict[str, Any] = {
    **{**_VISION, "hidden_size": 1024, "num_heads": 16, "out_hidden_size": 1536, "intermediate_size": 4096},
    "attention_bias": True,
}
_TOKENS = {_OCR: 59_280, "Glm4vMoeForConditionalGeneration": 151_363}
_NAMES = {"num_hidden_layers": "depth", "num_attention_heads": "num_heads"}


def declare(config: Mapping[str, Any], hidden: int) -> Media:
    """hidden: width of the text model."""
    architecture = config["architectures"][0]
    c = vision_config(config, **(_OCR_VISION if architecture == _OCR else _VISION))
    c = Config({**c.values, **{key: c.values[name] for key, name in _NAMES.items()}}, _NAMES)
    side = c.whole("spatial_merge_size")
    positions = GridPositions(sections=text_sections(config, (8, 12, 12)), interleaved=False, side=side, time="frames")
    return Media(
        tower=_ocr_tower(c) if architecture == _OCR else _tower(c),
        projectors=(_projector(c, hidden, side, _merger_size(c, architecture)),),
        hidden=hidden,
        token=Config.of(config, image_token_id=_TOKENS.get(architecture, 151_343)).whole("image_token_id", least=0),
        positions=positions,
    )


def _tower(c: Config) -> Tower:
    norm, rope = RMSNorm(size=c.hidden, eps=c.number("rms_norm_eps")), axial_rope(c)
    attention = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.heads,
        head_dim=c.head_dim,
        rope=rope.rope,
        bias=(c.flag("attention_bias"), False),
        causal=False,
        sources=("qkv", "qkv", "qkv", "proj"),
        name="attn",
    )
    mlp = MLP(hidden=c.hidden, intermediate_size=c.whole("out_hidden_size"), act=c.activation())
    return Tower(
        root="visual",
        patches=Patches(
            source="patch_embed.proj",
            hidden=c.hidden,
            size=side_of(c, "patch_size"),
            channels=c.whole("in_channels"),
            frames=side_of(c, "temporal_patch_size"),
            flat=True,
            dimensions=3,
            norm=named(norm, "post_conv_layernorm"),
        ),
        positions=PatchPositions(name="embeddings.position_embedding.weight", side=patches_per_side(c), fit="bicubic"),
        blocks=(pre_norm_block(attention, mlp, norm, ("norm1", "norm2")),) * c.layers,
        layers="blocks",
        taken=(c.layers,),
        norm=named(norm, "post_layernorm"),
        rope=rope,
        side=c.whole("spatial_merge_size"),
    )


def _ocr_tower(c: Config) -> Tower:
    tower, has_bias = _tower(c), c.flag("attention_bias")
    ((attention, mlp), *_) = tower.blocks
    assert isinstance(attention.body, Attention) and isinstance(mlp.body, MLP), "blocks are attention and an MLP"
    assert isinstance(tower.patches, Patches), "the tower reads images"
    norm = RMSNorm(size=c.head_dim, eps=c.number("rms_norm_eps"))
    block = (
        replace(attention, body=replace(attention.body, bias=(has_bias, has_bias), qk_norm=norm)),
        replace(mlp, body=replace(mlp.body, intermediate_size=c.intermediate_size, bias=has_bias)),
    )
    return replace(tower, patches=replace(tower.patches, norm=None), positions=None, blocks=(block,) * c.layers)


def _merger_size(c: Config, architecture: str) -> int:
    """Return the intermediate size of the projector's MLP."""
    return c.whole("out_hidden_size") * c.whole("in_channels") if architecture == _OCR else c.intermediate_size


def _projector(c: Config, hidden: int, side: int, size: int) -> Projector:
    gated = MLP(hidden=hidden, intermediate_size=size, act=c.activation(), name="merger")
    stored = StoredTensor(name="downsample.weight", shape=(hidden, c.hidden, side, side))
    return Projector(
        steps=(
            Merge(side=side, by_channel=True),
            Project(linear=whole("downsample", c.hidden * side**2, hidden)),
            Project(linear=whole("merger.proj", hidden, hidden, bias=False)),
            LayerNorm(size=hidden, eps=1e-5, name="merger.post_projection_norm"),
            Activate(act="gelu"),
            gated,
        ),
        renamed=(("downsample.weight", stored),),
    )
