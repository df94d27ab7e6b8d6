"""Qwen 1: Llama blocks with q, k, v in one tensor with bias, and other tensor names.

Source: modeling_qwen.py of the checkpoints Qwen/Qwen-7B. Beyond `seq_length`, the model changes its rotation and its
attention scores (use_dynamic_ntk, use_logn_attn); the context is therefore limited to it.
"""

from collections.abc import Mapping
from typing import Any

from engine.api.errors import CheckpointError
from engine.models.config import Config
from engine.models.parts import MLP, Attention, Embedding, Head, Model, ResidualBlock, RMSNorm, named
from engine.models.rope import rope

ARCHITECTURES = ("QWenLMHeadModel",)

_NAMES = {"head_dim": "kv_channels", "max_position_embeddings": "seq_length"}
_DEFAULTS: dict[str, Any] = {
    "layer_norm_epsilon": 1e-6,
    "max_position_embeddings": 8192,
    "no_bias": True,
    "rotary_emb_base": 10_000.0,
    "rotary_pct": 1.0,
}


def declare(config: Mapping[str, Any]) -> Model:
    c = Config.of(config, _NAMES, **_DEFAULTS)
    if "visual" in config:
        raise CheckpointError("config.json: has settings of a vision encoder (visual); supported are text models")
    bias = not c.flag("no_bias")
    attention = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.heads,
        head_dim=c.head_dim,
        rope=rope(c, theta=c.number("rotary_emb_base"), partial=c.number("rotary_pct")),
        bias=(True, bias),
        sources=("c_attn", "c_attn", "c_attn", "c_proj"),
        name="attn",
    )
    if c.intermediate_size % 2:
        raise CheckpointError(f"config.json: intermediate_size is {c.intermediate_size}; it must be even")
    mlp = MLP(
        hidden=c.hidden,
        intermediate_size=c.intermediate_size // 2,  # of w1 and w2 together
        bias=bias,
        gate="w2",
        up="w1",
        down="c_proj",
    )
    norm = RMSNorm(size=c.hidden, eps=c.number("layer_norm_epsilon"))
    block = (
        ResidualBlock(before=named(norm, "ln_1"), body=attention),
        ResidualBlock(before=named(norm, "ln_2"), body=mlp),
    )
    return Model(
        embed=Embedding(vocab=c.whole("vocab_size"), hidden=c.hidden, name="wte"),
        blocks=(block,) * c.layers,
        norm=named(norm, "ln_f"),
        head=Head(tied=c.flag("tie_word_embeddings")),
        max_context=c.whole("max_position_embeddings"),
        root="transformer",
        layers="h",
    )
