"""Kinds of files of decoders with recurrent or convolutional layers."""

import math
from collections.abc import Mapping
from types import MappingProxyType

from engine.models.gguf_families.dense import granite
from engine.models.gguf_families.keys import Family, Keys, Settings, routed_experts
from engine.models.gguf_families.mixtures import qwen2_moe


def _lfm2(keys: Keys) -> Settings:
    listed = keys.file.require(f"{keys.kind}.attention.head_count_kv")
    listed = listed if isinstance(listed, tuple) else (listed,) * keys.layers
    return {
        "layer_types": ["full_attention" if heads else "conv" for heads in listed],
        "conv_L_cache": keys.positive("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
        "norm_eps": keys.positive("attention.layer_norm_rms_epsilon"),
        "conv_bias": keys.has_in_layer("shortconv.conv.bias"),
    }


def _lfm2_moe(keys: Keys) -> Settings:
    return {
        **_lfm2(keys),
        "num_experts": keys.positive("expert_count"),
        "num_experts_per_tok": keys.positive("expert_used_count"),
        "moe_intermediate_size": keys.positive("expert_feed_forward_length"),
        "num_dense_layers": keys.get("leading_dense_block_count", 0),
        "use_expert_bias": keys.has_in_layer("exp_probs_b.bias"),
    }


def _mixer(keys: Keys, prefix: str = "") -> Settings:
    """Return the settings of Mamba mixers that both versions have. prefix: of their keys in config.json."""
    names = ("use_bias", "use_conv_bias", "conv_kernel", "state_size")
    if prefix:
        names = "proj_bias", "conv_bias", "d_conv", "d_state"
    values = (
        keys.has_in_layer("ssm_in.bias"),
        keys.has_in_layer("ssm_conv1d.bias"),
        keys.positive("ssm.conv_kernel"),
        keys.positive("ssm.state_size"),
    )
    return {prefix + name: value for name, value in zip(names, values, strict=True)}


def _mamba(keys: Keys) -> Settings:
    kind = "FalconMambaForCausalLM" if keys.get("ssm.dt_b_c_rms") else "MambaForCausalLM"
    return {
        "architectures": [kind],
        **_mixer(keys),
        "intermediate_size": keys.positive("ssm.inner_size"),
        "time_step_rank": keys.positive("ssm.time_step_rank"),
    }


def _mamba2(keys: Keys) -> Settings:
    inner, heads = keys.positive("ssm.inner_size"), keys.positive("ssm.time_step_rank")
    return {
        **_mixer(keys),
        "expand": inner / keys.positive("embedding_length"),
        "head_dim": inner // heads,
        "num_heads": heads,
        "n_groups": keys.positive("ssm.group_count"),
    }


def _period(layers: list[int], count: int) -> tuple[int, int]:
    """Return the distance of the layers of a kind and the first of them, of `count` layers."""
    if not layers:
        return count + 1, count
    return (layers[1] - layers[0] if len(layers) > 1 else count), layers[0]


def _jamba(keys: Keys) -> Settings:
    attention = _period(keys.layers_with("attn_q.weight"), keys.layers)
    experts = _period(keys.layers_with("ffn_gate_inp.weight"), keys.layers)
    return {
        **_mixer(keys, "mamba_"),
        "mamba_expand": keys.positive("ssm.inner_size") // keys.positive("embedding_length"),
        "mamba_dt_rank": keys.positive("ssm.time_step_rank"),
        "num_experts": keys.positive("expert_count"),
        "num_experts_per_tok": keys.positive("expert_used_count"),
        "attn_layer_period": attention[0],
        "attn_layer_offset": attention[1],
        "expert_layer_period": experts[0],
        "expert_layer_offset": experts[1],
    }


def _granite_hybrid(keys: Keys) -> Settings:
    recurrent, heads = keys.layers_with("ssm_in.weight"), keys.positive("ssm.time_step_rank")
    inner, count = keys.positive("ssm.inner_size"), keys.get("expert_count", 0)
    return {
        **granite(keys),
        **_mixer(keys, "mamba_"),
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "layer_types": ["mamba" if layer in recurrent else "attention" for layer in range(keys.layers)],
        "mamba_expand": inner // keys.positive("embedding_length"),
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": keys.positive("ssm.group_count"),
        "num_local_experts": count,
        "shared_intermediate_size": keys.get("expert_shared_feed_forward_length", keys.get("feed_forward_length")),
        "position_embedding_type": "rope" if keys.get("rope.scaling.finetuned", True) else "nope",
    }


def _falcon_h1(keys: Keys) -> Settings:
    """The converter multiplies all multipliers into the weights."""
    inner, heads = keys.positive("ssm.inner_size"), keys.positive("ssm.time_step_rank")
    return {
        **_mixer(keys, "mamba_"),
        "mamba_d_ssm": inner,
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": keys.positive("ssm.group_count"),
        "mamba_rms_norm": keys.has_in_layer("ssm_norm.weight"),
        "mlp_bias": keys.has_in_layer("ffn_up.bias"),
        "projectors_bias": keys.has_in_layer("ssm_in.bias"),
    }


def _nemotron_h(keys: Keys) -> Settings:
    inner, heads = keys.positive("ssm.inner_size"), keys.positive("ssm.time_step_rank")
    found = {
        "layers_block_type": [_nemotron_h_layer(keys, layer) for layer in range(keys.layers)],
        "conv_kernel": keys.positive("ssm.conv_kernel"),
        "mamba_head_dim": inner // heads,
        "mamba_num_heads": heads,
        "mamba_proj_bias": keys.has_in_layer("ssm_in.bias"),
        "n_groups": keys.positive("ssm.group_count"),
        "ssm_state_size": keys.positive("ssm.state_size"),
        "use_conv_bias": keys.has_in_layer("ssm_conv1d.bias"),
        "mlp_bias": keys.has_in_layer("ffn_up.bias"),
    }
    if not keys.get("expert_count"):
        return found
    return {
        **found,
        **routed_experts(keys),
        "n_routed_experts": keys.positive("expert_count"),
        "moe_shared_expert_intermediate_size": keys.positive("expert_shared_feed_forward_length"),
    }


def _nemotron_h_layer(keys: Keys, layer: int) -> str:
    kinds = {"ssm_in": "linear_attention", "attn_q": "full_attention", "ffn_gate_inp": "moe"}
    return next((kind for name, kind in kinds.items() if keys.has(f"blk.{layer}.{name}.weight")), "mlp")


def _qwen3_next(keys: Keys) -> Settings:
    return {**qwen2_moe(keys), "norm_topk_prob": True, **_delta_net(keys)}


def _delta_net(keys: Keys) -> Settings:
    recurrent, heads = keys.layers_with("ssm_out.weight"), keys.positive("ssm.time_step_rank")
    return {
        "layer_types": ["linear_attention" if layer in recurrent else "full_attention" for layer in range(keys.layers)],
        "linear_conv_kernel_dim": keys.positive("ssm.conv_kernel"),
        "linear_key_head_dim": keys.positive("ssm.state_size"),
        "linear_num_key_heads": keys.positive("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": keys.positive("ssm.inner_size") // heads,
    }


def _qwen3_5(keys: Keys) -> Settings:
    """Files may have layers that predict further tokens, which are not read."""
    found = _qwen3_next(keys) if keys.get("expert_count") else _delta_net(keys)
    return {**found, "mtp_num_hidden_layers": 0}


def _kimi_linear(keys: Keys) -> Settings:
    """Files state one head of keys and values in layers with attention, and 0 in the others."""
    rotated, recurrent = keys.positive("rope.dimension_count"), keys.layers_with("ssm_conv1d_q.weight")
    decay = keys.tensor(f"blk.{recurrent[0]}.ssm_a") if recurrent else None
    return {
        "num_key_value_heads": keys.heads,
        "q_lora_rank": keys.get("attention.q_lora_rank"),
        "kv_lora_rank": keys.positive("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": keys.positive("attention.key_length_mla") - rotated,
        "v_head_dim": keys.positive("attention.value_length_mla"),
        "layer_types": ["linear_attention" if layer in recurrent else "full_attention" for layer in range(keys.layers)],
        "linear_conv_kernel_dim": keys.positive("ssm.conv_kernel"),
        "linear_head_dim": keys.positive("kda.head_dim"),
        "linear_num_heads": keys.heads if decay is None else math.prod(decay.shape),
        "num_experts": keys.positive("expert_count"),
        "num_experts_per_token": keys.positive("expert_used_count"),
        "num_shared_experts": keys.get("expert_shared_count", 0),
        "moe_intermediate_size": keys.positive("expert_feed_forward_length"),
        "moe_renormalize": bool(keys.get("expert_weights_norm", True)),
        "routed_scaling_factor": keys.get("expert_weights_scale", 1.0),
        "num_expert_group": keys.get("expert_group_count", 1),
        "topk_group": keys.get("expert_group_used_count", 1),
        "first_k_dense_replace": keys.get("leading_dense_block_count", 0),
    }


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "lfm2": Family(("Lfm2ForCausalLM",), _lfm2),
        "lfm2moe": Family(("Lfm2MoeForCausalLM",), _lfm2_moe),
        "mamba": Family(
            ("MambaForCausalLM", "FalconMambaForCausalLM"), _mamba, norm="layer_norm_epsilon", has_attention=False
        ),
        "mamba2": Family(("Mamba2ForCausalLM",), _mamba2, norm="layer_norm_epsilon", has_attention=False),
        "jamba": Family(("JambaForCausalLM",), _jamba),
        "granitehybrid": Family(("GraniteMoeHybridForCausalLM",), _granite_hybrid, permuted=True),
        "falcon-h1": Family(("FalconH1ForCausalLM",), _falcon_h1),
        "nemotron_h": Family(("NemotronHForCausalLM",), _nemotron_h, norm="layer_norm_epsilon"),
        "nemotron_h_moe": Family(("NemotronHForCausalLM",), _nemotron_h, norm="layer_norm_epsilon"),
        "qwen3next": Family(("Qwen3NextForCausalLM",), _qwen3_next),
        "qwen35": Family(("Qwen3_5ForCausalLM",), _qwen3_5),
        "qwen35moe": Family(("Qwen3_5MoeForCausalLM",), _qwen3_5),
        "kimi-linear": Family(
            ("KimiLinearForCausalLM",),
            _kimi_linear,
            without=("head_dim", "partial_rotary_factor"),
            names={"max_position_embeddings": "model_max_length"},
        ),
    }
)
