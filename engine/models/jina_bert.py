"""Jina embeddings 2 (JinaBERT): post-norm encoders with ALiBi in both directions and gated MLPs.

Source: modeling_bert.py of the repository jinaai/jina-bert-implementation; arXiv:2310.19923. Checkpoints name the
architecture JinaBertForMaskedLM, whose head is not used: they embed, with the mean of all tokens.
"""

from collections.abc import Mapping
from typing import Any

from engine.api.errors import CheckpointError
from engine.models.config import Config, shown
from engine.models.parts import (
    MLP,
    Alibi,
    Attention,
    Embedding,
    LayerNorm,
    Lookup,
    Model,
    Pooler,
    ResidualBlock,
    named,
)

ARCHITECTURES = ("JinaBertModel", "JinaBertForMaskedLM")

_DEFAULTS: dict[str, Any] = {
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 8192,
    "type_vocab_size": 2,
}
_ACTS = {"geglu": "gelu", "reglu": "relu"}


def declare(config: Mapping[str, Any]) -> Model:
    c = Config.of(config, **_DEFAULTS)
    kind = shown(c.values.get("feed_forward_type", "original")).strip("'")
    if c.values.get("position_embedding_type", "absolute") != "alibi" or kind not in _ACTS:
        raise CheckpointError(
            f"config.json: position_embedding_type is {shown(c.values.get('position_embedding_type'))} and "
            f"feed_forward_type {kind!r}; supported are alibi with {' or '.join(_ACTS)}"
        )
    norm = LayerNorm(size=c.hidden, eps=c.number("layer_norm_eps"))
    attention = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.heads,
        head_dim=c.head_dim,
        rope=None,
        alibi=Alibi(),
        bias=(True, True),
        causal=False,
        sources=("self.query", "self.key", "self.value", "output.dense"),
        name="attention",
    )
    mlp = MLP(
        hidden=c.hidden,
        intermediate_size=c.intermediate_size,
        act=_ACTS[kind],
        down_bias=True,
        gate="gated_layers",
        up="gated_layers",
        down="wo",
    )
    block = (
        ResidualBlock(body=attention, last=named(norm, "attention.output.LayerNorm")),
        ResidualBlock(body=mlp, last=named(norm, "mlp.layernorm")),
    )
    return Model(
        embed=Embedding(
            vocab=c.whole("vocab_size"),
            hidden=c.hidden,
            name="embeddings.word_embeddings",
            segments=Lookup(count=c.whole("type_vocab_size"), name="embeddings.token_type_embeddings"),
            norm=named(norm, "embeddings.LayerNorm"),
        ),
        blocks=(block,) * c.layers,
        norm=None,
        head=None,
        max_context=c.whole("max_position_embeddings"),
        root="" if config["architectures"][0] == "JinaBertModel" else "bert",
        layers="encoder.layer",
        pooler=Pooler(task="embed", width=c.hidden, pool="mean", activation="normalize"),
        unread=("pooler.", "cls.", "embeddings.position_ids"),
    )
