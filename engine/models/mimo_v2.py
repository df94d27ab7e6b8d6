"""MiMo-V2-Flash: windows with sinks in most layers, values smaller than keys and multiplied by a number, and
DeepSeek-V3's experts without shared ones.

Source: transformers modeling_mimo_v2_flash.py. Layers with windows have twice as many KV heads.
The prediction heads `mtp` have a window and a dense MLP, and all read the states of the model (SGLang,
mimo_v2_flash_nextn.py, multi_layer_eagle_worker_v2.py).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.api.errors import CheckpointError
from engine.models.config import Config
from engine.models.decoder import llama_decoder, with_predictor
from engine.models.grouped_experts import dense_first, grouped_experts
from engine.models.parts import MLP, Attention, Model, RMSNorm
from engine.models.rope import rope

ARCHITECTURES = ("MiMoV2FlashForCausalLM",)
FULL, WINDOWED = "full_attention", "sliding_attention"

_NAMES = {"num_experts": "n_routed_experts"}
_DEFAULTS: dict[str, Any] = {
    "attention_value_scale": 0.707,
    "first_k_dense_replace": 1,
    "head_dim": 192,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 16_384,
    "max_position_embeddings": 131_072,
    "moe_intermediate_size": 2048,
    "n_group": 1,
    "norm_topk_prob": True,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-5,
    "sliding_window": 129,
    "topk_group": 1,
    "v_head_dim": 128,
}
_ROPES = {
    FULL: {"rope_type": "default", "rope_theta": 5_000_000.0, "partial_rotary_factor": 0.334},
    WINDOWED: {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.334},
}
_FULL_EVERY = 6  # by default, the first layer and every sixth one are full


def declare(config: Mapping[str, Any]) -> Model:
    c = Config.of(config, _NAMES, **_DEFAULTS)
    more: dict[str, Any] = {"rope_parameters": c.values.get("rope_parameters") or _ROPES}
    if c.values.get("routed_scaling_factor") is None:
        more["routed_scaling_factor"] = 1.0
    c = replace(c, values={**c.values, **more})
    value_dim = c.whole("v_head_dim")
    if value_dim > c.head_dim:
        raise CheckpointError(
            f"config.json: v_head_dim is {value_dim} and head_dim {c.head_dim}; supported are values of at most the "
            "size of keys"
        )
    before = c.whole_or_none("sliding_window_size")  # positions before the query, which the window includes
    scale = c.number_or_none("attention_value_scale")
    full = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        value_dim=value_dim,
        value_scale=1.0 if scale is None else scale,
        rope=rope(c, theta=5e6, partial=0.334, kind=FULL),
        bias=(c.flag("attention_bias"), False),
    )
    windowed = replace(
        full,
        kv_heads=2 * c.kv_heads,
        rope=rope(c, partial=0.334, kind=WINDOWED),
        window=c.whole("sliding_window") if before is None else before + 1,
        sinks=True,
        sinks_name="attention_sink_bias",
    )
    if c.heads % windowed.kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads is {c.heads} and num_key_value_heads {c.kv_heads}; the first must be a "
            "multiple of twice the second, the KV heads of layers with windows"
        )
    usual = tuple(FULL if i == 0 or (i + 1) % _FULL_EVERY == 0 else WINDOWED for i in range(c.layers))
    mlp = MLP(hidden=c.hidden, intermediate_size=c.intermediate_size, act=c.activation())
    experts, sparse = grouped_experts(c), dense_first(c)
    made = llama_decoder(
        c,
        [full if kind == FULL else windowed for kind in c.layer_types(usual)],
        [experts if is_sparse else mlp for is_sparse in sparse],
        RMSNorm(size=c.hidden, eps=c.number("rms_norm_eps")),
        positions=full.rope,
    )
    head = "model.mtp.layers.{}."
    return with_predictor(
        replace(made, unread=("mtp",)),
        c,
        windowed,
        mlp,
        [(head, ""), (f"{head}pre_mlp_layernorm.", "post_attention_layernorm.")],
        tensors=("eh_proj", "enorm", "hnorm", "final_layernorm"),
        before_norm=True,
        further_states="model",
        skips_first=False,
    )
