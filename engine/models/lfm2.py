"""LFM2: short convolutions in most layers, attention in the others, an MLP in all. LFM2-MoE: experts with sigmoid
scores in all but the first layers.

Source: transformers modeling_lfm2.py, modeling_lfm2_moe.py.
"""

from collections.abc import Mapping
from typing import Any

from engine.api.errors import CheckpointError
from engine.models.config import Config, shown
from engine.models.decoder import Feed
from engine.models.parts import (
    MLP,
    Attention,
    Block,
    Embedding,
    Experts,
    Head,
    Model,
    ResidualBlock,
    RMSNorm,
    ShortConv,
    named,
)
from engine.models.rope import claimed_context, rope

ARCHITECTURES = ("Lfm2ForCausalLM", "Lfm2MoeForCausalLM")

_NAMES = {"rms_norm_eps": "norm_eps"}
_DEFAULTS: dict[str, Any] = {
    "block_auto_adjust_ff_dim": True,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
    "conv_L_cache": 3,
    "intermediate_size": 12288,
    "max_position_embeddings": 128_000,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
_MOE = {
    "block_auto_adjust_ff_dim": False,
    "intermediate_size": 7168,
    "moe_intermediate_size": 1792,
    "norm_topk_prob": True,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 1.0,
    "use_expert_bias": True,
}


def declare(config: Mapping[str, Any]) -> Model:
    has_experts = config["architectures"][0] == "Lfm2MoeForCausalLM"
    c = Config.of(config, _NAMES, **(_DEFAULTS | _MOE if has_experts else _DEFAULTS))
    eps, positions = c.number("rms_norm_eps"), rope(c, theta=1e6)
    attention = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        rope=positions,
        qk_norm=RMSNorm(size=c.head_dim, eps=eps),
        qk_norm_names=("q_layernorm", "k_layernorm"),
        sources=("q_proj", "k_proj", "v_proj", "out_proj"),
    )
    conv = ShortConv(hidden=c.hidden, conv=c.whole("conv_L_cache", least=2), bias=c.flag("conv_bias"))
    norm = RMSNorm(size=c.hidden, eps=eps)
    mlp = MLP(hidden=c.hidden, intermediate_size=_inner(c), gate="w1", up="w3", down="w2", name="feed_forward")
    first_sparse = c.whole("num_dense_layers", least=0) if has_experts else c.layers

    def block(index: int, kind: str) -> Block:
        feed: Feed = mlp if index < first_sparse else _experts(c)
        return (
            ResidualBlock(before=named(norm, "operator_norm"), body=attention if kind == "full_attention" else conv),
            ResidualBlock(before=named(norm, "ffn_norm"), body=feed),
        )

    return Model(
        embed=Embedding(vocab=c.whole("vocab_size"), hidden=c.hidden),
        blocks=tuple(block(*one) for one in enumerate(c.layer_types(_kinds(c), ("full_attention", "conv")))),
        norm=named(norm, "embedding_norm"),
        # Old files name the flag tie_embedding.
        head=Head(tied=c.flag("tie_embedding" if "tie_embedding" in c.values else "tie_word_embeddings")),
        max_context=claimed_context(c, positions),
    )


def _experts(c: Config) -> Experts:
    count, top_k = c.experts()
    return Experts(
        hidden=c.hidden,
        intermediate_size=c.whole("moe_intermediate_size"),
        num_experts=count,
        top_k=top_k,
        scores="sigmoid",
        correction="expert_bias" if c.flag("use_expert_bias") else "",
        normalized=c.flag("norm_topk_prob"),
        weight_scale=c.positive("routed_scaling_factor"),
        gate="w1",
        up="w3",
        down="w2",
        name="feed_forward",
    )


def _inner(c: Config) -> int:
    """Return the MLP's size: two thirds of the configured one, rounded up, unless block_auto_adjust_ff_dim is off."""
    size = c.whole("block_ff_dim") if c.values.get("block_ff_dim") is not None else c.intermediate_size
    if not c.flag("block_auto_adjust_ff_dim"):
        return size
    size, multiplier = int(2 * size / 3), c.number_or_none("block_ffn_dim_multiplier")
    if multiplier is None:
        return max(1, size)
    multiple, scaled = c.whole("block_multiple_of"), multiplier * size
    if not 0 < scaled < 2**31:
        raise CheckpointError(f"config.json: block_ffn_dim_multiplier is {multiplier:g}; the MLP has no valid size")
    return multiple * -(-int(scaled) // multiple)


def _kinds(c: Config) -> tuple[str, ...]:
    """Return the kind of each layer, from the indexes of those with attention. Default: all of them."""
    indexes = c.values.get("full_attn_idxs")
    indexes = list(range(c.layers)) if indexes is None else indexes
    if not isinstance(indexes, list) or not all(isinstance(one, int) for one in indexes):
        raise CheckpointError(f"config.json: full_attn_idxs is {shown(indexes)}; it must be a list of layers' numbers")
    return tuple("full_attention" if layer in indexes else "conv" for layer in range(c.layers))
