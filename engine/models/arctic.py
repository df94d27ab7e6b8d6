"""Snowflake Arctic: attention and a small MLP in each layer, beside experts that read the input of the layer.

A layer computes y = x + attention(norm(x)) and y + mlp(norm(y)) + experts(norm(x)). Layers without experts, and models
without `use_residual`, have Llama's order instead. Source: modeling_arctic.py of the checkpoint
Snowflake/snowflake-arctic-instruct.
"""

from collections.abc import Mapping
from typing import Any

from engine.models.config import Config
from engine.models.parts import MLP, Attention, Block, Embedding, Experts, Head, Model, ResidualBlock, RMSNorm, named
from engine.models.rope import claimed_context, rope

ARCHITECTURES = ("ArcticForCausalLM",)

_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "moe_layer_frequency": 2,
    "num_experts": 8,
    "num_experts_per_tok": 1,
    "rms_norm_eps": 1e-5,
}
_NAMES: dict[str, Any] = {"gate": "w1", "up": "w3", "down": "w2"}


def declare(config: Mapping[str, Any]) -> Model:
    c = Config.of(config, **_DEFAULTS)
    positions = rope(c, theta=1e6)
    attention = Attention(hidden=c.hidden, heads=c.heads, kv_heads=c.kv_heads, head_dim=c.head_dim, rope=positions)
    norm = RMSNorm(size=c.hidden, eps=c.number("rms_norm_eps"))
    num_experts, top_k = c.experts()
    experts = Experts(
        hidden=c.hidden,
        intermediate_size=c.intermediate_size,
        num_experts=num_experts,
        top_k=top_k,
        scores="softmax_chosen" if top_k > 1 else "softmax",
        act=c.activation(),
        name="block_sparse_moe",
        **_NAMES,
    )
    mlp = MLP(
        hidden=c.hidden,
        intermediate_size=c.intermediate_size,
        act=c.activation(),
        name="block_sparse_moe.mlp",
        **_NAMES,
    )
    small = MLP(hidden=c.hidden, intermediate_size=c.hidden, act=c.activation(), name="residual_mlp", **_NAMES)
    before, after = named(norm, "input_layernorm"), named(norm, "post_attention_layernorm")
    every, residual = c.whole("moe_layer_frequency"), c.flag("use_residual")

    def block(index: int) -> Block:
        has_experts = (index + 1) % every == 0
        if has_experts and residual:
            return (
                ResidualBlock(before=before, body=attention, shortcut=experts, shortcut_norm=after),
                ResidualBlock(before=named(norm, "residual_layernorm"), body=small),
            )
        feed = experts if has_experts else mlp
        return ResidualBlock(before=before, body=attention), ResidualBlock(before=after, body=feed)

    return Model(
        embed=Embedding(vocab=c.whole("vocab_size"), hidden=c.hidden),
        blocks=tuple(map(block, range(c.layers))),
        norm=named(norm, "norm"),
        head=Head(tied=c.flag("tie_word_embeddings")),
        max_context=claimed_context(c, positions),
    )
