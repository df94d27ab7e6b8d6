"""Kinds of files of Gemma."""

import math
from collections.abc import Mapping
from types import MappingProxyType

from engine.models.gguf_families.keys import Family, Keys, Settings, layer_types, small_numbers


def _gemma(keys: Keys) -> Settings:
    return {"hidden_act": "gelu_pytorch_tanh"}


_GEMMA_27B = {"gemma2": 46, "gemma3": 62}  # layers of the models that scale queries by hidden_size / heads
_GEMMA2_CAPS, _GEMMA2_WINDOW = (50.0, 30.0), 4096  # the first files of gemma2 do not state them


def _later_gemma(keys: Keys) -> Settings:
    wide, caps = keys.layers == _GEMMA_27B.get(keys.kind), _GEMMA2_CAPS if keys.kind == "gemma2" else (None, None)
    found = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": keys.positive("embedding_length") // keys.heads if wide else keys.head_dim,
        "attn_logit_softcapping": keys.get("attn_logit_softcapping", caps[0]),
        "final_logit_softcapping": keys.get("final_logit_softcapping", caps[1]),
        **(layer_types(keys, 2, _GEMMA2_WINDOW) if keys.kind == "gemma2" else layer_types(keys, 6)),
    }
    return found if keys.kind == "gemma2" else found | {"rope_local_base_freq": keys.get("rope.freq_base_swa", 10000.0)}


def _gemma_embedding(keys: Keys) -> Settings:
    return {**_later_gemma(keys), "use_bidirectional_attention": True}


def _per_layer_inputs(keys: Keys) -> Settings:
    table = keys.tensor("per_layer_token_embd.weight")
    return {
        "hidden_size_per_layer_input": keys.get("embedding_length_per_layer_input", 0),
        **({} if table is None else {"vocab_size_per_layer_input": table.shape[0]}),
        "num_kv_shared_layers": keys.get("attention.shared_kv_layers", 0),
        "final_logit_softcapping": keys.get("final_logit_softcapping"),
        "hidden_activation": "gelu_pytorch_tanh",
    }


def _sizes(keys: Keys) -> list[int]:
    """Return the sizes of the layers' MLPs."""
    found = keys.file.require(f"{keys.kind}.feed_forward_length")
    return list(found[: keys.layers]) if isinstance(found, tuple) else [found] * keys.layers


def _gemma3n(keys: Keys) -> Settings:
    """Files have the number of standard deviations above which gate values stay, instead of their share."""
    limits = keys.file.keys.get(f"{keys.kind}.activation_sparsity_scale", ())
    laurel = keys.tensor("blk.0.laurel_l.weight")
    return {
        **_per_layer_inputs(keys),
        "altup_num_inputs": keys.positive("altup.num_inputs"),
        "altup_active_idx": keys.get("altup.active_idx", 0),
        "altup_correct_scale": keys.has_in_layer("altup_correct_scale.weight"),
        "laurel_rank": 64 if laurel is None else laurel.shape[0],
        "intermediate_size": _sizes(keys),
        "activation_sparsity_pattern": [math.erfc(-one / math.sqrt(2.0)) / 2 for one in limits[: keys.layers]] or None,
        "rope_local_base_freq": keys.get("rope.freq_base_swa", 10000.0),
        **layer_types(keys, 5),
    }


_TURNING = 1e20  # divisors of frequencies above this are of dimensions that are not rotated


def _gemma4(keys: Keys) -> Settings:
    """Layers with and without windows have heads of different sizes and numbers."""
    sizes, shared = _sizes(keys), keys.get("attention.shared_kv_layers", 0)
    windows = layer_types(keys, 6)
    full = [layer for layer, kind in enumerate(windows.get("layer_types", ())) if kind == "full_attention"]
    listed = keys.file.keys.get(f"{keys.kind}.attention.head_count_kv")
    heads = listed if isinstance(listed, tuple) else (listed,) * keys.layers
    divisors = keys.tensor("rope_freqs.weight")
    turned = [one < _TURNING for one in small_numbers(divisors)] if divisors is not None else [True]
    size = keys.positive("attention.key_length")
    found = {
        **_per_layer_inputs(keys),
        **windows,
        "head_dim": keys.positive("attention.key_length_swa", size),
        "global_head_dim": size,
        "intermediate_size": min(sizes),
        "use_double_wide_mlp": bool(shared) and max(sizes) > min(sizes),
        "num_key_value_heads": next((count for layer, count in enumerate(heads) if layer not in full), heads[0]),
        "num_global_key_value_heads": heads[full[0]] if full else None,
        "attention_k_eq_v": bool(full) and not keys.has(f"blk.{full[0]}.attn_v.weight"),
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": keys.positive("rope.freq_base", 1e6),
                "partial_rotary_factor": sum(turned) / len(turned),
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": keys.positive("rope.freq_base_swa", 10000.0)},
        },
        "rope_scaling": None,
        "rope_theta": None,
        "partial_rotary_factor": None,
    }
    if not keys.get("expert_count"):
        return found
    return {
        **found,
        "enable_moe_block": True,
        "num_experts": keys.positive("expert_count"),
        "top_k_experts": keys.positive("expert_used_count"),
        "moe_intermediate_size": keys.positive("expert_feed_forward_length"),
    }


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "gemma": Family(("GemmaForCausalLM",), _gemma),
        "gemma2": Family(("Gemma2ForCausalLM",), _later_gemma),
        "gemma3": Family(("Gemma3ForCausalLM",), _later_gemma),
        "gemma-embedding": Family(("Gemma3TextModel",), _gemma_embedding),
        "gemma3n": Family(("Gemma3nForCausalLM",), _gemma3n),
        "gemma4": Family(("Gemma4ForCausalLM",), _gemma4),
    }
)
