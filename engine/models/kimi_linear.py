"""Kimi Linear: Kimi Delta Attention in three of four layers, latent attention without positions in the others, and
experts.

Source: transformers modeling_kimi_linear.py; arXiv:2510.26692. Original checkpoints number layers from 1 in
linear_attn_config.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.api.errors import CheckpointError
from engine.models.config import Config, shown
from engine.models.deepseek import latent_attention
from engine.models.grouped_experts import dense_first, grouped_experts
from engine.models.parts import (
    MLP,
    Block,
    Body,
    Embedding,
    Experts,
    Head,
    KimiDelta,
    Model,
    NoRotation,
    ResidualBlock,
    RMSNorm,
    named,
)

ARCHITECTURES = ("KimiLinearForCausalLM",)
ATTENTION, RECURRENT = "full_attention", "linear_attention"

_NAMES = {
    "head_dim": "qk_rope_head_dim",
    "max_position_embeddings": "model_max_length",
    "n_group": "num_expert_group",
    "n_shared_experts": "num_shared_experts",
    "norm_topk_prob": "moe_renormalize",
    "num_experts_per_tok": "num_experts_per_token",
}
_DEFAULTS: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "head_dim": 64,
    "hidden_act": "silu",
    "kv_lora_rank": 512,
    "linear_conv_kernel_dim": 4,
    "linear_head_dim": 128,
    "linear_num_heads": 32,
    "max_position_embeddings": 1_048_576,
    "moe_intermediate_size": 1024,
    "n_group": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "qk_nope_head_dim": 128,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 2.446,
    "topk_group": 1,
    "v_head_dim": 128,
}
_OLD = {
    "linear_conv_kernel_dim": "short_conv_kernel_size",
    "linear_head_dim": "head_dim",
    "linear_num_heads": "num_heads",
}


def declare(config: Mapping[str, Any]) -> Model:
    c = _with_old_keys(Config.of(config, _NAMES, **_DEFAULTS))
    unscaled = replace(c, values={**c.values, "rope_parameters": None, "rope_scaling": None})
    attention = latent_attention(unscaled, interleaved=False)
    bodies: dict[str, Body] = {
        ATTENTION: replace(attention, rope=replace(attention.rope, scaling=NoRotation())),
        RECURRENT: KimiDelta(
            hidden=c.hidden,
            heads=c.whole("linear_num_heads"),
            head_dim=c.whole("linear_head_dim"),
            conv=c.whole("linear_conv_kernel_dim", least=2),
            eps=c.number("rms_norm_eps"),
        ),
    }
    norm = RMSNorm(size=c.hidden, eps=c.number("rms_norm_eps"))
    routed = replace(grouped_experts(c), gate="w1", up="w3", down="w2", name="block_sparse_moe")
    dense = MLP(hidden=c.hidden, intermediate_size=c.intermediate_size, act=c.activation())

    def block(kind: str, has_experts: bool) -> Block:
        mlp: MLP | Experts = routed if has_experts else dense
        return (
            ResidualBlock(before=named(norm, "input_layernorm"), body=bodies[kind]),
            ResidualBlock(before=named(norm, "post_attention_layernorm"), body=mlp),
        )

    usual = tuple(RECURRENT if index == 0 or index % 4 else ATTENTION for index in range(c.layers))
    return Model(
        embed=Embedding(vocab=c.whole("vocab_size"), hidden=c.hidden),
        blocks=tuple(map(block, c.layer_types(usual, (ATTENTION, RECURRENT)), dense_first(c))),
        norm=named(norm, "norm"),
        head=Head(tied=c.flag("tie_word_embeddings")),
        max_context=c.whole("max_position_embeddings"),
    )


def _with_old_keys(c: Config) -> Config:
    """Return the configuration with the settings of linear_attn_config under their new names."""
    old = c.values.get("linear_attn_config")
    if old is None:
        return c
    if not isinstance(old, dict):
        raise CheckpointError(f"config.json: linear_attn_config is {shown(old)}; it must be an object")
    found = {key: old[name] for key, name in _OLD.items() if name in old}
    if c.values.get("layer_types") is None and "full_attn_layers" in old:
        numbers = old["full_attn_layers"]
        if not isinstance(numbers, list) or not all(isinstance(one, int) for one in numbers):
            raise CheckpointError(
                f"config.json: full_attn_layers is {shown(numbers)}; it must be a list of layers' numbers"
            )
        found["layer_types"] = [ATTENTION if index + 1 in numbers else RECURRENT for index in range(c.layers)]
    return replace(c, values={**c.values, **found})
