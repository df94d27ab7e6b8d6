"""NomicBERT: a post-norm encoder with RoPE and gated MLPs (nomic-embed-text).

Source: transformers modeling_nomic_bert.py. Tensors have the names of the original code, which transformers also uses
when it saves (conversion_mapping.py). The keys of config.json may be those of either.
"""

from collections.abc import Mapping
from typing import Any

from engine.api.errors import CheckpointError
from engine.models.config import Config
from engine.models.labels import classifier, dense
from engine.models.parts import MLP, Attention, Embedding, LayerNorm, Lookup, Model, Pooler, ResidualBlock, named
from engine.models.rope import rope

ARCHITECTURES = ("NomicBertModel", "NomicBertForSequenceClassification", "NomicBertForTokenClassification")

_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 2048,
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
# Options of the original code that no published checkpoint uses: the required values.
_REFUSED: dict[str, Any] = {
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
    norm = LayerNorm(size=c.hidden, eps=c.number("layer_norm_eps"))
    attention = Attention(
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.heads,
        head_dim=c.head_dim,
        rope=rope(c, theta=1000.0),
        causal=False,
        sources=("Wqkv", "Wqkv", "Wqkv", "out_proj"),
        name="attn",
    )
    mlp = MLP(
        hidden=c.hidden, intermediate_size=c.intermediate_size, act=c.activation(), gate="fc12", up="fc11", down="fc2"
    )
    block = (
        ResidualBlock(body=attention, last=named(norm, "norm1")),
        ResidualBlock(body=mlp, last=named(norm, "norm2")),
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
        blocks=(block,) * c.layers,
        norm=None,
        head=None,
        max_context=c.whole("max_position_embeddings"),
        root="" if architecture == "NomicBertModel" else "nomic_bert",
        layers="encoder.layers",
        pooler=_pooler(architecture, config, c.hidden),
        unread=("pooler.", "cls."),
    )


def _respelled(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with the keys of transformers. Raises CheckpointError for unsupported options."""
    for key, served in _REFUSED.items():
        if config.get(key, served) != served:
            raise CheckpointError(f"config.json: {key} is {config[key]!r}; supported is {served!r}")
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
