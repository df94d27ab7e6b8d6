"""Code World Model: Llama blocks with windows in three of four layers.

Source: transformers modeling_cwm.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.models.config import Config
from engine.models.decoder import llama_decoder
from engine.models.parts import MLP, Attention, Model, RMSNorm
from engine.models.rope import rope

ARCHITECTURES = ("CwmForCausalLM",)

_DEFAULTS: dict[str, Any] = {
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131_072,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "sliding_window": 8192,
}


def declare(config: Mapping[str, Any]) -> Model:
    c = Config.of(config, **_DEFAULTS)
    positions = rope(c, theta=1e6)
    attention = Attention(hidden=c.hidden, heads=c.heads, kv_heads=c.kv_heads, head_dim=c.head_dim, rope=positions)
    kinds = {"full_attention": attention, "sliding_attention": replace(attention, window=c.window())}
    usual = tuple("sliding_attention" if index % 4 else "full_attention" for index in range(c.layers))
    mlp = MLP(hidden=c.hidden, intermediate_size=c.intermediate_size, act=c.activation(), bias=c.flag("mlp_bias"))
    norm = RMSNorm(size=c.hidden, eps=c.number("rms_norm_eps"))
    return llama_decoder(c, [kinds[kind] for kind in c.layer_types(usual)], mlp, norm, positions=positions)
