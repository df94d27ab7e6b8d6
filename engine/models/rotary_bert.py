"""GTE (NewModel) and Jina embeddings 3: post-norm encoders with RoPE and biases; GTE's MLP is gated.

Source: transformers modeling_gte.py, modeling_jina_embeddings_v3.py. Tensors have the names of the original code, which
transformers also uses when it saves (conversion_mapping.py).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.api.errors import CheckpointError
from engine.models.config import Config
from engine.models.labels import classifier, dense
from engine.models.parts import (
    MLP,
    Attention,
    Embedding,
    LayerNorm,
    LinearScaling,
    Lookup,
    Model,
    Pooler,
    ResidualBlock,
    Rope,
    Stage,
    named,
)
from engine.models.rope import rope

_GTE, _JINA = ("New", "Gte"), ("JinaEmbeddingsV3",)
_KINDS = ("Model", "ForSequenceClassification", "ForTokenClassification")
ARCHITECTURES = tuple(f"{family}{kind}" for family in (*_GTE, *_JINA) for kind in _KINDS)

_DEFAULTS: dict[str, Any] = {"hidden_act": "gelu", "max_position_embeddings": 8192, "type_vocab_size": 1}


def declare(config: Mapping[str, Any]) -> Model:
    architecture = config["architectures"][0]
    is_gte = architecture.startswith(_GTE)
    c = Config.of(config, **_DEFAULTS, layer_norm_eps=1e-12 if is_gte else 1e-5)
    for key, value in {"pack_qkv": True, "position_embedding_type": "rope", "layer_norm_type": "layer_norm"}.items():
        if c.values.get(key, value) not in (value, "absolute"):
            raise CheckpointError(f"config.json: {key} is {c.values[key]!r}; supported is {value!r}")
    norm = LayerNorm(size=c.hidden, eps=c.number("layer_norm_eps"))
    fused, out, inside = ("qkv_proj", "o_proj", "attention") if is_gte else ("Wqkv", "out_proj", "mixer")
    attention = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.heads,
        head_dim=c.head_dim,
        rope=_positions(c, 160_000.0 if is_gte else 20_000.0),
        bias=(True, True),
        causal=False,
        sources=(fused, fused, fused, out),
        name=inside,
    )
    size, act = c.intermediate_size, c.activation()
    gated = MLP(
        hidden=c.hidden, intermediate_size=size, act=act, down_bias=True, gate="up_gate_proj", up="up_gate_proj",
        up_first=True,
    )  # fmt: skip
    plain = MLP(hidden=c.hidden, intermediate_size=size, act=act, bias=True, gate=None, up="fc1", down="fc2")
    first, second = ("attn_ln", "mlp_ln") if is_gte else ("norm1", "norm2")
    block = (
        ResidualBlock(body=attention, last=named(norm, first)),
        ResidualBlock(body=gated if is_gte else plain, last=named(norm, second)),
    )
    segments = c.whole("type_vocab_size", least=0)
    return Model(
        embed=Embedding(
            vocab=c.whole("vocab_size"),
            hidden=c.hidden,
            name="embeddings.word_embeddings",
            segments=Lookup(count=segments, name="embeddings.token_type_embeddings") if segments else None,
            norm=named(norm, "embeddings.LayerNorm" if is_gte else "emb_ln"),
        ),
        blocks=(block,) * c.layers,
        norm=None,
        head=None,
        max_context=c.whole("max_position_embeddings"),
        root="" if architecture.endswith("Model") else _root(architecture),
        layers="encoder.layer" if is_gte else "encoder.layers",
        pooler=_pooler(architecture, config, c.hidden, is_gte),
        unread=("pooler.", "lm_head.", "classifier.") if architecture.endswith("Model") else ("pooler.",),
    )


def _root(architecture: str) -> str:
    """Return the name of the encoder in a model with a classifier."""
    return {"New": "new", "Gte": "gte", "Jin": "roberta"}[architecture[:3]]


def _positions(c: Config, theta: float) -> Rope:
    """Return the RoPE. Scaling of type ntk raises the base and divides all frequencies (GTE)."""
    scaling = c.values.get("rope_scaling")
    if not isinstance(scaling, Mapping) or scaling.get("type") != "ntk":
        return rope(c, theta=theta)
    factor = Config(scaling).positive("factor")
    if scaling.get("mixed_b") is not None:
        raise CheckpointError(
            "config.json: rope_scaling.mixed_b is not supported; remove it, or use another checkpoint"
        )
    plain = rope(Config({key: value for key, value in c.values.items() if key != "rope_scaling"}), theta=theta)
    return replace(plain, theta=plain.theta * factor, scaling=LinearScaling(factor=factor ** (2 / plain.dim)))


def _pooler(architecture: str, config: Mapping[str, Any], hidden: int, is_gte: bool) -> Pooler:
    if architecture.endswith("Model"):
        return Pooler(task="embed", width=hidden, pool="mean", activation="normalize")
    each_token = architecture.endswith("ForTokenClassification")
    labels = len(classifier(config, "first", (), each_token=each_token).labels)
    out = dense("", "classifier", hidden, labels)
    stages: tuple[Stage, ...] = (out,)
    if not each_token and is_gte:
        stages = (dense(f"{_root(architecture)}.pooler", "dense", hidden, hidden, act="tanh"), out)
    elif not each_token:
        inner = dense("classifier", "dense", hidden, hidden, act="tanh")
        stages = (inner, dense("classifier", "out_proj", hidden, labels))
    return classifier(config, "first", stages, each_token=each_token)
