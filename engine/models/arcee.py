"""Arcee (AFM): Llama blocks with an MLP without gate (squared ReLU).

Source: transformers modeling_arcee.py.
"""

from collections.abc import Mapping
from typing import Any

from engine.models.config import Config
from engine.models.decoder import llama_decoder
from engine.models.parts import MLP, Attention, Model, RMSNorm
from engine.models.rope import rope

ARCHITECTURES = ("ArceeForCausalLM",)

_DEFAULTS: dict[str, Any] = {"hidden_act": "relu2", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5}


def declare(config: Mapping[str, Any]) -> Model:
    c = Config.of(config, **_DEFAULTS)
    positions, bias = rope(c), c.flag("attention_bias")
    attention = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        rope=positions,
        bias=(bias, bias),
    )
    mlp = MLP(
        hidden=c.hidden,
        intermediate_size=c.intermediate_size,
        act=c.activation(),
        bias=c.flag("mlp_bias"),
        gate=None,
    )
    return llama_decoder(c, attention, mlp, RMSNorm(size=c.hidden, eps=c.number("rms_norm_eps")), positions=positions)
