"""Ministral: Mistral with sliding windows in some layers.

Source: transformers modeling_ministral.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.models.config import Config
from engine.models.decoder import llama_decoder
from engine.models.parts import MLP, Attention, Model, RMSNorm
from engine.models.rope import rope

ARCHITECTURES = ("MinistralForCausalLM",)

_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "max_position_embeddings": 131_072,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
}


def declare(config: Mapping[str, Any]) -> Model:
    c = Config.of(config, **_DEFAULTS)
    positions = rope(c)
    attention = Attention(hidden=c.hidden, heads=c.heads, kv_heads=c.kv_heads, head_dim=c.head_dim, rope=positions)
    usual = "full_attention" if c.whole_or_none("sliding_window") is None else "sliding_attention"
    kinds = c.layer_types((usual,) * c.layers)
    layers = [replace(attention, window=c.window() if kind == "sliding_attention" else None) for kind in kinds]
    mlp = MLP(hidden=c.hidden, intermediate_size=c.intermediate_size, act=c.activation())
    return llama_decoder(c, layers, mlp, RMSNorm(size=c.hidden, eps=c.number("rms_norm_eps")), positions=positions)
