"""Falcon 7B, 40B, 180B, Falcon 2: parallel attention and MLP, one KV head or groups of heads in one q, k, v tensor.

Source: transformers modeling_falcon.py. Larger models have a layer norm for each body. Falcon RW has ALiBi, whose
slopes are scaled like the products of queries and keys. transformers rounds this bias to bfloat16; Slipway does not.
"""

from collections.abc import Mapping
from typing import Any

from engine.models.config import Config
from engine.models.parts import (
    MLP,
    Alibi,
    Attention,
    Block,
    Embedding,
    Head,
    LayerNorm,
    Model,
    Parallel,
    ResidualBlock,
    named,
)
from engine.models.rope import claimed_context, rope

ARCHITECTURES = ("FalconForCausalLM", "RWForCausalLM")
"""The first exported checkpoints have the second name."""

_NAMES = {
    "hidden_act": "activation",
    "intermediate_size": "ffn_hidden_size",
    "num_key_value_heads": "num_kv_heads",
}
_OLD_NAMES = {
    **_NAMES,
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "num_key_value_heads": "n_head_kv",
}
_DEFAULTS: dict[str, Any] = {
    "hidden_act": "gelu",
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": 2048,
    "multi_query": True,
    "parallel_attn": True,
    "tie_word_embeddings": True,
}


def declare(config: Mapping[str, Any]) -> Model:
    c = Config.of(config, _OLD_NAMES if "n_head" in config else _NAMES, **_DEFAULTS)
    is_new, bias = c.flag("new_decoder_architecture"), c.flag("bias")
    positions = None if c.flag("alibi") else rope(c)
    one_kv_head = not is_new and c.flag("multi_query")
    kv_heads = c.kv_heads if is_new else (1 if one_kv_head else c.heads)
    fused = "query_key_value"
    attention = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=kv_heads,
        head_dim=c.head_dim,
        rope=positions,
        alibi=Alibi(factor=c.head_dim**-0.5) if positions is None else None,
        bias=(bias, bias),
        sources=(fused, fused, fused, "dense"),
        groups=kv_heads,
        name="self_attention",
    )
    mlp = MLP(
        hidden=c.hidden,
        intermediate_size=c.whole_or_none("intermediate_size") or 4 * c.hidden,
        act=c.activation(),
        bias=bias,
        gate=None,
        up="dense_h_to_4h",
        down="dense_4h_to_h",
    )
    norm = LayerNorm(size=c.hidden, eps=c.number("layer_norm_epsilon"))
    return Model(
        embed=Embedding(vocab=c.whole("vocab_size"), hidden=c.hidden, name="word_embeddings"),
        blocks=(_block(c, attention, mlp, norm, is_new),) * c.layers,
        norm=named(norm, "ln_f"),
        head=Head(tied=c.flag("tie_word_embeddings")),
        max_context=claimed_context(c, positions),
        root="transformer",
        layers="h",
    )


def _block(c: Config, attention: Attention, mlp: MLP, norm: LayerNorm, is_new: bool) -> Block:
    first, both = named(norm, "input_layernorm"), (attention, mlp)
    if not c.flag("parallel_attn"):
        second = named(norm, "post_attention_layernorm")
        return ResidualBlock(before=first, body=attention), ResidualBlock(before=second, body=mlp)
    if is_new and (c.whole_or_none("num_ln_in_parallel_attn") or 2) == 2:
        norms = named(norm, "ln_attn"), named(norm, "ln_mlp")
        return (ResidualBlock(body=Parallel(bodies=both, norms=norms)),)
    return (ResidualBlock(before=first, body=Parallel(bodies=both)),)
