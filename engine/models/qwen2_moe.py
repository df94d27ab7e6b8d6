"""Qwen2-MoE: Qwen2's attention, and routed experts plus a shared expert with a gate.

Source: transformers modeling_qwen2_moe.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.models.config import Config
from engine.models.parts import MLP, Attention, Block, Embedding, Experts, Head, Model, ResidualBlock, RMSNorm, named
from engine.models.rope import claimed_context, rope

ARCHITECTURES = ("Qwen2MoeForCausalLM",)

_DEFAULTS: dict[str, Any] = {
    "decoder_sparse_step": 1,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "moe_intermediate_size": 1408,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 16,
    "qkv_bias": True,
    "rms_norm_eps": 1e-6,
    "shared_expert_intermediate_size": 5632,
    "sliding_window": 4096,
}


def declare(config: Mapping[str, Any]) -> Model:
    c = Config.of(config, **_DEFAULTS)
    positions, act = rope(c), c.activation()
    attention = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        rope=positions,
        bias=(c.flag("qkv_bias"), False),
    )
    num_experts, top_k = c.experts()
    experts = Experts(
        hidden=c.hidden,
        intermediate_size=c.whole("moe_intermediate_size"),
        num_experts=num_experts,
        top_k=top_k,
        scores="softmax_chosen" if c.flag("norm_topk_prob") else "softmax",
        act=act,
        shared=MLP(
            hidden=c.hidden, intermediate_size=c.whole("shared_expert_intermediate_size"), act=act, name="shared_expert"
        ),
        shared_gate="shared_expert_gate",
    )
    mlp = MLP(hidden=c.hidden, intermediate_size=c.intermediate_size, act=act)
    norm = RMSNorm(size=c.hidden, eps=c.number("rms_norm_eps"))

    def block(window: int | None, sparse: bool) -> Block:
        return (
            ResidualBlock(before=named(norm, "input_layernorm"), body=replace(attention, window=window)),
            ResidualBlock(before=named(norm, "post_attention_layernorm"), body=experts if sparse else mlp),
        )

    return Model(
        embed=Embedding(vocab=c.whole("vocab_size"), hidden=c.hidden),
        blocks=tuple(map(block, _windows(c), c.sparse_layers())),
        norm=named(norm, "norm"),
        head=Head(tied=c.flag("tie_word_embeddings")),
        max_context=claimed_context(c, positions),
    )


def _windows(c: Config) -> tuple[int | None, ...]:
    """Return the window of each layer: with use_sliding_window, every other layer below max_window_layers has one."""
    if not c.flag("use_sliding_window"):
        return (None,) * c.layers
    last = c.whole("max_window_layers", least=0)
    usual = tuple("sliding_attention" if i % 2 == 0 and i < last else "full_attention" for i in range(c.layers))
    return tuple(c.window() if kind == "sliding_attention" else None for kind in c.layer_types(usual))
