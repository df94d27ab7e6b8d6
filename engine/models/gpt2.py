"""GPT-2 and StarCoder (GPT-BigCode, one KV head): learned positions, layer norms, biases everywhere.

Source: transformers modeling_gpt2.py, modeling_gpt_bigcode.py. GPT-2 stores its projections transposed.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.api.errors import CheckpointError
from engine.models.config import Config
from engine.models.decoder import mask_buffers
from engine.models.parts import MLP, Attention, Embedding, Head, LayerNorm, Lookup, Model, ResidualBlock, named

ARCHITECTURES = ("GPT2LMHeadModel", "GPTBigCodeForCausalLM")

NAMES = {
    "hidden_act": "activation_function",
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
_DEFAULTS: dict[str, Any] = {
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": 1024,
    "multi_query": True,
    "scale_attn_weights": True,
    "tie_word_embeddings": True,
}


def declare(config: Mapping[str, Any]) -> Model:
    is_gpt2 = config["architectures"][0] == "GPT2LMHeadModel"
    c = Config.of(config, NAMES, hidden_act="gelu_new" if is_gpt2 else "gelu_pytorch_tanh", **_DEFAULTS)
    if c.flag("add_cross_attention"):
        raise CheckpointError("config.json: add_cross_attention is true; supported are decoders without an encoder")
    one_kv_head = not is_gpt2 and c.flag("multi_query")
    attention = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=1 if one_kv_head else c.heads,
        head_dim=c.head_dim,
        rope=None,
        scale=None if c.flag("scale_attn_weights") else 1.0,
        bias=(True, True),
        sources=("c_attn", "c_attn", "c_attn", "c_proj"),
        groups=1 if is_gpt2 or one_kv_head else c.heads,
        name="attn",
    )
    inner = c.whole_or_none("intermediate_size") or 4 * c.hidden
    mlp = MLP(
        hidden=c.hidden, intermediate_size=inner, act=c.activation(), bias=True, gate=None, up="c_fc", down="c_proj"
    )
    norm = LayerNorm(size=c.hidden, eps=c.number("layer_norm_epsilon"))
    scale = attention.scale or c.head_dim**-0.5
    by_layer = is_gpt2 and c.flag("scale_attn_by_inverse_layer_idx")
    scales = [scale / (index + 1) if by_layer else attention.scale for index in range(c.layers)]
    longest = c.whole("max_position_embeddings")
    return Model(
        embed=Embedding(
            vocab=c.whole("vocab_size"),
            hidden=c.hidden,
            name="wte",
            positions=Lookup(count=longest, name="wpe"),
        ),
        blocks=tuple(
            (
                ResidualBlock(before=named(norm, "ln_1"), body=replace(attention, scale=scale)),
                ResidualBlock(before=named(norm, "ln_2"), body=mlp),
            )
            for scale in scales
        ),
        norm=named(norm, "ln_f"),
        head=Head(tied=c.flag("tie_word_embeddings")),
        max_context=longest,
        root="transformer",
        layers="h",
        transposed=is_gpt2,
        unread=mask_buffers(c, "h", "attn"),
    )
