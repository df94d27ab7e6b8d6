"""Persimmon: layer norms of queries and keys, partial rotation, squared ReLU; q, k, v in one tensor, by head.

Source: transformers modeling_persimmon.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.models.config import Config
from engine.models.decoder import llama_decoder
from engine.models.parts import MLP, Attention, LayerNorm, Model, named
from engine.models.rope import rope

ARCHITECTURES = ("PersimmonForCausalLM",)

_DEFAULTS: dict[str, Any] = {
    "hidden_act": "relu2",
    "layer_norm_eps": 1e-5,
    "max_position_embeddings": 16_384,
    "qk_layernorm": True,
}


def declare(config: Mapping[str, Any]) -> Model:
    c = Config.of(config, **_DEFAULTS)
    eps, positions, fused = c.number("layer_norm_eps"), rope(c, partial=0.5), "query_key_value"
    attention = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.heads,
        head_dim=c.head_dim,
        rope=positions,
        bias=(True, True),
        sources=(fused, fused, fused, "dense"),
        groups=c.heads,
        qk_norm=LayerNorm(size=c.head_dim, eps=eps) if c.flag("qk_layernorm") else None,
        qk_norm_names=("q_layernorm", "k_layernorm"),
    )
    mlp = MLP(
        hidden=c.hidden,
        intermediate_size=c.intermediate_size,
        act=c.activation(),
        bias=True,
        gate=None,
        up="dense_h_to_4h",
        down="dense_4h_to_h",
    )
    norm = LayerNorm(size=c.hidden, eps=eps)
    model = llama_decoder(c, attention, mlp, norm, positions=positions)
    return replace(model, norm=named(norm, "final_layernorm"))
