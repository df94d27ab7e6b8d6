"""Command R: parallel attention and MLP after one layer norm (without bias); interleaved RoPE; scaled logits.

Source: transformers modeling_cohere.py. Command R+ also normalises q and k, with separate weights for each head.
"""

from collections.abc import Mapping
from typing import Any

from engine.models.config import Config
from engine.models.parts import MLP, Attention, Embedding, Head, LayerNorm, Model, Parallel, ResidualBlock, named
from engine.models.rope import claimed_context, rope

ARCHITECTURES = ("CohereForCausalLM",)

_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


def declare(config: Mapping[str, Any]) -> Model:
    c = Config.of(config, **_DEFAULTS)
    eps, positions = c.number("layer_norm_eps"), rope(c, theta=500_000.0, interleaved=True)
    attention = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        rope=positions,
        bias=(c.flag("attention_bias"), c.flag("attention_bias")),
        qk_norm=LayerNorm(size=c.head_dim, eps=eps, bias=False) if c.flag("use_qk_norm") else None,
        qk_norm_span="own",
    )
    both = Parallel(bodies=(attention, MLP(hidden=c.hidden, intermediate_size=c.intermediate_size, act=c.activation())))
    norm = LayerNorm(size=c.hidden, eps=eps, bias=False)
    block = (ResidualBlock(before=named(norm, "input_layernorm"), body=both),)
    return Model(
        embed=Embedding(vocab=c.whole("vocab_size"), hidden=c.hidden),
        blocks=(block,) * c.layers,
        norm=named(norm, "norm"),
        head=Head(tied=c.flag("tie_word_embeddings"), scale=c.number("logit_scale")),
        max_context=claimed_context(c, positions),
    )
