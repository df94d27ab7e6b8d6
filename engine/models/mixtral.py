"""Mixtral: Llama blocks with routed experts (top 2), weighted by the softmax over the selected ones.

Source: transformers modeling_mixtral.py; arXiv:2401.04088.
"""

from collections.abc import Mapping
from typing import Any

from engine.models.config import Config
from engine.models.parts import Attention, Embedding, Experts, Head, Model, ResidualBlock, RMSNorm, named
from engine.models.rope import claimed_context, rope

ARCHITECTURES = ("MixtralForCausalLM",)

_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "num_experts_per_tok": 2,
    "num_experts": 8,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
}


def declare(config: Mapping[str, Any]) -> Model:
    c = Config.of(config, **_DEFAULTS)
    positions = rope(c, theta=1e6)
    attention = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        rope=positions,
        window=c.window(),
    )
    num_experts, top_k = c.experts()
    experts = Experts(
        hidden=c.hidden,
        intermediate_size=c.intermediate_size,
        num_experts=num_experts,
        top_k=top_k,
        scores="softmax_chosen",
        act=c.activation(),
        gate="w1",
        up="w3",
        down="w2",
        name="block_sparse_moe",
    )
    norm = RMSNorm(size=c.hidden, eps=c.number("rms_norm_eps"))
    block = (
        ResidualBlock(before=named(norm, "input_layernorm"), body=attention),
        ResidualBlock(before=named(norm, "post_attention_layernorm"), body=experts),
    )
    return Model(
        embed=Embedding(vocab=c.whole("vocab_size"), hidden=c.hidden),
        blocks=(block,) * c.layers,
        norm=named(norm, "norm"),
        head=Head(tied=c.flag("tie_word_embeddings")),
        max_context=claimed_context(c, positions),
    )
