"""Jamba: Mamba mixers in most layers, attention without positions in the others, an MLP or experts in all.

Source: transformers modeling_jamba.py; arXiv:2403.19887. Layers with attention and layers with experts are given by a
period and an offset each.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.api.errors import CheckpointError
from engine.models import mamba
from engine.models.config import Config
from engine.models.parts import MLP, Attention, Block, Embedding, Experts, Head, Model, ResidualBlock, RMSNorm, named
from engine.models.rope import claimed_context

ARCHITECTURES = ("JambaForCausalLM",)

_NAMES = {
    "state_size": "mamba_d_state",
    "conv_kernel": "mamba_d_conv",
    "expand": "mamba_expand",
    "time_step_rank": "mamba_dt_rank",
    "use_bias": "mamba_proj_bias",
    "use_conv_bias": "mamba_conv_bias",
}
_DEFAULTS: dict[str, Any] = {
    "attn_layer_offset": 4,
    "attn_layer_period": 8,
    "conv_kernel": 4,
    "expand": 2,
    "expert_layer_offset": 1,
    "expert_layer_period": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 262_144,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "state_size": 16,
    "time_step_rank": "auto",
    "use_conv_bias": True,
}


def declare(config: Mapping[str, Any]) -> Model:
    c = Config.of(config, _NAMES, **_DEFAULTS)
    eps = c.number("rms_norm_eps")
    norm = RMSNorm(size=c.hidden, eps=eps)
    attention = Attention(hidden=c.hidden, heads=c.heads, kv_heads=c.kv_heads, head_dim=c.head_dim, rope=None)
    own = replace(c, values={**c.values, "intermediate_size": None})  # of the MLP
    recurrent = replace(mamba.with_norms(mamba.mixer(own), eps, weight=True), name="mamba")
    dense, sparse = _feeds(c)

    def block(has_attention: bool, has_experts: bool) -> Block:
        return (
            ResidualBlock(before=named(norm, "input_layernorm"), body=attention if has_attention else recurrent),
            ResidualBlock(before=named(norm, "pre_ff_layernorm"), body=sparse if has_experts else dense),
        )

    return Model(
        embed=Embedding(vocab=c.whole("vocab_size"), hidden=c.hidden),
        blocks=tuple(map(block, _layers(c, "attn_layer"), _layers(c, "expert_layer"))),
        norm=named(norm, "final_layernorm"),
        head=Head(tied=c.flag("tie_word_embeddings")),
        max_context=claimed_context(c, None),
    )


def _layers(c: Config, name: str) -> tuple[bool, ...]:
    """Return for each layer whether it is one of those at an offset from multiples of a period."""
    period, offset = c.whole(f"{name}_period"), c.whole(f"{name}_offset", least=0)
    if offset >= period:
        raise CheckpointError(f"config.json: {name}_offset is {offset}; it must be less than {name}_period, {period}")
    return tuple(layer % period == offset for layer in range(c.layers))


def _feeds(c: Config) -> tuple[MLP, MLP | Experts]:
    """Return the MLP of layers without experts, and the experts, which are an MLP if there is only one."""
    size, act, name = c.intermediate_size, c.activation(), "feed_forward"
    mlp = MLP(hidden=c.hidden, intermediate_size=size, act=act, name=name)
    key = "num_experts" if c.values.get("num_local_experts") is None else "num_local_experts"
    if c.whole(key) == 1:
        return mlp, mlp
    num_experts, top_k = c.experts()
    return mlp, Experts(
        hidden=c.hidden,
        intermediate_size=size,
        num_experts=num_experts,
        top_k=top_k,
        scores="softmax",
        act=act,
        router="router",
        name=name,
    )
