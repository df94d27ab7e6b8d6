"""OLMoE: many small experts in every layer; q and k are normalised over the entire projection. FlexOlmo: the same with
norms after each body.

Source: transformers modeling_olmoe.py, modeling_flex_olmo.py; arXiv:2409.02060.
"""

from collections.abc import Mapping
from typing import Any

from engine.api.errors import CheckpointError
from engine.models.config import Config
from engine.models.parts import Attention, Embedding, Experts, Head, Model, ResidualBlock, RMSNorm, named
from engine.models.rope import claimed_context, rope

ARCHITECTURES = ("OlmoeForCausalLM", "FlexOlmoForCausalLM")

_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "rms_norm_eps": 1e-5,
}
_FLEX = {"num_experts": 7, "num_experts_per_tok": 5, "rms_norm_eps": 1e-6}


def declare(config: Mapping[str, Any]) -> Model:
    is_flex = config["architectures"][0] == "FlexOlmoForCausalLM"
    c = Config.of(config, **(_DEFAULTS | _FLEX if is_flex else _DEFAULTS))
    eps, positions = c.number("rms_norm_eps"), rope(c, theta=500_000.0 if is_flex else 10_000.0)
    if c.number_or_none("clip_qkv") is not None:
        raise CheckpointError("config.json: clip_qkv is set: clipping of queries, keys and values is not supported")
    attention = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        rope=positions,
        bias=(c.flag("attention_bias"), c.flag("attention_bias")),
        qk_norm=RMSNorm(size=c.head_dim, eps=eps),
        qk_norm_span="all",
    )
    num_experts, top_k = c.experts()
    experts = Experts(
        hidden=c.hidden,
        intermediate_size=c.intermediate_size,
        num_experts=num_experts,
        top_k=top_k,
        scores="softmax_chosen" if c.flag("norm_topk_prob") else "softmax",
        act=c.activation(),
    )
    norm = RMSNorm(size=c.hidden, eps=eps)
    if is_flex:
        first = ResidualBlock(body=attention, after=named(norm, "post_attention_layernorm"))
        second = ResidualBlock(body=experts, after=named(norm, "post_feedforward_layernorm"))
    else:
        first = ResidualBlock(before=named(norm, "input_layernorm"), body=attention)
        second = ResidualBlock(before=named(norm, "post_attention_layernorm"), body=experts)
    return Model(
        embed=Embedding(vocab=c.whole("vocab_size"), hidden=c.hidden),
        blocks=((first, second),) * c.layers,
        norm=named(norm, "norm"),
        head=Head(tied=c.flag("tie_word_embeddings")),
        max_context=claimed_context(c, positions),
    )
