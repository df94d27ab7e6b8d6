"""Phi-3 and Phi-4-mini: Llama blocks with fused q, k, v and fused gate, up tensors; longrope; partial rotation.

Source: transformers modeling_phi3.py.
"""

from collections.abc import Mapping
from typing import Any

from engine.models.config import Config
from engine.models.parts import MLP, Attention, Embedding, Head, Model, ResidualBlock, RMSNorm, named
from engine.models.rope import claimed_context, rope

ARCHITECTURES = ("Phi3ForCausalLM",)

_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}


def declare(config: Mapping[str, Any]) -> Model:
    c = Config.of(config, **_DEFAULTS)
    positions = rope(c)
    attention = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        rope=positions,
        window=c.window(),
        sources=("qkv_proj", "qkv_proj", "qkv_proj", "o_proj"),
    )
    mlp = MLP(
        hidden=c.hidden,
        intermediate_size=c.intermediate_size,
        act=c.activation(),
        gate="gate_up_proj",
        up="gate_up_proj",
    )
    norm = RMSNorm(size=c.hidden, eps=c.number("rms_norm_eps"))
    block = (
        ResidualBlock(before=named(norm, "input_layernorm"), body=attention),
        ResidualBlock(before=named(norm, "post_attention_layernorm"), body=mlp),
    )
    return Model(
        embed=Embedding(vocab=c.whole("vocab_size"), hidden=c.hidden),
        blocks=(block,) * c.layers,
        norm=named(norm, "norm"),
        head=Head(tied=c.flag("tie_word_embeddings")),
        max_context=claimed_context(c, positions),
    )
