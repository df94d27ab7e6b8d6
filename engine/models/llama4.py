"""Llama 4 (text): layers with and without rotary positions, normalised queries and keys, and experts whose weights
multiply their inputs.

Source: transformers modeling_llama4.py. Layers with rotary positions attend within chunks of `attention_chunk_size`
positions, and queries of the others are scaled from position `floor_scale` - 1 on (arXiv:2501.19399). The norm of
queries and keys follows the rotation, which does not change their length; therefore it may precede it.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.api.errors import CheckpointError
from engine.models.config import Config, shown
from engine.models.decoder import Feed, llama_decoder
from engine.models.parts import MLP, Attention, Experts, Model, QueryScale, RMSNorm, Stacked
from engine.models.rope import rope

ARCHITECTURES = ("Llama4ForCausalLM",)

_DEFAULTS: dict[str, Any] = {
    "attention_chunk_size": 8192,
    "attn_scale": 0.1,
    "attn_temperature_tuning": True,
    "floor_scale": 8192,
    "head_dim": 128,
    "hidden_act": "silu",
    "interleave_moe_layer_step": 1,
    "intermediate_size_mlp": 16_384,
    "max_position_embeddings": 131_072,
    "no_rope_layer_interval": 4,
    "num_experts": 16,
    "num_experts_per_tok": 1,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "use_qk_norm": True,
}


def declare(config: Mapping[str, Any]) -> Model:
    c = Config.of(config, **_DEFAULTS)
    positions, bias = rope(c, theta=500_000.0, interleaved=True), c.flag("attention_bias")
    norm = RMSNorm(size=c.hidden, eps=c.number("rms_norm_eps"))
    rotated = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        rope=positions,
        bias=(bias, bias),
        qk_norm=RMSNorm(size=c.head_dim, eps=norm.eps, weight=False) if c.flag("use_qk_norm") else None,
    )
    plain = replace(rotated, rope=None, qk_norm=None, query_scale=_query_scale(c))
    usual = tuple("chunked_attention" if one else "full_attention" for one in _rotated(c))
    kinds = c.layer_types(usual, ("full_attention", "chunked_attention"))
    chunk = c.window("attention_chunk_size")
    layers = [
        replace(rotated if has_rope else plain, chunk=chunk if kind == "chunked_attention" else None)
        for has_rope, kind in zip(_rotated(c), kinds, strict=True)
    ]
    return llama_decoder(c, layers, _feeds(c), norm, positions=positions)


def _query_scale(c: Config) -> QueryScale | None:
    if not c.flag("attn_temperature_tuning"):
        return None
    return QueryScale(scale=c.number("attn_scale"), length=c.whole("floor_scale"), offset=1)


def _rotated(c: Config) -> tuple[bool, ...]:
    """Return whether each layer has rotary positions: its entry of no_rope_layers is 1."""
    listed = c.values.get("no_rope_layers")
    if not listed:
        interval = c.whole("no_rope_layer_interval")
        return tuple((index + 1) % interval != 0 for index in range(c.layers))
    if not isinstance(listed, list) or len(listed) < c.layers or not all(one in (0, 1) for one in listed):
        raise CheckpointError(
            f"config.json: no_rope_layers is {shown(listed)}; it must be 0 or 1 for each of the {c.layers} layers"
        )
    return tuple(map(bool, listed[: c.layers]))


def _feeds(c: Config) -> tuple[Feed, ...]:
    """Return the MLP or the experts of each layer."""
    num_experts, top_k = c.experts()
    dense = MLP(
        hidden=c.hidden, intermediate_size=c.whole("intermediate_size_mlp"), act=c.activation(), name="feed_forward"
    )
    experts = Experts(
        hidden=c.hidden,
        intermediate_size=c.intermediate_size,
        num_experts=num_experts,
        top_k=top_k,
        scores="sigmoid",
        act=c.activation(),
        router="router",
        scales_inputs=True,
        gate="gate_up_proj",
        up="gate_up_proj",
        stacked=Stacked(weight="experts.{}", transposed=True),
        shared=replace(dense, intermediate_size=c.intermediate_size, name="shared_expert"),
        name="feed_forward",
    )
    sparse = _sparse(c)
    return tuple(experts if index in sparse else dense for index in range(c.layers))


def _sparse(c: Config) -> frozenset[int]:
    """Return the numbers of the layers with experts."""
    listed = c.values.get("moe_layers")
    if listed is None:
        step = c.whole("interleave_moe_layer_step")
        return frozenset(range(step - 1, c.layers, step))
    if not isinstance(listed, list) or not all(type(one) is int for one in listed):
        raise CheckpointError(f"config.json: moe_layers is {shown(listed)}; it must be a list of layers' numbers")
    return frozenset(listed)
