"""MiniMax-M2: partly rotated heads, norms of q and k over all heads, and experts with sigmoid scores.

Source: transformers modeling_minimax_m2.py. Published configurations give the rotated dimensions as `rotary_dim`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.models.config import Config
from engine.models.decoder import llama_decoder
from engine.models.parts import Attention, Experts, Model, RMSNorm
from engine.models.rope import rope

ARCHITECTURES = ("MiniMaxM2ForCausalLM",)

_DEFAULTS: dict[str, Any] = {
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 196_608,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
}


def declare(config: Mapping[str, Any]) -> Model:
    c = Config.of(config, **_DEFAULTS)
    rotated = c.whole_or_none("rotary_dim")
    positions = rope(c, theta=5e6, partial=1.0 if rotated is None else rotated / c.head_dim)
    norm = RMSNorm(size=c.hidden, eps=c.number("rms_norm_eps"))
    attention = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        rope=positions,
        qk_norm=RMSNorm(size=c.head_dim, eps=norm.eps),
        qk_norm_span="all",
    )
    num_experts, top_k = c.experts()
    experts = Experts(
        hidden=c.hidden,
        intermediate_size=c.intermediate_size,
        num_experts=num_experts,
        top_k=top_k,
        scores="sigmoid",
        act=c.activation(),
        correction="e_score_correction_bias",
        normalized=True,
        gate="w1",
        up="w3",
        down="w2",
        name="block_sparse_moe",
    )
    return replace(llama_decoder(c, attention, experts, norm, positions=positions), unread=("mtp.",))
