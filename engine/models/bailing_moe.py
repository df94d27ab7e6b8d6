"""Ling (Bailing) 1 and 2: Llama blocks with q, k, v in one tensor, and experts; Ling 2 has norms of q and k, rotates
half of each head, and has DeepSeek-V3's experts.

Source: modeling_bailing_moe.py of the checkpoint inclusionAI/Ling-lite, modeling_bailing_moe_v2.py of Ling-mini-2.0.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.api.errors import CheckpointError
from engine.models.config import Config
from engine.models.decoder import llama_decoder
from engine.models.grouped_experts import dense_first, grouped_experts
from engine.models.parts import MLP, Attention, Experts, Model, RMSNorm
from engine.models.rope import rope

ARCHITECTURES = ("BailingMoeForCausalLM", "BailingMoeV2ForCausalLM")

_DEFAULTS: dict[str, Any] = {
    "first_k_dense_replace": 0,
    "hidden_act": "silu",
    "max_position_embeddings": 16_384,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 1.0,
}
_SECOND = {"max_position_embeddings": 32_768, "n_group": 8, "rms_norm_eps": 1e-6, "topk_group": 4, "use_qk_norm": True}


def declare(config: Mapping[str, Any]) -> Model:
    is_second = config["architectures"][0] == "BailingMoeV2ForCausalLM"
    c = Config.of(config, **(_DEFAULTS | _SECOND if is_second else _DEFAULTS))
    if c.flag("norm_head"):
        raise CheckpointError(
            "config.json: norm_head is true; a head of columns that are divided by their length is not supported"
        )
    positions = rope(c, theta=600_000.0)
    norm = RMSNorm(size=c.hidden, eps=c.number("rms_norm_eps"))
    attention = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        rope=positions,
        bias=(c.flag("use_qkv_bias") or (c.flag("use_bias") and not is_second), c.flag("use_bias")),
        qk_norm=RMSNorm(size=c.head_dim, eps=norm.eps) if is_second and c.flag("use_qk_norm") else None,
        qk_norm_names=("query_layernorm", "key_layernorm"),
        sources=("query_key_value", "query_key_value", "query_key_value", "dense"),
        name="attention",
    )
    mlp = MLP(hidden=c.hidden, intermediate_size=c.intermediate_size, act=c.activation())
    feeds = tuple(_experts(c, is_second) if has_experts else mlp for has_experts in dense_first(c))
    model = llama_decoder(c, attention, feeds, norm, positions=positions)
    # Layers beyond the last predict several tokens.
    return replace(model, embed=replace(model.embed, name="word_embeddings"), unread=(f"layers.{c.layers}.",))


def _experts(c: Config, is_second: bool) -> Experts:
    experts = grouped_experts(c, "num_shared_experts")
    if is_second:
        if c.values.get("score_function", "sigmoid") != "sigmoid":
            raise CheckpointError(f"config.json: score_function is {c.values['score_function']!r}; it must be sigmoid")
        # The original code always divides the weights of several experts by their sum.
        return replace(experts, correction="gate.expert_bias", normalized=experts.top_k > 1)
    plain = replace(experts, correction="", groups=1, groups_kept=1, normalized=False)
    return replace(plain, scores="softmax_chosen") if c.flag("norm_topk_prob") else replace(plain, scores="softmax")
