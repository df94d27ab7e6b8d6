"""StarCoder2: layer norms with bias, biases everywhere, an MLP without gate, sliding window.

Source: transformers modeling_starcoder2.py.
"""

from collections.abc import Mapping
from typing import Any

from engine.models.config import Config
from engine.models.parts import MLP, Attention, Embedding, Head, LayerNorm, Model, ResidualBlock, named
from engine.models.rope import claimed_context, rope

ARCHITECTURES = ("Starcoder2ForCausalLM",)

_DEFAULTS: dict[str, Any] = {
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 4096,
    "norm_epsilon": 1e-5,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "use_bias": True,
}


def declare(config: Mapping[str, Any]) -> Model:
    c = Config.of(config, **_DEFAULTS)
    bias, positions = c.flag("use_bias"), rope(c)
    attention = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        rope=positions,
        bias=(bias, bias),
        window=c.window(),
    )
    mlp = MLP(
        hidden=c.hidden,
        intermediate_size=c.intermediate_size,
        act=c.activation(),
        bias=bias,
        gate=None,
        up="c_fc",
        down="c_proj",
    )
    norm = LayerNorm(size=c.hidden, eps=c.number("norm_epsilon"))
    block = (
        ResidualBlock(before=named(norm, "input_layernorm"), body=attention),
        ResidualBlock(before=named(norm, "post_attention_layernorm"), body=mlp),
    )
    return Model(
        embed=Embedding(vocab=c.whole("vocab_size"), hidden=c.hidden),
        blocks=(block,) * c.layers,
        norm=named(norm, "norm"),
        head=Head(tied=c.flag("tie_word_embeddings")),
        max_context=claimed_context(c, positions),
    )
