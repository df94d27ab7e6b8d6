"""Kinds of files of decoders with routed experts."""

from collections.abc import Mapping
from types import MappingProxyType

from engine.api.errors import CheckpointError
from engine.models.gguf_families.dense import granite, phi3
from engine.models.gguf_families.keys import Family, Keys, Settings, layer_types, rope_scaling, routed_experts


def qwen2_moe(keys: Keys) -> Settings:
    return {
        "num_experts": keys.positive("expert_count"),
        "num_experts_per_tok": keys.positive("expert_used_count"),
        "moe_intermediate_size": keys.positive("expert_feed_forward_length"),
        "shared_expert_intermediate_size": keys.get("expert_shared_feed_forward_length", 0),
        "norm_topk_prob": keys.kind == "qwen3moe",
        "qkv_bias": keys.has("blk.0.attn_q.bias"),
    }


def _gpt_oss(keys: Keys) -> Settings:
    return {
        "intermediate_size": keys.positive("expert_feed_forward_length"),
        "num_local_experts": keys.positive("expert_count"),
        "num_experts_per_tok": keys.positive("expert_used_count"),
        **layer_types(keys, 2),
    }


def _ernie_moe(keys: Keys) -> Settings:
    return {
        "moe_num_experts": keys.positive("expert_count"),
        "moe_k": keys.positive("expert_used_count"),
        "moe_intermediate_size": keys.positive("expert_feed_forward_length"),
        "moe_num_shared_experts": keys.get("expert_shared_count", 0),
        "moe_layer_start_index": keys.get("leading_dense_block_count", 0),
        "moe_layer_interval": keys.get("interleave_moe_layer_step", 1),
        "use_bias": keys.has_in_layer("attn_q.bias"),
    }


def _phimoe(keys: Keys) -> Settings:
    return {
        **phi3(keys),
        "num_local_experts": keys.positive("expert_count"),
        "num_experts_per_tok": keys.positive("expert_used_count"),
        "attention_bias": keys.has_in_layer("attn_q.bias"),
        "lm_head_bias": keys.has("output.bias"),
    }


def _hunyuan_moe(keys: Keys) -> Settings:
    return {"num_experts": keys.positive("expert_count"), "moe_topk": keys.positive("expert_used_count")}


_LLAMA4_MAVERICK = 128  # experts of the model without norms of queries and keys


def _llama4(keys: Keys) -> Settings:
    count = keys.positive("expert_count")
    return {
        "intermediate_size": keys.positive("expert_feed_forward_length"),
        "intermediate_size_mlp": keys.positive("feed_forward_length"),
        "num_local_experts": count,
        "num_experts_per_tok": keys.positive("expert_used_count"),
        "interleave_moe_layer_step": keys.get("interleave_moe_layer_step", 1),
        "use_qk_norm": count != _LLAMA4_MAVERICK,
        "attention_chunk_size": keys.get("attention.chunk_size", 8192),
    }


def _exaone_moe(keys: Keys) -> Settings:
    dense = min(keys.get("leading_dense_block_count", 0), keys.layers)
    return {
        **routed_experts(keys),
        "num_shared_experts": keys.get("expert_shared_count", 0),
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (keys.layers - dense),
        **layer_types(keys, 4),
    }


def _bailing(keys: Keys) -> Settings:
    found = routed_experts(keys)
    return {**found, "num_shared_experts": found.pop("n_shared_experts"), "use_bias": False}


def _bailing2(keys: Keys) -> Settings:
    return {
        **_bailing(keys),
        "use_qk_norm": keys.has_in_layer("attn_q_norm.weight"),
        "use_qkv_bias": keys.has_in_layer("attn_qkv.bias"),
    }


