"""MiniCPM3: MiniCPM's multipliers with multi-head latent attention.

Source: transformers modeling_minicpm3.py.
"""

from collections.abc import Mapping
from typing import Any

from engine.models.config import Config
from engine.models.decoder import llama_decoder
from engine.models.deepseek import latent_attention
from engine.models.parts import MLP, Model, RMSNorm

ARCHITECTURES = ("MiniCPM3ForCausalLM",)

_DEFAULTS: dict[str, Any] = {
    "dim_model_base": 256,
    "hidden_act": "silu",
    "kv_lora_rank": 256,
    "max_position_embeddings": 32_768,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 64,
    "rms_norm_eps": 1e-5,
    "scale_depth": 1.4,
    "scale_emb": 12,
    "tie_word_embeddings": True,
}


def declare(config: Mapping[str, Any]) -> Model:
    c = Config.of(config, {"head_dim": "qk_rope_head_dim"}, **_DEFAULTS, head_dim=32)
    attention = latent_attention(c, interleaved=False)
    return llama_decoder(
        c,
        (attention,) * c.layers,
        MLP(hidden=c.hidden, intermediate_size=c.intermediate_size, act=c.activation(), bias=c.flag("mlp_bias")),
        RMSNorm(size=c.hidden, eps=c.number("rms_norm_eps")),
        positions=attention.rope,
        residual=1.0 if c.values.get("scale_depth") is None else c.number("scale_depth") / c.layers**0.5,
        embedding=c.number("scale_emb"),
        logits=1.0 if c.values.get("dim_model_base") is None else c.positive("dim_model_base") / c.hidden,
    )
