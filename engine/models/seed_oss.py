"""Seed-OSS: Llama blocks with biases of q, k, v.

Source: transformers modeling_seed_oss.py.
"""

from collections.abc import Mapping
from typing import Any

from engine.models.config import Config
from engine.models.decoder import llama_decoder
from engine.models.parts import MLP, Attention, Model, RMSNorm
from engine.models.rope import rope

ARCHITECTURES = ("SeedOssForCausalLM",)

_DEFAULTS: dict[str, Any] = {
    "attention_bias": True,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 524_288,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
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
        bias=(c.flag("attention_bias"), c.flag("attention_out_bias")),
    )
    mlp = MLP(hidden=c.hidden, intermediate_size=c.intermediate_size, act=c.activation(), bias=c.flag("mlp_bias"))
    return llama_decoder(c, attention, mlp, RMSNorm(size=c.hidden, eps=c.number("rms_norm_eps")), positions=positions)