def _afmoe(keys: Keys) -> Settings:
    found = routed_experts(keys)
    return {
        **found,
        "num_shared_experts": found.pop("n_shared_experts"),
        "num_dense_layers": found.pop("first_k_dense_replace"),
        "route_scale": found.pop("routed_scaling_factor"),
        "mup_enabled": True,
        **layer_types(keys, 4),
    }


def _arctic(keys: Keys) -> Settings:
    return {
        "num_local_experts": keys.positive("expert_count"),
        "num_experts_per_tok": keys.positive("expert_used_count"),
        "moe_layer_frequency": 1,
        "use_residual": True,
    }


_MIMO_VALUE_SCALE = 0.707  # of the files of old converters, which do not state it


def _mimo2(keys: Keys) -> Settings:
    """The pattern of windows has an entry for each layer that predicts further tokens, too."""
    windowed = [bool(one) for one in keys.file.require(f"{keys.kind}.attention.sliding_window_pattern")]
    kinds = ["sliding_attention" if one else "full_attention" for one in windowed[: keys.layers]]
    listed = keys.file.keys.get(f"{keys.kind}.attention.head_count_kv")
    heads = listed if isinstance(listed, tuple) else (listed,) * keys.layers
    full = next((count for count, kind in zip(heads, kinds, strict=False) if kind == "full_attention"), None)
    partial = keys.positive("rope.dimension_count", keys.head_dim) / keys.head_dim
    bases = {
        "full_attention": keys.positive("rope.freq_base", 10000.0),
        "sliding_attention": keys.positive("rope.freq_base_swa", 10000.0),
    }
    sparse = keys.layers_with("ffn_gate_inp.weight")
    found = routed_experts(keys)
    return {
        **found,
        "n_routed_experts": found.pop("num_experts"),
        "norm_topk_prob": bool(keys.get("expert_weights_norm", True)),
        "num_key_value_heads": keys.kv_heads // 2 if full is None else full,
        "v_head_dim": keys.positive("attention.value_length"),
        "attention_value_scale": keys.get("attention.value_scale", _MIMO_VALUE_SCALE),
        "sliding_window": keys.positive("attention.sliding_window"),
        "layer_types": kinds,
        "mlp_layer_types": ["sparse" if layer in sparse else "dense" for layer in range(keys.layers)],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": partial}
            for kind, base in bases.items()
        },
        "rope_theta": None,
    }


def _step35(keys: Keys) -> Settings:
    """Full layers rotate half of each head, and RoPE is scaled in them alone. Lists may have entries of the layers that
    predict further tokens, too."""
    windowed = [bool(one) for one in keys.each_layer("attention.sliding_window_pattern")]
    by_kind = [dict(zip(windowed, keys.each_layer(f"attention.{one}"), strict=True)) for one in _HEADS]
    (full, other), kv_heads = (by_kind[0].get(kind, keys.heads) for kind in (False, True)), set(by_kind[1].values())
    if len(kv_heads) > 1:
        raise CheckpointError(f"{keys.file.path}: layers have {sorted(kv_heads)} KV heads; all must have as many")
    scaling, sparse = rope_scaling(keys), keys.layers_with("ffn_gate_inp.weight")
    if scaling is not None and scaling["rope_type"] == "longrope":
        half = keys.head_dim // 4
        scaling |= {one: scaling[one][:half] for one in ("short_factor", "long_factor")}
    base, of_windows = keys.positive("rope.freq_base", 10000.0), keys.get("rope.freq_base_swa", 10000.0)
    return {
        "num_attention_heads": full,
        "attention_other_setting": {"num_attention_heads": other},
        "num_attention_groups": keys.kv_heads,
        "layer_types": ["sliding_attention" if one else "full_attention" for one in windowed],
        "sliding_window": keys.positive("attention.sliding_window"),
        "rope_theta": [of_windows if one else base for one in windowed],
        "partial_rotary_factors": [1.0 if one else 0.5 for one in windowed],
        "rope_scaling": scaling,
        "yarn_only_types": ["full_attention"],
        "moe_num_experts": keys.positive("expert_count"),
        "moe_top_k": keys.positive("expert_used_count"),
        "moe_intermediate_size": keys.positive("expert_feed_forward_length"),
        "share_expert_dim": keys.positive("expert_shared_feed_forward_length"),
        "moe_layers_enum": ",".join(map(str, sparse)),
        "moe_router_activation": "sigmoid",
        "moe_router_scaling_factor": keys.get("expert_weights_scale", 1.0),
        "norm_expert_weight": bool(keys.get("expert_weights_norm", True)),
        "use_moe_router_bias": keys.has_in_layer("exp_probs_b.bias"),
        "use_head_wise_attn_gate": keys.has_in_layer("attn_gate.weight"),
        "swiglu_limits": keys.each_layer("swiglu_clamp_exp", 0.0),
        "swiglu_limits_shared": keys.each_layer("swiglu_clamp_shexp", 0.0),
    }


