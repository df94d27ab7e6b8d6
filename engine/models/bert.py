"""BERT, RoBERTa and XLM-RoBERTa: post-norm encoders with learned positions.

Source: transformers modeling_bert.py, modeling_roberta.py. RoBERTa's positions start after the padding id.
"""

from collections.abc import Mapping
from typing import Any

from engine.api.errors import CheckpointError
from engine.models.config import Config
from engine.models.labels import classifier, dense
from engine.models.parts import MLP, Attention, Embedding, LayerNorm, Lookup, Model, Pooler, ResidualBlock, Stage, named

_BERT, _ROBERTA = ("Bert",), ("Roberta", "XLMRoberta")
_KINDS = ("Model", "ForSequenceClassification", "ForTokenClassification")
ARCHITECTURES = tuple(f"{family}{kind}" for family in (*_BERT, *_ROBERTA) for kind in _KINDS)

_DEFAULTS: dict[str, Any] = {
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
}


def declare(config: Mapping[str, Any]) -> Model:
    architecture = config["architectures"][0]
    is_roberta = architecture.startswith(_ROBERTA)
    c = Config.of(config, **_DEFAULTS, **({"pad_token_id": 1} if is_roberta else {}))
    kind = c.values.get("position_embedding_type") or "absolute"
    if kind != "absolute" or c.flag("is_decoder"):
        what = "is_decoder is true" if c.flag("is_decoder") else f"position_embedding_type is {kind!r}"
        raise CheckpointError(f"config.json: {what}; supported are encoders with absolute positions")
    norm = LayerNorm(size=c.hidden, eps=c.number("layer_norm_eps"))
    attention = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.heads,
        head_dim=c.head_dim,
        rope=None,
        bias=(True, True),
        causal=False,
        sources=("self.query", "self.key", "self.value", "output.dense"),
        name="attention",
    )
    mlp = MLP(
        hidden=c.hidden,
        intermediate_size=c.intermediate_size,
        act=c.activation(),
        bias=True,
        gate=None,
        up="intermediate.dense",
        down="output.dense",
        name="",
    )
    block = (
        ResidualBlock(body=attention, last=named(norm, "attention.output.LayerNorm")),
        ResidualBlock(body=mlp, last=named(norm, "output.LayerNorm")),
    )
    offset = c.whole("pad_token_id", least=0) + 1 if is_roberta else 0
    count = c.whole("max_position_embeddings")
    root = "" if architecture.endswith("Model") else ("roberta" if is_roberta else "bert")
    return Model(
        embed=Embedding(
            vocab=c.whole("vocab_size"),
            hidden=c.hidden,
            name="embeddings.word_embeddings",
            positions=Lookup(count=count, name="embeddings.position_embeddings", offset=offset),
            segments=Lookup(count=c.whole("type_vocab_size"), name="embeddings.token_type_embeddings"),
            norm=named(norm, "embeddings.LayerNorm"),
        ),
        blocks=(block,) * c.layers,
        norm=None,
        head=None,
        max_context=count - offset,
        root=root,
        layers="encoder.layer",
        pooler=_pooler(architecture, config, c.hidden, is_roberta),
        unread=("pooler.", "embeddings.position_ids", "embeddings.token_type_ids", "cls.", "lm_head."),
    )


def _pooler(architecture: str, config: Mapping[str, Any], hidden: int, is_roberta: bool) -> Pooler:
    if architecture.endswith("Model"):
        return Pooler(task="embed", width=hidden, pool="mean", activation="normalize")
    labels = len(classifier(config, "first", (), each_token=False).labels)
    out = dense("", "classifier", hidden, labels)
    if architecture.endswith("ForTokenClassification"):
        return classifier(config, "first", (out,), each_token=True)
    stages: tuple[Stage, ...] = (dense("bert.pooler", "dense", hidden, hidden, act="tanh"), out)
    if is_roberta:
        inner = dense("classifier", "dense", hidden, hidden, act="tanh")
        stages = (inner, dense("classifier", "out_proj", hidden, labels))
    return classifier(config, "first", stages, each_token=False)
