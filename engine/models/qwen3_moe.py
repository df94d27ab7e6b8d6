"""Qwen3-MoE: Qwen3's attention, and experts instead of the MLP in all or some layers.

Source: transformers modeling_qwen3_moe.py.
"""

from collections.abc import Mapping
from typing import Any

from engine.models.config import Config
from engine.models.parts import MLP, Attention, Block, Embedding, Experts, Head, Model, ResidualBlock, RMSNorm, named
from engine.models.rope import claimed_context, rope

ARCHITECTURES = ("Qwen3MoeForCausalLM",)

_DEFAULTS: dict[str, Any] = {
    "decoder_sparse_step": 1,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
}


def declare(config: Mapping[str, Any]) -> Model:
    c = Config.of(config, **_DEFAULTS)
    eps, positions = c.number("rms_norm_eps"), rope(c)
    attention = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        rope=positions,
        bias=(c.flag("attention_bias"), c.flag("attention_bias")),
        qk_norm=RMSNorm(size=c.head_dim, eps=eps),
        window=c.window() if c.flag("use_sliding_window") else None,
    )
    num_experts, top_k = c.experts()
    experts = Experts(
        hidden=c.hidden,
        intermediate_size=c.whole("moe_intermediate_size"),
        num_experts=num_experts,
        top_k=top_k,
        scores="softmax_chosen" if c.flag("norm_topk_prob") else "softmax",
        act=c.activation(),
    )
    mlp = MLP(hidden=c.hidden, intermediate_size=c.intermediate_size, act=c.activation())
    norm = RMSNorm(size=c.hidden, eps=eps)

    def block(sparse: bool) -> Block:
        return (
            ResidualBlock(before=named(norm, "input_layernorm"), body=attention),
            ResidualBlock(before=named(norm, "post_attention_layernorm"), body=experts if sparse else mlp),
        )

    return Model(
        embed=Embedding(vocab=c.whole("vocab_size"), hidden=c.hidden),
        blocks=tuple(block(sparse) for sparse in c.sparse_layers()),
        norm=named(norm, "norm"),
        head=Head(tied=c.flag("tie_word_embeddings")),
        max_context=claimed_context(c, positions),
    )
