"""Llama 4 (text): layers with and without rotary positions, normalised queries and keys, and experts whose weights
multiply their inputs.

Source: transformers modeling_llama4.py. Layers with rotary positions attend within chunks of `attention_chunk_size`
positions, and queries of the others are scaled from position `floor_scale` - 1 on. Neither has an effect on sequences
that are shorter, so the longest supported sequence ends before both. The norm of queries and keys follows the rotation,
which does not change their length; therefore it may precede it.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.api.errors import CheckpointError
from engine.models.config import Config, shown
from engine.models.decoder import Feed, llama_decoder
from engine.models.parts import MLP, Attention, Experts, Model, RMSNorm, Stacked
from engine.models.rope import rope

ARCHITECTURES = ("Llama4ForCausalLM",)

_DEFAULTS: dict[str, Any] = {
    "attention_chunk_size": 8192,
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
    plain = replace(rotated, rope=None, qk_norm=None)
    layers = [rotated if one else plain for one in _rotated(c)]
    model = llama_decoder(c, layers, _feeds(c), norm, positions=positions)
    return replace(model, max_context=min(model.max_context, *_limits(c)))


def _limits(c: Config) -> tuple[int, ...]:
    """Return the lengths up to which chunks and the scale of queries have no effect."""
    chunk, scaled = c.whole_or_none("attention_chunk_size"), c.flag("attn_temperature_tuning")
    return *(() if chunk is None else (chunk,)), *((c.whole("floor_scale", least=2) - 1,) if scaled else ()), 2**31 - 1


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
