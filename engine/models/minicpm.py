"""MiniCPM: Llama blocks with multipliers of embeddings, residuals and logits.

Source: modeling_minicpm.py of the checkpoints openbmb/MiniCPM-2B-sft-bf16 and MiniCPM4-8B.
"""

from collections.abc import Mapping
from typing import Any

from engine.api.errors import CheckpointError
from engine.models.config import Config
from engine.models.decoder import llama_decoder
from engine.models.parts import MLP, Attention, Model, RMSNorm
from engine.models.rope import rope

ARCHITECTURES = ("MiniCPMForCausalLM",)

_DEFAULTS: dict[str, Any] = {
    "dim_model_base": 1,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "scale_depth": 1,
    "scale_emb": 1,
    "tie_word_embeddings": True,
}


def declare(config: Mapping[str, Any]) -> Model:
    c = Config.of(config, **_DEFAULTS)
    if c.values.get("sparse_config") is not None:
        raise CheckpointError("config.json: sparse_config is set: sparse attention is not supported; remove the key")
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
    return llama_decoder(
        c,
        attention,
        mlp,
        RMSNorm(size=c.hidden, eps=c.number("rms_norm_eps")),
        positions=positions,
        residual=c.number("scale_depth") / c.layers**0.5,
        embedding=c.number("scale_emb"),
        logits=c.positive("dim_model_base") / c.hidden,
    )
