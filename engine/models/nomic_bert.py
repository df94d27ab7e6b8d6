"""NomicBERT: a post-norm encoder with RoPE and gated MLPs (nomic-embed-text).

nomic-embed-text-v2-moe, which is read from GGUF files, has biases, MLPs without a gate, and routed experts instead of
them in every second layer.

Source: transformers modeling_nomic_bert.py. Tensors have the names of the original code, which transformers also uses
when it saves (conversion_mapping.py). The keys of config.json may be those of either. Source of the experts:
src/models/bert.cpp of llama.cpp; the files have no bias of their sum.
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
    Block,
    Embedding,
    Experts,
    LayerNorm,
    Lookup,
    Model,
    Pooler,
    ResidualBlock,
    named,
)
from engine.models.rope import rope

ARCHITECTURES = ("NomicBertModel", "NomicBertForSequenceClassification", "NomicBertForTokenClassification")

_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 2048,
    "moe_every_n_layers": 0,
    "type_vocab_size": 2,
}
_OLD_KEYS = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
}
_OLD_ACTS = {"swiglu": "silu", "geglu": "gelu"}
# Options of the original code that no supported checkpoint uses: the required values.
_REFUSED: dict[str, Any] = {
    "moe_every_n_layers": 0,
    "prenorm": False,
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "use_rms_norm": False,
}


def declare(config: Mapping[str, Any]) -> Model:
    c = Config.of(_respelled(config) if "n_embd" in config else config, **_DEFAULTS)
    norm, period = LayerNorm(size=c.hidden, eps=c.number("layer_norm_eps")), c.whole("moe_every_n_layers", least=0)
    attention = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.heads,
        head_dim=c.head_dim,
        rope=rope(c, theta=1000.0),
        bias=(period > 0, period > 0),
        causal=False,
        sources=("Wqkv", "Wqkv", "Wqkv", "out_proj"),
        name="attn",
    )
    mlp = MLP(
        hidden=c.hidden, intermediate_size=c.intermediate_size, act=c.activation(), gate="fc12", up="fc11", down="fc2"
    )
    if period:
        mlp = replace(mlp, gate=None, up="fc1", bias=True, down_bias=True)

    def block(layer: int) -> Block:
        body = _experts(c) if period and layer % period == 1 else mlp
        return (
            ResidualBlock(body=attention, last=named(norm, "norm1")),
            ResidualBlock(body=body, last=named(norm, "norm2")),
        )

    architecture = config["architectures"][0]
    return Model(
        embed=Embedding(
            vocab=c.whole("vocab_size"),
            hidden=c.hidden,
            name="embeddings.word_embeddings",
            segments=Lookup(count=c.whole("type_vocab_size"), name="embeddings.token_type_embeddings"),
            norm=named(norm, "emb_ln"),
        ),
        blocks=tuple(map(block, range(c.layers))),
        norm=None,
        head=None,
        max_context=c.whole("max_position_embeddings"),
        root="" if architecture == "NomicBertModel" else "nomic_bert",
        layers="encoder.layers",
        pooler=_pooler(architecture, config, c.hidden),
        unread=("pooler.", "cls."),
    )


def _experts(c: Config) -> Experts:
    num_experts, top_k = c.experts()
    return Experts(
        hidden=c.hidden,
        intermediate_size=c.intermediate_size,
        num_experts=num_experts,
        top_k=top_k,
        scores="softmax",
        act=c.activation(),
        router="router.layer",
        gate=None,
    )


def _respelled(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with the keys of transformers. Raises CheckpointError for unsupported options."""
    for key, served in _REFUSED.items():
        if config.get(key, served) != served:
            is_sparse = key == "moe_every_n_layers"
            more = ", and mixtures of experts from a GGUF file without config.json" if is_sparse else ""
            raise CheckpointError(f"config.json: {key} is {config[key]!r}; supported is {served!r}{more}")
    named = {_OLD_KEYS.get(key, key): value for key, value in config.items()}
    act = config.get("activation_function", "swiglu")
    return {**named, "hidden_act": _OLD_ACTS.get(act, act) if isinstance(act, str) else act}


def _pooler(architecture: str, config: Mapping[str, Any], hidden: int) -> Pooler:
    if architecture == "NomicBertModel":
        return Pooler(task="embed", width=hidden, pool="mean", activation="normalize")
    each_token = architecture.endswith("ForTokenClassification")
    labels = len(classifier(config, "first", (), each_token=each_token).labels)
    out = dense("", "classifier", hidden, labels)
    pooled = dense("nomic_bert.pooler", "dense", hidden, hidden, act="tanh")
    return classifier(config, "first", (out,) if each_token else (pooled, out), each_token=each_token)
