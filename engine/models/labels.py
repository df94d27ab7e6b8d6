"""Labels of a classifier and the activation of its logits, from the configuration."""

from collections.abc import Mapping
from typing import Any, Literal

from engine.api.errors import CheckpointError
from engine.models.config import MAX_LABELS, Config
from engine.models.parts import Dense, Linear, Pool, Pooler, Rows, Stage

TRAINED_AS = {"regression": "none", "single_label_classification": "softmax", "multi_label_classification": "sigmoid"}
FUNCTIONS = {"identity": "none", "sigmoid": "sigmoid", "softmax": "softmax"}
UNNAMED = 2  # number of labels if the configuration has none

Activation = Literal["none", "softmax", "sigmoid"]


def labels_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the labels by number. Raises CheckpointError if the keys of id2label are not 0, 1, …"""
    named = config.get("id2label")
    if not isinstance(named, dict) or not named:
        count = Config.of({**config, "num_labels": config.get("num_labels") or UNNAMED})
        return tuple(f"LABEL_{number}" for number in range(count.whole("num_labels", most=MAX_LABELS)))
    try:
        numbered = {int(number): str(label) for number, label in named.items()}
    except (ValueError, OverflowError):
        numbered = {}
    if sorted(numbered) != list(range(len(named))):
        raise CheckpointError(f"config.json: id2label has the keys {sorted(named)}; they must number labels from 0 on")
    return tuple(numbered[number] for number in range(len(numbered)))


def activation_of(config: Mapping[str, Any]) -> Activation:
    """Return the activation: sentence-transformers' setting of a cross-encoder, else by the classifier's problem type,
    else sigmoid for one label, which is a score, and softmax for several."""
    own = config.get("sentence_transformers")
    named = own.get("activation_fn") if isinstance(own, dict) else None
    named = named or config.get("sbert_ce_default_activation_function")
    function = str(named or "").rpartition(".")[2].lower()
    found = FUNCTIONS.get(function) or TRAINED_AS.get(str(config.get("problem_type")))
    if named and function not in FUNCTIONS:
        raise CheckpointError(
            f"config.json: the activation {named!r} is not supported; supported are {', '.join(FUNCTIONS)}"
        )
    if found is None:
        found = "sigmoid" if len(labels_of(config)) == 1 else "softmax"
    return found  # type: ignore[return-value]  # the values of the tables above


def dense(path: str, source: str, inputs: int, outputs: int, *, act: str = "none", bias: bool = True) -> Dense:
    """y = act(x W^T (+ b)) of the tensors `path`.`source`."""
    rows = Rows(source=source, units=outputs)
    return Dense(linear=Linear(rows=(rows,), inputs=inputs, split=None, bias=bias), act=act, path=path)


def classifier(config: Mapping[str, Any], pool: Pool, stages: tuple[Stage, ...], *, each_token: bool) -> Pooler:
    """Return the pooler of a classifier for a prompt, or for each of its tokens."""
    labels = labels_of(config)
    return Pooler(
        task="token_classify" if each_token else "classify",
        width=len(labels),
        pool=pool,
        stages=stages,
        activation="softmax" if each_token else activation_of(config),
        labels=labels,
    )
