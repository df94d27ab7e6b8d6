"""OPT: learned positions whose table begins with two unused rows; layer norms before each body, or after it (350M).

Source: transformers modeling_opt.py. The embedding may have another width than the layers (also 350M).
"""

from collections.abc import Mapping
from typing import Any

from engine.models.config import Config
from engine.models.parts import MLP, Attention, Embedding, Head, LayerNorm, Lookup, Model, ResidualBlock, named

ARCHITECTURES = ("OPTForCausalLM",)

_NAMES = {"hidden_act": "activation_function", "intermediate_size": "ffn_dim"}
_DEFAULTS: dict[str, Any] = {
    "do_layer_norm_before": True,
    "enable_bias": True,
    "hidden_act": "relu",
    "layer_norm_elementwise_affine": True,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
_OFFSET = 2  # row of position 0


def declare(config: Mapping[str, Any]) -> Model:
    c = Config.of(config, _NAMES, **_DEFAULTS)
    width, longest = c.whole_or_none("word_embed_proj_dim"), c.whole("max_position_embeddings")
    bias, affine, first = c.flag("enable_bias"), c.flag("layer_norm_elementwise_affine"), c.flag("do_layer_norm_before")
    attention = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.heads,
        head_dim=c.head_dim,
        rope=None,
        bias=(bias, bias),
        sources=("q_proj", "k_proj", "v_proj", "out_proj"),
    )
    mlp = MLP(
        hidden=c.hidden,
        intermediate_size=c.intermediate_size,
        act=c.activation(),
        bias=bias,
        gate=None,
        up="fc1",
        down="fc2",
        name="",
    )
    norm = LayerNorm(size=c.hidden, eps=1e-5, weight=affine, bias=affine)
    placed = tuple(
        ResidualBlock(body=body, before=named(norm, name) if first else None, last=None if first else named(norm, name))
        for body, name in ((attention, "self_attn_layer_norm"), (mlp, "final_layer_norm"))
    )
    has_final_norm = first and not c.flag("_remove_final_layer_norm")
    return Model(
        embed=Embedding(
            vocab=c.whole("vocab_size"),
            hidden=c.hidden,
            width=None if width == c.hidden else width,
            positions=Lookup(count=longest + _OFFSET, name="embed_positions", offset=_OFFSET),
        ),
        blocks=(placed,) * c.layers,
        norm=named(norm, "final_layer_norm") if has_final_norm else None,
        head=Head(tied=c.flag("tie_word_embeddings")),
        max_context=longest,
        root="model.decoder",
    )
