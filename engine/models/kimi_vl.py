"""Kimi-VL: MoonViT, a tower for images of any size with rotary and learned positions, and a projector of two layers.

Source: modeling_kimi_vl.py of moonshotai/Kimi-VL-A3B-Instruct; the tower is that of transformers
modeling_kimi_k25.py for single frames, with other names and with neighbours as rotated pairs.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.api.errors import CheckpointError
from engine.models.config import Config, shown
from engine.models.llava import whole
from engine.models.media import GridRope, Media, Merge, Patches, PatchPositions, Project, Projector, Tower
from engine.models.parts import Attention, LayerNorm, named
from engine.models.towers import axial_rope, plain_mlp, pre_norm_block, side_of, vision_config

ARCHITECTURES = ("KimiVLForConditionalGeneration",)

_VISION: dict[str, Any] = {
    **{"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16},
    **{"patch_size": 14, "hidden_act": "gelu_pytorch_tanh", "init_pos_emb_height": 64, "init_pos_emb_width": 64},
    **{"merge_kernel_size": (2, 2), "rope_theta": 10_000.0},
}
_EPS = 1e-5


def declare(config: Mapping[str, Any], hidden: int) -> Media:
    """hidden: width of the text model."""
    c = vision_config(config, **_VISION)
    side = side_of(c, "merge_kernel_size")
    wide = c.hidden * side**2
    projector = Projector(
        root="multi_modal_projector",
        steps=(
            LayerNorm(size=c.hidden, eps=_EPS, name="pre_norm"),
            Merge(side=side),
            Project(linear=whole("linear_1", wide, wide), act="gelu"),
            Project(linear=whole("linear_2", wide, hidden)),
        ),
    )
    token = Config.of(config, media_placeholder_token_id=163_605).whole("media_placeholder_token_id", least=0)
    return Media(tower=_tower(c), projectors=(projector,), hidden=hidden, token=token)


def _tower(c: Config) -> Tower:
    rope, norm, side = _rope(c), LayerNorm(size=c.hidden, eps=_EPS), c.whole("init_pos_emb_height")
    if c.whole("init_pos_emb_width") != side:
        raise CheckpointError(
            f"config.json: init_pos_emb_width is {shown(c.values['init_pos_emb_width'])}; it must be equal to "
            f"init_pos_emb_height, {side}"
        )
    attention = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.heads,
        head_dim=c.head_dim,
        rope=rope.rope,
        bias=(True, True),
        causal=False,
        sources=("wqkv", "wqkv", "wqkv", "wo"),
        name="",
    )
    return Tower(
        root="vision_tower",
        patches=Patches(source="patch_embed.proj", hidden=c.hidden, size=side_of(c, "patch_size"), flat=True),
        positions=PatchPositions(
            name="patch_embed.pos_emb.weight", side=side, fit="bicubic", stored=(side, side, c.hidden)
        ),
        blocks=(pre_norm_block(attention, plain_mlp(c, ("fc0", "fc1")), norm, ("norm0", "norm1")),) * c.layers,
        layers="encoder.blocks",
        taken=(c.layers,),
        norm=named(norm, "encoder.final_layernorm"),
        rope=rope,
    )


def _rope(c: Config) -> GridRope:
    """Return rotary positions whose pairs of neighbours rotate by the column and by the row in turn."""
    rope = axial_rope(c)
    half = len(rope.exponents) // 2
    return replace(
        rope,
        rope=replace(rope.rope, interleaved=True),
        axes=(1, 0) * half,
        exponents=tuple(one for one in rope.exponents[:half] for _ in (0, 1)),
    )
