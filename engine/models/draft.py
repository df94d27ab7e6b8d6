"""Models that draft for speculative decoding: a second checkpoint, an EAGLE head, or the prediction heads of the served
checkpoint."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from engine.api.config import SpeculationMethod
from engine.api.errors import CheckpointError, ConfigError
from engine.models.checkpoint import Checkpoint, read_checkpoint, unstacked
from engine.models.eagle import EagleMethod, kept_layers, read_eagle
from engine.models.headers import TensorInfo
from engine.models.parts import FusedStates, Model, Predictor, recurrents
from engine.models.quantized import read_quantization
from engine.models.sources import join, prediction_path
from engine.text.tokenizer import Tokenizer


def with_drafts(
    target: Checkpoint, method: SpeculationMethod, path: str, max_context: int = 0, *, tokens: int
) -> Checkpoint:
    """Return the checkpoint with the model or the heads that draft, if the method has some. path: of the draft model or
    the EAGLE head. tokens: maximum of a draft; further prediction heads are not used. Raises CheckpointError or
    ConfigError if it does not suit the target."""
    match method:
        case "mtp":
            return _with_prediction_heads(target, tokens)
        case "draft":
            return replace(target, draft=read_draft(path, target, max_context))
        case "eagle" | "eagle3":
            if not Path(path).exists():
                raise CheckpointError(f"{path}: no such directory; set speculation.model to the folder of the head")
            return _with_eagle(target, method, Path(path))
        case _:
            return target


def _with_prediction_heads(target: Checkpoint, most: int) -> Checkpoint:
    heads, model = prediction_heads(target, most), target.model
    assert model.predictor is not None, "checked before"
    layers = (len(model.blocks),) if model.predictor.before_norm else ()
    draft = None
    for head in reversed(heads):
        draft = replace(head, draft=draft)
    return replace(target, draft=draft, model=replace(model, kept_layers=layers))


def _with_eagle(target: Checkpoint, method: EagleMethod, path: Path) -> Checkpoint:
    head = read_eagle(str(path), target, method)
    if method == "eagle":
        return replace(target, draft=head)
    layers, part = kept_layers(path, target.model), head.model.prediction_input
    if isinstance(part, FusedStates) and len(layers) != part.layers:
        raise CheckpointError(
            f"{path}: fc reads the states of {part.layers} layers, and config.json selects {len(layers)}; the head is "
            "of another model"
        )
    return replace(target, draft=head, model=replace(target.model, kept_layers=layers))


def read_draft(path: str, target: Checkpoint, max_context: int = 0) -> Checkpoint:
    """Read and check the draft model of a target. Raises CheckpointError for a model that cannot draft, or of another
    vocabulary, ConfigError for one whose context is shorter than `max_context`."""
    if not Path(path).exists():
        raise CheckpointError(f"{path}: no such directory; set speculation.model to the folder of a draft model")
    draft = read_checkpoint(path)
    problem = _target_problem(target.model) or draft_problem(draft.model) or _vocabulary_problem(target, draft)
    if problem:
        raise CheckpointError(f"{draft.path}: {problem}")
    if draft.model.max_context < max_context:
        raise ConfigError(
            f"{draft.path}: the draft model supports {draft.model.max_context} tokens, fewer than "
            f"model.max_context={max_context}; lower model.max_context to that"
        )
    return draft


def prediction_heads(target: Checkpoint, most: int) -> tuple[Checkpoint, ...]:
    """Return the prediction heads of a checkpoint that drafts of `most` tokens use, as checkpoints of their own with
    the same embedding. Raises CheckpointError if there are none."""
    predictor = target.model.predictor
    if predictor is None:
        raise CheckpointError(
            f"{target.path}: {target.architecture} has no prediction heads that are supported; set "
            "speculation.method to another value"
        )
    number = next((number for number in range(most) if not _stored(target, predictor, number)), most)
    if not number:
        raise CheckpointError(
            f"{target.path}: the checkpoint has no tensors of prediction heads "
            f"({predictor.names[0][0].format(predictor.first)}…); set speculation.method to another value"
        )
    return tuple(_prediction_head(target, predictor, one) for one in range(number))


def _stored(target: Checkpoint, predictor: Predictor, number: int) -> bool:
    """Return whether the checkpoint has tensors of this head."""
    own = tuple(before for before in _names(target, predictor, number) if before not in _names(target, predictor, -1))
    return any(name.startswith(own) for name in target.tensors)


def _names(target: Checkpoint, predictor: Predictor, number: int) -> dict[str, str]:
    """Return the beginnings of the names of a head's tensors, and those in its layer. `Predictor.names` are names of a
    whole model. In this checkpoint, the text model may have another prefix."""
    roots = predictor.model.root, target.model.root
    return {_rerooted(before.format(predictor.first + number), *roots): after for before, after in predictor.names}


def _prediction_head(target: Checkpoint, predictor: Predictor, number: int) -> Checkpoint:
    declared = (predictor.model, *predictor.further)
    model = declared[number] if number < len(declared) else predictor.model
    head, roots = model.head, (model.root, target.model.root)
    if head is not None and not model.shares_head:
        head = replace(head, name=_rerooted(head.name, *roots))
    model = replace(model, root=target.model.root, head=head, reads_media=target.model.media is not None)
    tensors = _renamed(target.tensors, _names(target, predictor, number), model)
    read = read_quantization(target.config, model, str(target.path / "config.json"))
    quantization = None if read is None else read.named(tensors)
    tensors = unstacked(model, tensors, quantization)
    return replace(target, model=model, tensors=tensors, quantization=quantization)


def _renamed(tensors: Mapping[str, TensorInfo], own: Mapping[str, str], model: Model) -> dict[str, TensorInfo]:
    """Return the tensors of a prediction head by their names in its model, with the embedding and the head. Its own
    copies of both, which some checkpoints have, are left out. own: see `_names`."""
    of_model = [] if model.head is None or not model.shares_head else [f"{model.head.name}."]
    shared = (f"{join(model.root, model.embed.name)}.", *of_model)
    path, found = prediction_path(model), {name: one for name, one in tensors.items() if name.startswith(shared)}
    for name, one in tensors.items():
        before = max((start for start in own if name.startswith(start)), key=len, default=None)
        if before is not None and not name.removeprefix(before).startswith(COPIES):
            found[f"{path}.{own[before]}{name.removeprefix(before)}"] = one
    return found


def _rerooted(name: str, before: str, after: str) -> str:
    return after + name.removeprefix(before) if name.startswith(f"{before}.") else name


COPIES = ("embed_tokens.", "shared_head.head.")
"""Copies of the embedding and the head in the layer of a prediction head."""


def tokens_beside(models: int) -> int:
    """Return the maximum number of additional tokens of a row in a pass. A draft model computes one token more than the
    step, and several heads compute one position again for each head after the first."""
    return max(1, models - 1)


def _target_problem(target: Model) -> str:
    if target.encoder is not None:
        return "an encoder-decoder model has no draft model; set speculation.method to another value"
    return ""


def draft_problem(model: Model) -> str:
    """Return why a model cannot draft, or an empty string."""
    if model.foreign is not None:
        return f"{model.foreign.architecture} is computed by transformers' code, and cannot draft"
    if model.encoder is not None or model.pooler is not None or model.head is None:
        return "a draft model must be a decoder that generates text"
    if recurrents(model):
        return "a draft model cannot have recurrent layers, because their state cannot be rolled back"
    if model.media is not None:
        return "a draft model reads only text; this one has a tower for media"
    return ""


def _vocabulary_problem(target: Checkpoint, draft: Checkpoint) -> str:
    """Return how the vocabularies differ, or an empty string. They may have different numbers of unused ids."""
    files = [one.path / "tokenizer.json" for one in (target, draft)]
    if all(file.is_file() for file in files) and files[0].read_bytes() == files[1].read_bytes():
        return ""
    own, other = (_tokenizer(one) for one in (target, draft))
    if own is None or other is None:
        sizes = target.model.embed.vocab, draft.model.embed.vocab
        return "" if sizes[0] == sizes[1] else f"it has {sizes[1]} token ids, and the target has {sizes[0]}"
    for token in range(max(own.vocab_size, other.vocab_size)):
        if own.token_string(token) != other.token_string(token):
            return (
                f"its vocabulary is not the target's: token {token} is {other.token_string(token)!a}, and "
                f"{own.token_string(token)!a} in the target; use a draft model with the same tokenizer"
            )
    return ""


def _tokenizer(checkpoint: Checkpoint) -> Tokenizer | None:
    """Return the tokenizer of a checkpoint, or None if it has none that can be read."""
    try:
        return Tokenizer(checkpoint.path)
    except CheckpointError:
        return None
