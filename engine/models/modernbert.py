"""ModernBERT: an encoder with RoPE whose layers alternate between full and window attention, with separate RoPE bases.

Source: transformers modeling_modernbert.py. The first layer has no norm before its attention.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.models.config import Config
from engine.models.labels import classifier, dense
from engine.models.parts import (
    MLP,
    Attention,
    Block,
    Embedding,
    LayerNorm,
    Model,
    Pool,
    PooledNorm,
    Pooler,
    ResidualBlock,
    named,
)
from engine.models.rope import rope

ARCHITECTURES = ("ModernBertModel", "ModernBertForSequenceClassification", "ModernBertForTokenClassification")

_DEFAULTS: dict[str, Any] = {
    "classifier_activation": "gelu",
    "classifier_pooling": "cls",
    "global_attn_every_n_layers": 3,
    "hidden_activation": "gelu",
    "local_attention": 128,
    "max_position_embeddings": 8192,
    "norm_eps": 1e-5,
}


def declare(config: Mapping[str, Any]) -> Model:
    c = Config.of(config, **_DEFAULTS)
    norm = LayerNorm(size=c.hidden, eps=c.number("norm_eps"), bias=c.flag("norm_bias"))
    bases = {"full_attention": ("global_rope_theta", 160_000.0), "sliding_attention": ("local_rope_theta", 10_000.0)}
    attention = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.heads,
        head_dim=c.head_dim,
        rope=None,
        bias=(c.flag("attention_bias"), c.flag("attention_bias")),
        causal=False,
        sources=("Wqkv", "Wqkv", "Wqkv", "Wo"),
        name="attn",
    )
    bodies = {}
    for kind, (key, base) in bases.items():
        theta = c.number(key) if c.values.get(key) is not None else base
        # A position attends to half of local_attention on either side.
        window = c.whole("local_attention") // 2 + 1 if kind == "sliding_attention" else None
        bodies[kind] = replace(attention, rope=rope(c, theta=theta, kind=kind), window=window)
    mlp = MLP(
        hidden=c.hidden,
        intermediate_size=c.intermediate_size,
        act=c.activation("hidden_activation"),
        bias=c.flag("mlp_bias"),
        gate="Wi",
        up="Wi",
        down="Wo",
    )

    def block(index: int, kind: str) -> Block:
        return (
            ResidualBlock(before=named(norm, "attn_norm") if index else None, body=bodies[kind]),
            ResidualBlock(before=named(norm, "mlp_norm"), body=mlp),
        )

    every = c.whole("global_attn_every_n_layers")
    usual = tuple("sliding_attention" if i % every else "full_attention" for i in range(c.layers))
    architecture = config["architectures"][0]
    return Model(
        embed=Embedding(
            vocab=c.whole("vocab_size"),
            hidden=c.hidden,
            name="embeddings.tok_embeddings",
            norm=named(norm, "embeddings.norm"),
        ),
        blocks=tuple(block(index, kind) for index, kind in enumerate(c.layer_types(usual))),
        norm=named(norm, "final_norm"),
        head=None,
        max_context=c.whole("max_position_embeddings"),
        root="" if architecture == "ModernBertModel" else "model",
        pooler=_pooler(architecture, config, c, norm),
        unread=("head.", "decoder."),
    )


def _pooler(architecture: str, config: Mapping[str, Any], c: Config, norm: LayerNorm) -> Pooler:
    if architecture == "ModernBertModel":
        return Pooler(task="embed", width=c.hidden, pool="mean", activation="normalize")
    act, bias = c.activation("classifier_activation"), c.flag("classifier_bias")
    pool: Pool = "mean" if c.values["classifier_pooling"] == "mean" else "first"
    each_token = architecture.endswith("ForTokenClassification")
    labels = len(classifier(config, pool, (), each_token=each_token).labels)
    stages = (
        dense("head", "dense", c.hidden, c.hidden, act=act, bias=bias),
        PooledNorm(norm=named(norm, "norm"), path="head"),
        dense("", "classifier", c.hidden, labels),
    )
    return classifier(config, pool, stages, each_token=each_token)
