"""EuroBERT: encoders with Llama's blocks and attention in both directions.

Source: transformers modeling_eurobert.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.api.errors import CheckpointError
from engine.models import llama
from engine.models.config import shown
from engine.models.labels import classifier, dense
from engine.models.parts import Attention, Block, Model, Pool, Pooler, Stage

ARCHITECTURES = (
    "EuroBertModel",
    "EuroBertForMaskedLM",
    "EuroBertForSequenceClassification",
    "EuroBertForTokenClassification",
)
_DEFAULTS = {"max_position_embeddings": 8192, "rms_norm_eps": 1e-5}
_POOLS: Mapping[str, Pool] = {"bos": "first", "mean": "mean"}


def declare(config: Mapping[str, Any]) -> Model:
    architecture = config["architectures"][0]
    model = llama.declare({**_DEFAULTS, **config, "architectures": ["LlamaForCausalLM"]})
    return replace(
        model,
        blocks=tuple(_in_both_directions(block) for block in model.blocks),
        head=None,
        root="" if architecture == "EuroBertModel" else "model",
        pooler=_pooler(architecture, config, model.embed.hidden),
        unread=("lm_head.",),
    )


def _in_both_directions(block: Block) -> Block:
    mixer, mlp = block
    assert isinstance(mixer.body, Attention), "Llama's layers begin with attention"
    return replace(mixer, body=replace(mixer.body, causal=False)), mlp


def _pooler(architecture: str, config: Mapping[str, Any], hidden: int) -> Pooler:
    if architecture in ("EuroBertModel", "EuroBertForMaskedLM"):
        return Pooler(task="embed", width=hidden, pool="mean", activation="normalize")
    each_token = architecture.endswith("ForTokenClassification")
    pooling = "mean" if each_token else config.get("classifier_pooling", "late")
    if not isinstance(pooling, str) or pooling not in _POOLS:
        raise CheckpointError(
            f"config.json: classifier_pooling is {shown(pooling)}; supported are {' and '.join(_POOLS)}"
        )
    labels = len(classifier(config, "mean", (), each_token=each_token).labels)
    stages: tuple[Stage, ...] = (dense("", "classifier", hidden, labels),)
    if not each_token:
        stages = (dense("", "dense", hidden, hidden, act="gelu"), *stages)
    return classifier(config, _POOLS[pooling], stages, each_token=each_token)
