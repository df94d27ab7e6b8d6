"""BLOOM and BLOOMZ: ALiBi, a norm of the embedding, layer norms, biases everywhere; q, k, v fused by head.

Source: transformers modeling_bloom.py, which adds slope · position of the key; softmax turns both biases into the same
weights. Residuals after the layer norm are not supported.
"""

from collections.abc import Mapping
from typing import Any

from engine.api.errors import CheckpointError
from engine.models.config import Config
from engine.models.parts import MLP, Alibi, Attention, Embedding, Head, LayerNorm, Model, ResidualBlock, named

ARCHITECTURES = ("BloomForCausalLM",)

_NAMES = {
    "hidden_size": "n_embed",
    "max_position_embeddings": "seq_length",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
_DEFAULTS: dict[str, Any] = {"layer_norm_epsilon": 1e-5, "max_position_embeddings": 2048, "tie_word_embeddings": True}


def declare(config: Mapping[str, Any]) -> Model:
    c = Config.of(config, {key: name for key, name in _NAMES.items() if name in config}, **_DEFAULTS)
    if c.flag("apply_residual_connection_post_layernorm"):
        raise CheckpointError(
            "config.json: apply_residual_connection_post_layernorm is true; supported are residuals before the norm"
        )
    fused = "query_key_value"
    attention = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.heads,
        head_dim=c.head_dim,
        rope=None,
        alibi=Alibi(),
        bias=(True, True),
        sources=(fused, fused, fused, "dense"),
        groups=c.heads,
        name="self_attention",
    )
    mlp = MLP(
        hidden=c.hidden,
        intermediate_size=4 * c.hidden,
        act="gelu_tanh",
        bias=True,
        gate=None,
        up="dense_h_to_4h",
        down="dense_4h_to_h",
    )
    norm = LayerNorm(size=c.hidden, eps=c.number("layer_norm_epsilon"))
    block = (
        ResidualBlock(before=named(norm, "input_layernorm"), body=attention),
        ResidualBlock(before=named(norm, "post_attention_layernorm"), body=mlp),
    )
    return Model(
        embed=Embedding(
            vocab=c.whole("vocab_size"),
            hidden=c.hidden,
            name="word_embeddings",
            norm=named(norm, "word_embeddings_layernorm"),
        ),
        blocks=(block,) * c.layers,
        norm=named(norm, "ln_f"),
        head=Head(tied=c.flag("tie_word_embeddings")),
        max_context=c.whole("max_position_embeddings"),
        root="transformer",
        layers="h",
    )
