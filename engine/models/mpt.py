"""MPT: ALiBi, layer norms without biases, no biases; q, k, v in one tensor.

Source: transformers modeling_mpt.py, and modeling_mpt.py of the checkpoint mosaicml/mpt-7b for the options of
`attn_config` that transformers ignores.
"""

from collections.abc import Mapping
from typing import Any

from engine.api.errors import CheckpointError
from engine.models.config import Config, shown
from engine.models.parts import MLP, Alibi, Attention, Embedding, Head, LayerNorm, Model, ResidualBlock, named

ARCHITECTURES = ("MPTForCausalLM", "MptForCausalLM")
"""The original checkpoints have the first name, transformers writes the second."""

_NAMES = {
    "hidden_size": "d_model",
    "max_position_embeddings": "max_seq_len",
    "num_attention_heads": "n_heads",
    "num_hidden_layers": "n_layers",
}
_DEFAULTS: dict[str, Any] = {
    "expansion_ratio": 4,
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": 2048,
    "no_bias": True,
    "norm_type": "low_precision_layernorm",
    "tie_word_embeddings": True,
}
_ATTENTION: dict[str, Any] = {"alibi": True, "alibi_bias_max": 8, "attn_type": "multihead_attention"}
# Supported values; other values change the computation.
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "logit_scale": (None, 1.0),
    "no_bias": (True,),
    "norm_type": ("low_precision_layernorm", "layernorm"),
}
_SUPPORTED_ATTENTION: dict[str, tuple[Any, ...]] = {
    "alibi": (True,),
    "attn_type": ("multihead_attention",),
    "clip_qkv": (None,),
    "prefix_lm": (None, False),
    "qk_ln": (None, False),
    "rope": (None, False),
}


def declare(config: Mapping[str, Any]) -> Model:
    c = Config.of(config, _NAMES, **_DEFAULTS)
    stored = {} if c.values.get("attn_config") is None else c.values["attn_config"]
    if not isinstance(stored, dict):
        raise CheckpointError(f"config.json: attn_config is {shown(stored)}; it must be an object")
    own = Config({**_ATTENTION, **stored}, {key: f"attn_config.{key}" for key in (*stored, *_ATTENTION)})
    _check(c, _SUPPORTED)
    _check(own, _SUPPORTED_ATTENTION)
    attention = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.heads,
        head_dim=c.head_dim,
        rope=None,
        scale=own.number_or_none("softmax_scale"),
        alibi=Alibi(max_bias=own.positive("alibi_bias_max")),
        sources=("Wqkv", "Wqkv", "Wqkv", "out_proj"),
        name="attn",
    )
    inner = c.whole("expansion_ratio") * c.hidden
    mlp = MLP(hidden=c.hidden, intermediate_size=inner, act="gelu", gate=None, name="ffn")
    norm = LayerNorm(size=c.hidden, eps=c.number("layer_norm_epsilon"), bias=False)
    block = (
        ResidualBlock(before=named(norm, "norm_1"), body=attention),
        ResidualBlock(before=named(norm, "norm_2"), body=mlp),
    )
    return Model(
        embed=Embedding(vocab=c.whole("vocab_size"), hidden=c.hidden, name="wte"),
        blocks=(block,) * c.layers,
        norm=named(norm, "norm_f"),
        head=Head(tied=c.flag("tie_word_embeddings")),
        max_context=c.whole("max_position_embeddings"),
        root="transformer",
        layers="blocks",
    )


def _check(c: Config, supported: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise CheckpointError for options with which the model would be computed otherwise."""
    for key, values in supported.items():
        if (found := c.values.get(key)) not in values:
            allowed = " or ".join("null" if value is None else shown(value) for value in values)
            raise CheckpointError(f"config.json: {c.name(key)} is {shown(found)}; supported is {allowed}")
