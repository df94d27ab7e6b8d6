"""GLM-4-0414: norms before and after each body, half of each head rotated (interleaved), gate and up in one tensor.
GLM-4 9B (2024): the same without norms after the bodies.

Source: transformers modeling_glm4.py, modeling_glm.py.
"""

from collections.abc import Mapping
from typing import Any

from engine.models.config import Config
from engine.models.decoder import llama_decoder
from engine.models.parts import MLP, Attention, Embedding, Head, Model, ResidualBlock, RMSNorm, named
from engine.models.rope import claimed_context, rope

ARCHITECTURES = ("Glm4ForCausalLM", "GlmForCausalLM")

_DEFAULTS: dict[str, Any] = {
    "attention_bias": True,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1.5625e-07,
}


def declare(config: Mapping[str, Any]) -> Model:
    c = Config.of(config, **_DEFAULTS)
    positions = rope(c, partial=0.5, interleaved=True)
    attention = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        rope=positions,
        bias=(c.flag("attention_bias"), False),
    )
    mlp = MLP(
        hidden=c.hidden,
        intermediate_size=c.intermediate_size,
        act=c.activation(),
        gate="gate_up_proj",
        up="gate_up_proj",
    )
    norm = RMSNorm(size=c.hidden, eps=c.number("rms_norm_eps"))
    if config["architectures"][0] == "GlmForCausalLM":
        return llama_decoder(c, attention, mlp, norm, positions=positions)
    block = (
        ResidualBlock(
            before=named(norm, "input_layernorm"), body=attention, after=named(norm, "post_self_attn_layernorm")
        ),
        ResidualBlock(
            before=named(norm, "post_attention_layernorm"), body=mlp, after=named(norm, "post_mlp_layernorm")
        ),
    )
    return Model(
        embed=Embedding(vocab=c.whole("vocab_size"), hidden=c.hidden),
        blocks=(block,) * c.layers,
        norm=named(norm, "norm"),
        head=Head(tied=c.flag("tie_word_embeddings")),
        max_context=claimed_context(c, positions),
    )
