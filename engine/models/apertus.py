"""Apertus: Llama blocks with QK norms and an MLP without gate, whose activation xIELU has learned numbers.

Source: transformers modeling_apertus.py; arXiv:2411.13010.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.models.config import Config
from engine.models.decoder import llama_decoder
from engine.models.parts import MLP, XIELU, Attention, Model, ResidualBlock, RMSNorm, named
from engine.models.rope import rope

ARCHITECTURES = ("ApertusForCausalLM",)

_LLAMA3 = {"rope_type": "llama3", "rope_theta": 12e6, "factor": 8.0, "original_max_position_embeddings": 8192,
           "low_freq_factor": 1.0, "high_freq_factor": 4.0}  # fmt: skip
_DEFAULTS: dict[str, Any] = {"hidden_act": "xielu", "max_position_embeddings": 65_536, "rms_norm_eps": 1e-5}


def declare(config: Mapping[str, Any]) -> Model:
    c = Config.of(config, **_DEFAULTS)
    if not any(c.values.get(key) for key in ("rope_parameters", "rope_scaling", "rope_theta")):
        c = replace(c, values={**c.values, "rope_parameters": _LLAMA3})
    positions, bias = rope(c, theta=12e6), c.flag("attention_bias")
    norm = RMSNorm(size=c.hidden, eps=c.number("rms_norm_eps"))
    attention = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        rope=positions,
        bias=(bias, bias),
        qk_norm=RMSNorm(size=c.head_dim, eps=norm.eps),
    )
    act = XIELU if c.values["hidden_act"] == XIELU else c.activation()
    mlp = MLP(hidden=c.hidden, intermediate_size=c.intermediate_size, act=act, gate=None)
    model = llama_decoder(c, attention, mlp, norm, positions=positions)
    block = (
        ResidualBlock(before=named(norm, "attention_layernorm"), body=attention),
        ResidualBlock(before=named(norm, "feedforward_layernorm"), body=mlp),
    )
    return replace(model, blocks=(block,) * c.layers)
