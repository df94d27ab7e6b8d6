"""BLIP-2 with a decoder (OPT): a tower with a class token, and a Q-Former.

Source: transformers modeling_blip_2.py; arXiv:2301.12597. The Q-Former of InstructBLIP also reads the text, so its
embeddings of an image depend on the prompt; it is refused.
"""

from collections.abc import Mapping
from typing import Any

from engine.api.errors import CheckpointError
from engine.models.config import Config
from engine.models.llava import whole
from engine.models.media import Media, PatchPositions, Project, Projector, QFormer, Tower
from engine.models.parts import Attention, LayerNorm, named
from engine.models.towers import patches_of, patches_per_side, plain_mlp, pre_norm_block, vision_config

ARCHITECTURES = ("Blip2ForConditionalGeneration",)

_VISION: dict[str, Any] = {
    **{"hidden_size": 1408, "intermediate_size": 6144, "num_hidden_layers": 39, "num_attention_heads": 16},
    **{"num_channels": 3, "image_size": 224, "patch_size": 14, "hidden_act": "gelu", "layer_norm_eps": 1e-6},
    "qkv_bias": True,
}
_QFORMER: dict[str, Any] = {
    **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
    **{"hidden_act": "gelu", "layer_norm_eps": 1e-12, "cross_attention_frequency": 2},
}


def declare(config: Mapping[str, Any], hidden: int) -> Media:
    """hidden: width of the text model."""
    c, eyes = Config.of(config, num_query_tokens=32), vision_config(config, **_VISION)
    inner = config.get("qformer_config")
    q = Config.of(inner if isinstance(inner, dict) else {}, **_QFORMER)
    if q.flag("use_qformer_text_input"):
        raise CheckpointError("config.json: use_qformer_text_input of qformer_config is true; supported is false")
    text = config.get("text_config")
    if isinstance(text, dict) and text.get("word_embed_proj_dim", hidden) != hidden:
        raise CheckpointError("config.json: word_embed_proj_dim of text_config must equal hidden_size with images")
    tower = _tower(eyes)
    former = QFormer(
        hidden=q.hidden,
        inputs=eyes.hidden,
        layers=q.layers,
        heads=q.heads,
        intermediate_size=q.intermediate_size,
        act=q.activation(),
        eps=q.number("layer_norm_eps"),
        every=q.whole("cross_attention_frequency"),
        queries=c.whole("num_query_tokens"),
        rows=patches_per_side(eyes) ** 2 + 1,
    )
    if q.hidden % q.heads:
        raise CheckpointError(
            f"config.json: hidden_size of qformer_config is {q.hidden}; it must be a multiple of num_attention_heads, "
            f"{q.heads}"
        )
    project = Project(linear=whole("language_projection", q.hidden, hidden))
    token = config.get("image_token_index", config.get("image_token_id"))
    return Media(
        tower=tower,
        projectors=(Projector(steps=(former, project)),),
        hidden=hidden,
        token=token if isinstance(token, int) else 0,
    )


def _tower(c: Config) -> Tower:
    attention = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.heads,
        head_dim=c.head_dim,
        rope=None,
        bias=(c.flag("qkv_bias"), True),
        causal=False,
        sources=("qkv", "qkv", "qkv", "projection"),
    )
    norm, side = LayerNorm(size=c.hidden, eps=c.number("layer_norm_eps")), patches_per_side(c)
    table, rows = "embeddings.position_embedding", side**2 + 1
    block = pre_norm_block(attention, plain_mlp(c, ("fc1", "fc2")), norm, ("layer_norm1", "layer_norm2"))
    return Tower(
        root="vision_model",
        patches=patches_of(c, "embeddings.patch_embedding"),
        positions=PatchPositions(name=table, side=side, class_row=True, stored=(1, rows, c.hidden)),
        class_token="embeddings.class_embedding",
        class_shape=(1, 1, c.hidden),
        keeps_class=True,
        blocks=(block,) * c.layers,
        taken=(c.layers,),
        layers="encoder.layers",
        norm=named(norm, "post_layernorm"),
    )
