"""Granite 4: Mamba-2 mixers in most layers, attention in the others, experts and a shared MLP in all.

Source: transformers modeling_granitemoehybrid.py. Attention has rotary positions only with
position_embedding_type: rope.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.models import mamba2
from engine.models.config import Config
from engine.models.decoder import llama_decoder
from engine.models.granite import granite_experts, shared_mlp
from engine.models.mamba2 import ATTENTION
from engine.models.parts import Attention, Model, RMSNorm
from engine.models.rope import rope

ARCHITECTURES = ("GraniteMoeHybridForCausalLM",)

_NAMES = {
    "num_heads": "mamba_n_heads",
    "n_groups": "mamba_n_groups",
    "state_size": "mamba_d_state",
    "conv_kernel": "mamba_d_conv",
    "expand": "mamba_expand",
    "use_bias": "mamba_proj_bias",
    "use_conv_bias": "mamba_conv_bias",
    "layer_norm_epsilon": "rms_norm_eps",
}
_DEFAULTS: dict[str, Any] = {
    "attention_multiplier": 1.0,
    "conv_kernel": 4,
    "embedding_multiplier": 1.0,
    "expand": 2,
    "hidden_act": "silu",
    "layer_norm_epsilon": 1e-6,
    "logits_scaling": 1.0,
    "max_position_embeddings": 2048,
    "n_groups": 1,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_heads": 128,
    "residual_multiplier": 1.0,
    "rms_norm_eps": 1e-6,
    "shared_intermediate_size": 1024,
    "state_size": 256,
    "use_conv_bias": True,
}


def declare(config: Mapping[str, Any]) -> Model:
    c = Config.of(config, _NAMES, **_DEFAULTS)
    positions = rope(c) if c.values.get("position_embedding_type") == "rope" else None
    attention = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        rope=positions,
        scale=c.number("attention_multiplier"),
        bias=(c.flag("attention_bias"), c.flag("attention_bias")),
    )
    mamba = replace(mamba2.mixer(mixer_config(c)), name="mamba")
    has_experts = c.values.get("num_local_experts") != 0
    return llama_decoder(
        c,
        [attention if kind == ATTENTION else mamba for kind in mamba2.layer_kinds(c)],
        granite_experts(c) if has_experts else shared_mlp(c),
        RMSNorm(size=c.hidden, eps=c.number("rms_norm_eps")),
        positions=positions,
        residual=c.number("residual_multiplier"),
        embedding=c.number("embedding_multiplier"),
        logits=1.0 / c.positive("logits_scaling"),
    )


def mixer_config(c: Config) -> Config:
    """Return the configuration of the mixers, whose head size has the key mamba_d_head. The key head_dim belongs
    to attention."""
    head_dim = c.values.get("mamba_d_head")
    values = {**c.values, "head_dim": "auto" if head_dim is None else head_dim}
    return replace(c, values=values, names={**c.names, "head_dim": "mamba_d_head"})
