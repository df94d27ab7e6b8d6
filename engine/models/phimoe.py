"""Phi-3.5-MoE: Llama blocks with layer norms and two experts per token, which SparseMixer selects and weighs.

Source: transformers modeling_phimoe.py; arXiv:2409.12136. With LongRoPE, `short_mscale` and `long_mscale` multiply cos
and sin in place of the usual factor.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.api.errors import CheckpointError
from engine.models.config import Config, shown
from engine.models.decoder import llama_decoder
from engine.models.parts import Attention, Experts, LayerNorm, LongScaling, Model, Rope
from engine.models.rope import rope

ARCHITECTURES = ("PhimoeForCausalLM", "PhiMoEForCausalLM")

_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "max_position_embeddings": 131_072,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "router_jitter_noise": 0.01,
}


def declare(config: Mapping[str, Any]) -> Model:
    c = Config.of(config, **_DEFAULTS)
    positions, bias = _rope(c), c.flag("attention_bias")
    attention = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        rope=positions,
        bias=(bias, bias),
        window=c.window(),
    )
    num_experts, top_k = c.experts()
    if top_k != 2:
        raise CheckpointError(f"config.json: num_experts_per_tok is {top_k}; SparseMixer selects 2 experts")
    experts = Experts(
        hidden=c.hidden,
        intermediate_size=c.intermediate_size,
        num_experts=num_experts,
        top_k=top_k,
        scores="sparsemixer",
        jitter=c.positive("router_jitter_noise"),
        act=c.activation(),
        gate="w1",
        up="w3",
        down="w2",
        name="block_sparse_moe",
    )
    norm = LayerNorm(size=c.hidden, eps=c.number("rms_norm_eps"))
    model = llama_decoder(c, attention, experts, norm, positions=positions)
    assert model.head is not None, "a decoder has a head"
    return replace(model, head=replace(model.head, bias=c.flag("lm_head_bias")))


def _rope(c: Config) -> Rope:
    positions = rope(c, theta=1e6)
    if positions.scaling is None:
        return positions
    settings = {**(c.values.get("rope_parameters") or {}), **(c.values.get("rope_scaling") or {})}
    short, long = settings.get("short_mscale"), settings.get("long_mscale")
    if not (isinstance(positions.scaling, LongScaling) and isinstance(short, int | float) and short == long):
        raise CheckpointError(
            f"config.json: the rotary settings have short_mscale {shown(short)} and long_mscale {shown(long)}; "
            "supported are equal numbers with the type longrope"
        )
    return replace(positions, scaling=replace(positions.scaling, attention=float(short)))
