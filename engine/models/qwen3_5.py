"""Qwen3.5 (text): Qwen3-Next's layers with separate projections of the gated DeltaNet, dense or with experts.

Source: transformers modeling_qwen3_5.py, modeling_qwen3_5_moe.py. All positions of a text are equal in the three
dimensions of the rotary embedding, so it is the usual one.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.models.config import Config
from engine.models.parts import MLP, Model
from engine.models.qwen3_next import delta_net, hybrid, shared_experts

ARCHITECTURES = ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")

HEADS = "mtp_num_hidden_layers"
_SAME: dict[str, Any] = {
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 32768,
    "mtp_num_hidden_layers": 1,
    "rms_norm_eps": 1e-6,
}
_DENSE: dict[str, Any] = {**_SAME, "num_key_value_heads": 4}
_MOE: dict[str, Any] = {
    **_SAME,
    "moe_intermediate_size": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 2,
    "shared_expert_intermediate_size": 512,
}


def declare(config: Mapping[str, Any]) -> Model:
    is_dense = config["architectures"][0] == "Qwen3_5ForCausalLM"
    c = Config.of(config, **(_DENSE if is_dense else _MOE))
    delta = replace(delta_net(c), projections="joined")
    if is_dense:
        mlp = MLP(hidden=c.hidden, intermediate_size=c.intermediate_size, act=c.activation())
        return hybrid(c, [mlp] * c.layers, delta, HEADS)
    return hybrid(c, [shared_experts(c, normalized=True)] * c.layers, delta, HEADS)
