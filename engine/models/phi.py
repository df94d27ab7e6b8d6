"""Phi 1, 1.5 and 2: parallel attention and MLP after one layer norm; partial rotation; biases everywhere.

Source: transformers modeling_phi.py.
"""

from collections.abc import Mapping
from typing import Any

from engine.models.config import Config
from engine.models.parts import MLP, Attention, Embedding, Head, LayerNorm, Model, Parallel, ResidualBlock, named
from engine.models.rope import claimed_context, rope

ARCHITECTURES = ("PhiForCausalLM",)

_DEFAULTS: dict[str, Any] = {"hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "max_position_embeddings": 2048}


def declare(config: Mapping[str, Any]) -> Model:
    c = Config.of(config, **_DEFAULTS)
    positions = rope(c, partial=0.5)
    attention = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        rope=positions,
        bias=(True, True),
        sources=("q_proj", "k_proj", "v_proj", "dense"),
        qk_norm=LayerNorm(size=c.head_dim, eps=c.number("layer_norm_eps")) if c.flag("qk_layernorm") else None,
        qk_norm_names=("q_layernorm", "k_layernorm"),
    )
    mlp = MLP(
        hidden=c.hidden,
        intermediate_size=c.intermediate_size,
        act=c.activation(),
        bias=True,
        gate=None,
        up="fc1",
        down="fc2",
    )
    norm = LayerNorm(size=c.hidden, eps=c.number("layer_norm_eps"))
    block = (ResidualBlock(before=named(norm, "input_layernorm"), body=Parallel(bodies=(attention, mlp))),)
    return Model(
        embed=Embedding(vocab=c.whole("vocab_size"), hidden=c.hidden),
        blocks=(block,) * c.layers,
        norm=named(norm, "final_layernorm"),
        head=Head(tied=c.flag("tie_word_embeddings"), bias=True),
        max_context=claimed_context(c, positions),
    )