_HEADS = ("head_count", "head_count_kv")


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "qwen2moe": Family(("Qwen2MoeForCausalLM",), qwen2_moe),
        "qwen3moe": Family(("Qwen3MoeForCausalLM",), qwen2_moe),
        "qwen3vlmoe": Family(("Qwen3MoeForCausalLM",), lambda keys: {**qwen2_moe(keys), "norm_topk_prob": True}),
        "granitemoe": Family(("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"), granite, permuted=True),
        "gpt-oss": Family(("GptOssForCausalLM",), _gpt_oss, yarn=lambda keys: {"truncate": False}),
        "glm4moe": Family(
            ("Glm4MoeForCausalLM",),
            lambda keys: {
                **routed_experts(keys),
                "n_routed_experts": keys.positive("expert_count"),
                "use_qk_norm": keys.has_in_layer("attn_q_norm.weight"),
            },
        ),
        "dots1": Family(
            ("Dots1ForCausalLM",),
            lambda keys: {
                **routed_experts(keys),
                "n_routed_experts": keys.positive("expert_count"),
                **layer_types(keys),
            },
        ),
        "olmoe": Family(
            ("OlmoeForCausalLM",),
            lambda keys: {
                "num_experts": keys.positive("expert_count"),
                "num_experts_per_tok": keys.positive("expert_used_count"),
                "norm_topk_prob": bool(keys.get("expert_weights_norm", False)),
            },
        ),
        "ernie4_5-moe": Family(("Ernie4_5_MoeForCausalLM",), _ernie_moe),
        "step35": Family(("Step3p5ForCausalLM",), _step35, names={"num_key_value_heads": "num_attention_groups"}),
        "llama4": Family(("Llama4ForCausalLM",), _llama4),
        "minimax-m2": Family(
            ("MiniMaxM2ForCausalLM",),
            lambda keys: {
                "intermediate_size": keys.positive("expert_feed_forward_length"),
                "num_local_experts": keys.positive("expert_count"),
                "num_experts_per_tok": keys.positive("expert_used_count"),
                "rotary_dim": keys.positive("rope.dimension_count"),
            },
        ),
        "exaone-moe": Family(("ExaoneMoeForCausalLM",), _exaone_moe),
        "hunyuan-moe": Family(("HunYuanMoEV1ForCausalLM",), _hunyuan_moe),
        "phimoe": Family(("PhimoeForCausalLM", "PhiMoEForCausalLM"), _phimoe),
        "bailingmoe": Family(("BailingMoeForCausalLM",), _bailing, permuted=True, separate=("wq", "wk", "wv", "dense")),
        "bailingmoe2": Family(("BailingMoeV2ForCausalLM",), _bailing2),
        "afmoe": Family(("AfmoeForCausalLM",), _afmoe),
        "arctic": Family(("ArcticForCausalLM",), _arctic, permuted=True),
        "mimo2": Family(("MiMoV2FlashForCausalLM",), _mimo2),
    }
)
