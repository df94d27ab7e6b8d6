"""Kinds of files of dense decoders."""

import math
from collections.abc import Mapping
from types import MappingProxyType

from engine.models.gguf_families.keys import Family, Keys, Settings, layer_types, rope_scaling


def _mixtral(keys: Keys) -> Settings:
    if not keys.get("expert_count"):
        return {}
    return {
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": keys.positive("expert_count"),
        "num_experts_per_tok": keys.positive("expert_used_count"),
    }


def _llama(keys: Keys) -> Settings:
    return {"mlp_bias": keys.has("blk.0.ffn_up.bias"), **_mixtral(keys)}


def phi3(keys: Keys) -> Settings:
    context = keys.positive("context_length")
    return {
        "sliding_window": keys.get("attention.sliding_window") or None,
        "original_max_position_embeddings": keys.get("rope.scaling.original_context_length", context),
    }


def granite(keys: Keys) -> Settings:
    found = {
        "attention_multiplier": keys.get("attention.scale", 1.0),
        "embedding_multiplier": keys.get("embedding_scale", 1.0),
        "residual_multiplier": keys.get("residual_scale", 1.0),
        "logits_scaling": keys.get("logit_scale", 1.0),
    }
    if not keys.get("expert_count"):
        return {**found, "mlp_bias": keys.has("blk.0.ffn_up.bias")}
    shared_size = keys.get("expert_shared_feed_forward_length")
    kind = "GraniteMoeSharedForCausalLM" if shared_size else "GraniteMoeForCausalLM"
    return {
        **found,
        "architectures": [kind],
        "num_local_experts": keys.positive("expert_count"),
        "num_experts_per_tok": keys.positive("expert_used_count"),
        "shared_intermediate_size": shared_size or 0,
    }


def _minicpm(keys: Keys) -> Settings:
    layers, hidden = keys.layers, keys.positive("embedding_length")
    return {
        "scale_emb": keys.get("embedding_scale", 12.0),
        "scale_depth": keys.get("residual_scale", 1.4 / math.sqrt(layers)) * math.sqrt(layers),
        "dim_model_base": hidden / keys.get("logit_scale", hidden / 256),
    }


def _olmo(keys: Keys) -> Settings:
    if not keys.get("attention.sliding_window"):
        return {}
    theta = keys.positive("rope.freq_base", 10000.0)
    ropes = {
        "full_attention": {"rope_theta": theta, **(rope_scaling(keys) or {"rope_type": "default"})},
        "sliding_attention": {"rope_theta": keys.get("rope.freq_base_swa", theta), "rope_type": "default"},
    }
    one = {"rope_theta": None, "rope_scaling": None}  # instead of one rotation for all layers
    return {"architectures": ["Olmo3ForCausalLM"], **layer_types(keys, 4), "rope_parameters": ropes, **one}


def _ministral3_yarn(keys: Keys) -> Settings:
    mscale, beta = keys.get("rope.scaling.yarn_log_multiplier"), keys.get("attention.temperature_scale")
    return {"mscale": mscale, "mscale_all_dim": mscale, "llama_4_scaling_beta": beta}


def _apertus(keys: Keys) -> Settings:
    return {"hidden_act": "xielu"}


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family(("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM"), _llama, permuted=True),
        "qwen2": Family(("Qwen2ForCausalLM",), without=("attention_bias",)),
        "qwen3": Family(("Qwen3ForCausalLM",)),
        "qwen2vl": Family(("Qwen2ForCausalLM",), without=("attention_bias",)),
        "qwen3vl": Family(("Qwen3ForCausalLM",)),
        "phi2": Family(
            ("PhiForCausalLM",), lambda keys: {"qk_layernorm": False}, norm="layer_norm_eps", layer_norm=True
        ),
        "phi3": Family(("Phi3ForCausalLM",), phi3),
        "granite": Family(("GraniteForCausalLM",), granite, permuted=True),
        "glm4": Family(("Glm4ForCausalLM",)),
        "command-r": Family(
            ("CohereForCausalLM",),
            lambda keys: {
                "logit_scale": keys.positive("logit_scale"),
                "use_qk_norm": keys.has_in_layer("attn_q_norm.weight"),
            },
            norm="layer_norm_eps",
            layer_norm=True,
        ),
        "cohere2": Family(
            ("Cohere2ForCausalLM",),
            lambda keys: {"logit_scale": keys.positive("logit_scale"), **layer_types(keys, 4)},
            norm="layer_norm_eps",
            layer_norm=True,
        ),
        "olmo": Family(
            ("OlmoForCausalLM",),
            lambda keys: {"clip_qkv": keys.get("attention.clamp_kqv")},
            permuted=True,
            norm="layer_norm_eps",
            layer_norm=True,
        ),
        "olmo2": Family(("Olmo2ForCausalLM", "Olmo3ForCausalLM"), _olmo),
        "stablelm": Family(
            ("StableLmForCausalLM",),
            lambda keys: {
                "use_qkv_bias": keys.has_in_layer("attn_q.bias"),
                "use_parallel_residual": bool(keys.get("use_parallel_residual", False)),
            },
            norm="layer_norm_eps",
            layer_norm=True,
        ),
        "starcoder2": Family(
            ("Starcoder2ForCausalLM",),
            lambda keys: {"use_bias": keys.has_in_layer("attn_q.bias")},
            norm="norm_epsilon",
            layer_norm=True,
        ),
        "smollm3": Family(
            ("SmolLM3ForCausalLM",), lambda keys: {"mlp_bias": keys.has("blk.0.ffn_up.bias")}, permuted=True
        ),
        "exaone": Family(("ExaoneForCausalLM",), norm="layer_norm_epsilon"),
        "exaone4": Family(("Exaone4ForCausalLM",), lambda keys: layer_types(keys, 4)),
        "seed_oss": Family(
            ("SeedOssForCausalLM",),
            lambda keys: {
                "attention_out_bias": keys.has("blk.0.attn_output.bias"),
                "mlp_bias": keys.has("blk.0.ffn_up.bias"),
            },
        ),
        "ernie4_5": Family(
            ("Ernie4_5ForCausalLM",), lambda keys: {"use_bias": keys.has("blk.0.attn_q.bias")}, permuted=False
        ),
        "arcee": Family(("ArceeForCausalLM",), lambda keys: {"mlp_bias": keys.has("blk.0.ffn_up.bias")}, permuted=True),
        "nemotron": Family(
            ("NemotronForCausalLM",),
            lambda keys: {"mlp_bias": keys.has("blk.0.ffn_up.bias")},
            norm="norm_eps",
            layer_norm=True,
        ),
        "minicpm": Family(("MiniCPMForCausalLM",), _minicpm, permuted=True),
        "mistral3": Family(
            ("Ministral3ForCausalLM",), lambda keys: {"sliding_window": None}, permuted=True, yarn=_ministral3_yarn
        ),
        "hunyuan-dense": Family(("HunYuanDenseV1ForCausalLM",)),
        "internlm2": Family(
            ("InternLM2ForCausalLM",),
            lambda keys: {"bias": keys.has_in_layer("attn_q.bias")},
            permuted=True,
            separate=("wq", "wk", "wv", "wo"),
        ),
        "apertus": Family(("ApertusForCausalLM",), _apertus),
    }
)
