"""Granite 3: Llama blocks with four constant multipliers: embedding, attention, residual, logits.

Source: transformers modeling_granite.py.
"""

from collections.abc import Mapping
from typing import Any

from engine.models.config import Config
from engine.models.parts import MLP, Attention, Embedding, Head, Model, ResidualBlock, RMSNorm, named
from engine.models.rope import claimed_context, rope

ARCHITECTURES = ("GraniteForCausalLM",)

_DEFAULTS: dict[str, Any] = {
    "attention_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "hidden_act": "silu",
    "logits_scaling": 1.0,
    "max_position_embeddings": 2048,
    "residual_multiplier": 1.0,
    "rms_norm_eps": 1e-6,
}


def declare(config: Mapping[str, Any]) -> Model:
    c = Config.of(config, **_DEFAULTS)
    residual, positions = c.number("residual_multiplier"), rope(c)
    attention = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        rope=positions,
        scale=c.number("attention_multiplier"),
        bias=(c.flag("attention_bias"), c.flag("attention_bias")),
    )
    mlp = MLP(hidden=c.hidden, intermediate_size=c.intermediate_size, act=c.activation(), bias=c.flag("mlp_bias"))
    norm = RMSNorm(size=c.hidden, eps=c.number("rms_norm_eps"))
    block = (
        ResidualBlock(before=named(norm, "input_layernorm"), body=attention, scale=residual),
        ResidualBlock(before=named(norm, "post_attention_layernorm"), body=mlp, scale=residual),
    )
    return Model(
        embed=Embedding(vocab=c.whole("vocab_size"), hidden=c.hidden, scale=c.number("embedding_multiplier")),
        blocks=(block,) * c.layers,
        norm=named(norm, "norm"),
        head=Head(tied=c.flag("tie_word_embeddings"), scale=1.0 / c.positive("logits_scaling")),
        max_context=claimed_context(c, positions),
    )
