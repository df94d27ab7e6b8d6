"""Nemotron and Minitron: layer norms that store w - 1, an MLP without gate (squared ReLU), partial rotation.

Source: transformers modeling_nemotron.py.
"""

from collections.abc import Mapping
from typing import Any

from engine.models.config import Config
from engine.models.decoder import llama_decoder
from engine.models.parts import MLP, Attention, LayerNorm, Model
from engine.models.rope import rope

ARCHITECTURES = ("NemotronForCausalLM",)

_NAMES = {"partial_rotary_factor": "rope_percent"}
_DEFAULTS: dict[str, Any] = {"hidden_act": "relu2", "max_position_embeddings": 4096, "norm_eps": 1e-5}


def declare(config: Mapping[str, Any]) -> Model:
    c = Config.of(config, _NAMES if "partial_rotary_factor" not in config else {}, **_DEFAULTS)
    positions, bias = rope(c, partial=0.5), c.flag("attention_bias")
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
    norm = LayerNorm(size=c.hidden, eps=c.number("norm_eps"), offset=1.0)
    return llama_decoder(c, attention, mlp, norm, positions=positions)
