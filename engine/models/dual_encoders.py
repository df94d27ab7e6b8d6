"""CLIP, SigLIP and SigLIP 2: a text encoder and an image encoder, whose vectors are compared.

CLIP's text encoder is causal, and its vector is that of the last token. SigLIP's is bidirectional; it reads padded
texts, and its vector is that of the last position. The vector of an image is CLIP's class token, or the output of
SigLIP's pooling head. Source: transformers modeling_clip.py, modeling_siglip.py, modeling_siglip2.py.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.api.errors import CheckpointError
from engine.models.config import Config
from engine.models.labels import dense
from engine.models.llava import whole
from engine.models.media import AttentionPool, ClassRow, Media, PatchPositions, Project, Projector
from engine.models.parts import Embedding, LayerNorm, Lookup, Model, Pooler, named
from engine.models.towers import (
    SIGLIP,
    clip_tower,
    encoder_block,
    patches_of,
    patches_per_side,
    plain_mlp,
    siglip_tower,
    vision_config,
)

ARCHITECTURES = ("CLIPModel", "SiglipModel", "Siglip2Model")
UNREAD = ("logit_scale", "logit_bias", "embeddings.position_ids")
_TEXT: dict[str, Any] = {
    **{"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 8},
    **{"vocab_size": 49_408, "max_position_embeddings": 77, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
    "projection_dim": 512,
}
_SIGLIP_TEXT: dict[str, Any] = {
    **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
    **{"vocab_size": 32_000, "max_position_embeddings": 64, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6},
    "pad_token_id": 1,
}


def outer_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of config.json that its text_config does not replace."""
    return {"projection_dim": config.get("projection_dim", _TEXT["projection_dim"])}


def declare(config: Mapping[str, Any]) -> Model:
    return _clip(config) if config["architectures"][0] == "CLIPModel" else _siglip(config)


def _clip(config: Mapping[str, Any]) -> Model:
    c = Config.of(config, **_TEXT)
    width, eyes = c.whole("projection_dim"), vision_config(config)
    tower = replace(clip_tower(config, (-1,)), root="vision_model", keeps_class=True)
    norm = LayerNorm(size=tower.hidden, eps=_eps(eyes, 1e-5), name="vision_model.post_layernorm")
    assert tower.positions is not None, "CLIP has a table of positions"
    steps = (
        ClassRow(rows=tower.positions.rows),
        norm,
        Project(linear=whole("visual_projection", tower.hidden, width, False)),
    )
    media = Media(tower=tower, projectors=(Projector(steps=steps),), hidden=width, token=0, is_vector=True)
    head = dense("", "text_projection", c.hidden, width, bias=False)
    pooler = Pooler(task="embed", width=width, pool="last", stages=(head,), activation="normalize")
    return _text_model(c, pooler, media, causal=True)


def _siglip(config: Mapping[str, Any]) -> Model:
    c, is_packed = Config.of(config, **_SIGLIP_TEXT), config["architectures"][0] == "Siglip2Model"
    eyes = vision_config(config, **SIGLIP, num_patches=256)
    if eyes.values.get("vision_use_head", True) is not True:
        raise CheckpointError("config.json: vision_use_head of vision_config is not true; images then have no vector")
    width = c.whole("projection_size") if c.values.get("projection_size") is not None else c.hidden
    if width != eyes.hidden:
        raise CheckpointError(
            f"config.json: projection_size of text_config is {width}; it must be hidden_size of vision_config, "
            f"{eyes.hidden}"
        )
    side = _packed_side(eyes) if is_packed else patches_per_side(eyes)
    size = {"image_size": side * eyes.whole("patch_size")} if is_packed else {}
    tower = siglip_tower({**config, "vision_config": {**_vision(config), **size}}, None)
    tower = replace(tower, root="vision_model", unread=())
    if is_packed:
        positions = PatchPositions(name="embeddings.position_embedding.weight", side=side, fit="bilinear")
        patches = patches_of(eyes, "embeddings.patch_embedding", flat=True, dimensions=0)
        tower = replace(tower, patches=patches, positions=positions)
    pool = AttentionPool(
        hidden=eyes.hidden,
        heads=eyes.heads,
        norm=LayerNorm(size=eyes.hidden, eps=eyes.number("layer_norm_eps"), name="layernorm"),
        mlp=plain_mlp(eyes, ("fc1", "fc2")),
        rows=side**2,
    )
    projector = Projector(steps=(pool,), root="vision_model")
    media = Media(tower=tower, projectors=(projector,), hidden=width, token=0, is_vector=True)
    pooler = Pooler(
        task="embed",
        width=width,
        pool="last",
        stages=(dense("text_model", "head", c.hidden, width),),
        activation="normalize",
        padding=c.whole("pad_token_id", least=0),
        canonical="lower" if is_packed else "words",
    )
    return _text_model(c, pooler, media, causal=False)


def _vision(config: Mapping[str, Any]) -> Mapping[str, Any]:
    found = config.get("vision_config")
    return found if isinstance(found, Mapping) else {}


def _packed_side(eyes: Config) -> int:
    """Return the side of the table of positions of images of any size."""
    count = eyes.whole("num_patches")
    side = math.isqrt(count)
    if side * side != count:
        raise CheckpointError(f"config.json: num_patches of vision_config is {count}; it must be a square number")
    return side


def _eps(eyes: Config, default: float) -> float:
    return eyes.number("layer_norm_eps") if "layer_norm_eps" in eyes.values else default


def _text_model(c: Config, pooler: Pooler, media: Media, *, causal: bool) -> Model:
    norm = LayerNorm(size=c.hidden, eps=c.number("layer_norm_eps"))
    longest = c.whole("max_position_embeddings")
    return Model(
        embed=Embedding(
            vocab=c.whole("vocab_size"),
            hidden=c.hidden,
            name="embeddings.token_embedding",
            positions=Lookup(count=longest, name="embeddings.position_embedding"),
        ),
        blocks=(encoder_block(c, causal=causal),) * c.layers,
        norm=named(norm, "final_layer_norm"),
        head=None,
        max_context=longest,
        root="text_model",
        layers="encoder.layers",
        pooler=pooler,
        unread=UNREAD,
        media=media,
    )
