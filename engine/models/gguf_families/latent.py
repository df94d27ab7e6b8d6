"""Kinds of files of decoders with latent attention (MLA)."""

from collections.abc import Mapping
from types import MappingProxyType

from engine.models.gguf_families.keys import Family, Keys, Settings, routed_experts

_SIGMOID = 2  # expert_gating_func


def _deepseek2(keys: Keys) -> Settings:
    """DeepSeek V2 and V3, Kimi K2, GLM-4.7-Flash and Youtu. Files state one head of keys and values."""
    rotated, corrected = keys.positive("rope.dimension_count"), keys.has_in_layer("exp_probs_b.bias")
    found = {
        "num_key_value_heads": keys.heads,
        "q_lora_rank": keys.get("attention.q_lora_rank"),
        "kv_lora_rank": keys.positive("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": keys.positive("attention.key_length_mla") - rotated,
        "v_head_dim": keys.positive("attention.value_length_mla"),
        "attention_bias": keys.has_in_layer("attn_kv_a_mqa.bias"),
        "mlp_bias": keys.has("blk.0.ffn_up.bias"),
    }
    if not keys.get("expert_count"):
        return {**found, "architectures": ["YoutuForCausalLM"]}
    found |= {**routed_experts(keys), "n_routed_experts": keys.positive("expert_count")}
    if corrected or keys.get("expert_gating_func") == _SIGMOID:
        return found
    grouped = found["n_group"] > 1
    method = "group_limited_greedy" if grouped else "greedy"
    return {**found, "architectures": ["DeepseekV2ForCausalLM"], "topk_method": method}


def _deepseek2_yarn(keys: Keys) -> Settings:
    mscale = keys.get("rope.scaling.yarn_log_multiplier", 0.0) * 10  # the converter of llama.cpp divides it by 10
    return {"mscale": mscale, "mscale_all_dim": mscale} if mscale else {}


def _glm_dsa(keys: Keys) -> Settings:
    """GLM-5. A layer without an indexer uses the selection of the layer before."""
    selecting = keys.layers_with("indexer.proj.weight")
    return {
        **_deepseek2(keys),
        "index_n_heads": keys.positive("attention.indexer.head_count"),
        "index_head_dim": keys.positive("attention.indexer.key_length"),
        "index_topk": keys.positive("attention.indexer.top_k"),
        "indexer_types": ["full" if layer in selecting else "shared" for layer in range(keys.layers)],
    }


def _minicpm3(keys: Keys) -> Settings:
    """Files do not state the multipliers and the size of values; llama.cpp's loader has those of MiniCPM3-4B."""
    rotated, expansion = keys.positive("rope.dimension_count"), keys.tensor("blk.0.attn_kv_b.weight")
    nope = keys.positive("attention.key_length") - rotated
    return {
        "q_lora_rank": keys.get("attention.q_lora_rank"),
        "kv_lora_rank": keys.positive("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": nope,
        "v_head_dim": None if expansion is None else expansion.shape[0] // keys.heads - nope,
        "attention_bias": keys.has_in_layer("attn_kv_a_mqa.bias"),
        "mlp_bias": keys.has("blk.0.ffn_up.bias"),
    }


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "deepseek2": Family(
            ("DeepseekV3ForCausalLM", "DeepseekV2ForCausalLM", "Glm4MoeLiteForCausalLM", "YoutuForCausalLM"),
            _deepseek2,
            without=("head_dim", "partial_rotary_factor"),
            yarn=_deepseek2_yarn,
        ),
        "glm-dsa": Family(("GlmMoeDsaForCausalLM",), _glm_dsa, without=("head_dim", "partial_rotary_factor")),
        "minicpm3": Family(("MiniCPM3ForCausalLM",), _minicpm3, without=("head_dim", "partial_rotary_factor")),
    }
)
