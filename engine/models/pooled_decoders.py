"""Pooling decoders: bare models, which embed, and models with a linear layer on the last token, which classify.

Source: transformers modeling_layers.py (GenericForSequenceClassification). The blocks are those of the causal model.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.models import gemma, llama, qwen3
from engine.models.labels import classifier, dense
from engine.models.parts import Model, Pool, Pooler, is_bidirectional

_FAMILIES = {"Llama": llama, "Mistral": llama, "Qwen2": llama, "Qwen3": qwen3, "Gemma2": gemma, "Gemma3Text": gemma}
_CAUSAL = {"Gemma3Text": "Gemma3ForCausalLM"}
_BARE, _CLASSIFIER = "Model", "ForSequenceClassification"
ARCHITECTURES = tuple(f"{family}{kind}" for family in _FAMILIES for kind in (_BARE, _CLASSIFIER))
UNREAD = ("lm_head.",)


def declare(config: Mapping[str, Any]) -> Model:
    architecture = config["architectures"][0]
    is_bare = architecture.endswith(_BARE)
    family = architecture.removesuffix(_BARE if is_bare else _CLASSIFIER)
    causal = _CAUSAL.get(family, f"{family}ForCausalLM")
    model: Model = _FAMILIES[family].declare({**config, "architectures": [causal]})
    hidden = model.embed.hidden
    if is_bare:
        return embedder(replace(model, root=""))
    labels = len(classifier(config, "last", (), each_token=False).labels)
    stages = (dense("", "score", hidden, labels, bias=False),)
    pooler = classifier(config, "last", stages, each_token=False)
    head = () if model.head is None else (f"{model.head.name}.weight", f"{model.head.name}.bias")
    return replace(model, head=None, pooler=pooler, unread=(*model.unread, *UNREAD, *head))


def embedder(model: Model) -> Model:
    """Replace the head by a pooler: the state of the last token is the vector of the prompt, or the mean of all states
    if attention is bidirectional."""
    pool: Pool = "mean" if is_bidirectional(model) else "last"
    pooler = Pooler(task="embed", width=model.embed.hidden, pool=pool, activation="normalize")
    head = () if model.head is None else (f"{model.head.name}.weight", f"{model.head.name}.bias")
    return replace(model, head=None, pooler=pooler, unread=(*model.unread, *UNREAD, *head))
