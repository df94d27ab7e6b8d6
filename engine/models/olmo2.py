"""OLMo 2: norms only after each body; q and k are normalised over the entire projection.

Source: transformers modeling_olmo2.py.
"""

from collections.abc import Mapping
from typing import Any

from engine.models.config import Config
from engine.models.parts import MLP, Attention, Embedding, Head, Model, ResidualBlock, RMSNorm, named
from engine.models.rope import claimed_context, rope

ARCHITECTURES = ("Olmo2ForCausalLM",)

_DEFAULTS: dict[str, Any] = {"hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-5}


def declare(config: Mapping[str, Any]) -> Model:
    c = Config.of(config, **_DEFAULTS)
    eps, positions = c.number("rms_norm_eps"), rope(c)
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
    mlp = MLP(hidden=c.hidden, intermediate_size=c.intermediate_size, act=c.activation())
    norm = RMSNorm(size=c.hidden, eps=eps)
    block = (
        ResidualBlock(body=attention, after=named(norm, "post_attention_layernorm")),
        ResidualBlock(body=mlp, after=named(norm, "post_feedforward_layernorm")),
    )
    return Model(
        embed=Embedding(vocab=c.whole("vocab_size"), hidden=c.hidden),
        blocks=(block,) * c.layers,
        norm=named(norm, "norm"),
        head=Head(tied=c.flag("tie_word_embeddings")),
        max_context=claimed_context(c, positions),
    )
