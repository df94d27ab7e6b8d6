"""Qwen3: Llama blocks with a separate head size, and q and k normalised per head.

Source: transformers modeling_qwen3.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.models.config import Config
from engine.models.llama import layer_windows
from engine.models.parts import MLP, Attention, Block, Embedding, Head, Model, ResidualBlock, RMSNorm, named
from engine.models.rope import claimed_context, rope

ARCHITECTURES = ("Qwen3ForCausalLM",)

_DEFAULTS: dict[str, Any] = {
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "num_key_value_heads": 32,
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
    )
    mlp = MLP(hidden=c.hidden, intermediate_size=c.intermediate_size, act=c.activation())
    norm = RMSNorm(size=c.hidden, eps=eps)

    def block(window: int | None) -> Block:
        return (
            ResidualBlock(before=named(norm, "input_layernorm"), body=replace(attention, window=window)),
            ResidualBlock(before=named(norm, "post_attention_layernorm"), body=mlp),
        )

    return Model(
        embed=Embedding(vocab=c.whole("vocab_size"), hidden=c.hidden),
        blocks=tuple(block(window) for window in layer_windows(c)),
        norm=named(norm, "norm"),
        head=Head(tied=c.flag("tie_word_embeddings")),
        max_context=claimed_context(c, positions),
    )
