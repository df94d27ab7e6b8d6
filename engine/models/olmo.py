"""OLMo 1: Llama blocks with layer norms without weights.

Source: transformers modeling_olmo.py; arXiv:2402.00838.
"""

from collections.abc import Mapping
from typing import Any

from engine.api.errors import CheckpointError
from engine.models.config import Config
from engine.models.decoder import llama_decoder
from engine.models.parts import MLP, Attention, LayerNorm, Model
from engine.models.rope import rope

ARCHITECTURES = ("OlmoForCausalLM",)

_DEFAULTS: dict[str, Any] = {"hidden_act": "silu", "max_position_embeddings": 2048}


def declare(config: Mapping[str, Any]) -> Model:
    c = Config.of(config, **_DEFAULTS)
    if c.number_or_none("clip_qkv") is not None:
        raise CheckpointError("config.json: clip_qkv is set: clipping of queries, keys and values is not supported")
    positions, bias = rope(c), c.flag("attention_bias")
    attention = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        rope=positions,
        bias=(bias, bias),
    )
    mlp = MLP(hidden=c.hidden, intermediate_size=c.intermediate_size, act=c.activation())
    norm = LayerNorm(size=c.hidden, eps=1e-5, weight=False, bias=False)
    return llama_decoder(c, attention, mlp, norm, positions=positions)
