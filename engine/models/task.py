"""Task of a served checkpoint, which determines whether its model ends in a head or a pooler.

An encoder embeds and a classifier classifies. A decoder generates, unless sentence-transformers files next to it
declare
it an embedding model. `model.task` may request another task if the weights support it: a decoder as an embedder, or as
a
reranker that answers yes or no (the score is softmax over the two logits, which equals the sigmoid of their
difference).
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from engine.api.config import TaskConfig
from engine.api.errors import CheckpointError, TaskError
from engine.models.modules import Modules
from engine.models.parts import Dense, Difference, Model, Pool, Pooler, TokenLogits
from engine.models.pooled_decoders import UNREAD, embedder
from engine.models.sources import join

if TYPE_CHECKING:
    from engine.text.tokenizer import Tokenizer

POOLS: dict[str, Pool] = {"cls": "first", "last": "last", "mean": "mean", "max": "max"}


def fitted(model: Model, config: Mapping[str, Any], wanted: TaskConfig, modules: Modules | None, folder: Path) -> Model:
    """Return the model with the head or the pooler of its task. Raises TaskError, naming the key, if the checkpoint
    does not support the task."""
    task = _task(model, wanted, modules)
    if task == "generate":
        _check_sole(wanted, task)
        return model
    if task == "score":
        _check_sole(wanted, task)
        return _scorer(model, wanted, folder)
    if model.pooler is None:
        model = embedder(model)
    assert model.pooler is not None, "an embedder pools"
    if task == "classify":
        _check_sole(wanted, task)
        return model
    return _embedder(model, model.pooler, config, wanted, modules)


def _task(model: Model, wanted: TaskConfig, modules: Modules | None) -> str:
    own = "generate" if model.pooler is None else ("embed" if model.pooler.task == "embed" else "classify")
    if model.foreign is not None and (modules is not None or wanted.task not in ("auto", own)):
        raise TaskError(
            f"model.task: {model.foreign.architecture} is computed by transformers' code; supported is generate"
        )
    if model.encoder is not None:
        asked = "embed" if wanted.task == "auto" and modules is not None else wanted.task
        if asked not in ("auto", own):
            by = " (modules.json says so)" if wanted.task == "auto" else ""
            raise TaskError(
                f"model.task: {asked}{by}: this checkpoint is an encoder-decoder model; supported is generate"
            )
        return own
    if own == "generate" and modules is not None:
        own = "embed"
    if wanted.task in ("auto", own):
        return own
    served: tuple[str, ...] = ("generate", "embed", "score") if model.head is not None else (own,)
    if model.pooler is not None and model.pooler.task == "classify" and model.pooler.width == 1:
        served = (own, "score")
        if wanted.task == "score":
            return own
    if wanted.task not in served:
        raise TaskError(f"model.task: {wanted.task}: this checkpoint supports {' or '.join(served)}")
    return wanted.task


def _check_sole(wanted: TaskConfig, task: str) -> None:
    if wanted.pool != "auto" or wanted.normalize is not None or wanted.dimensions:
        raise TaskError(
            f"model.pooling: only for embedding, and this checkpoint is served to {task}; leave it out, or set "
            "model.task to embed"
        )


def _embedder(
    model: Model, pooler: Pooler, config: Mapping[str, Any], wanted: TaskConfig, modules: Modules | None
) -> Model:
    if modules is not None:
        pooler = replace(pooler, pool=modules.pool, stages=modules.dense, activation=_end(modules.normalizes))
        pooler = replace(pooler, whole=modules.late is None)
    if wanted.pool != "auto" and not pooler.whole:
        raise TaskError(f"model.pooling.pool: {wanted.pool}: this checkpoint returns vectors of tokens without pooling")
    if wanted.pool != "auto":
        pooler = replace(pooler, pool=POOLS[wanted.pool])
    if wanted.normalize is not None:
        pooler = replace(pooler, activation=_end(wanted.normalize))
    width = model.embed.hidden
    for stage in pooler.stages:
        if isinstance(stage, Dense):
            if stage.linear.inputs != width:
                raise TaskError(f"{stage.path}/config.json: in_features is {stage.linear.inputs}; it must be {width}")
            width = stage.linear.rows[0].units
    listed, trained = config.get("matryoshka_dimensions"), config.get("is_matryoshka") is True
    lengths = wanted.dimensions or (tuple(listed) if isinstance(listed, list) else ())
    too_long = [length for length in lengths if not isinstance(length, int) or not 0 < length <= width]
    if too_long:
        raise TaskError(f"model.pooling.dimensions: {too_long[0]}: vectors have 1 to {width} numbers")
    pooler = replace(pooler, width=width, dimensions=lengths, any_dimensions=trained and not lengths)
    longest = model.max_context if modules is None or modules.longest is None else modules.longest
    return replace(model, head=None, pooler=pooler, max_context=min(model.max_context, longest), unread=_unread(model))


def check_encoder_only(wanted: TaskConfig, place: str, *, has_tower: bool) -> None:
    """Raise TaskError, naming the key, if a checkpoint cannot serve its towers alone. place: the configuration."""
    if not has_tower:
        raise TaskError(
            f"model.media.encoder_only: true: {place}: the model has no tower whose embeddings are parts of prompts, "
            "or limits.media turns it off"
        )
    if wanted.task not in ("auto", "embed"):
        raise TaskError(f"model.task: {wanted.task}: with model.media.encoder_only, supported is embed")
    if wanted.pool != "auto" or wanted.normalize is not None or wanted.dimensions:
        raise TaskError("model.pooling: has no effect with model.media.encoder_only; leave it out")


def _end(normalizes: bool) -> Literal["normalize", "none"]:
    return "normalize" if normalizes else "none"


def _scorer(model: Model, wanted: TaskConfig, folder: Path) -> Model:
    assert model.head is not None, "scoring needs logits"
    source = join(model.root, model.embed.name) if model.head.tied else model.head.name
    tokens = _token_ids(wanted.score_tokens, folder)
    logits = TokenLogits(tokens=tokens, source=source, vocab=model.embed.vocab, hidden=model.embed.hidden)
    pooler = Pooler(
        task="classify",
        width=1,
        pool="last",
        stages=(logits, Difference()),
        activation="sigmoid",
        labels=(wanted.score_tokens[0],),
    )
    if model.head.bias or model.head.softcap is not None or model.head.scale != 1.0:
        raise TaskError("model.task: score: not supported for logits with a bias, a scale or a softcap")
    return replace(model, head=None, pooler=pooler, unread=_unread(model))


def _unread(model: Model) -> tuple[str, ...]:
    head = () if model.head is None else (f"{model.head.name}.weight", f"{model.head.name}.bias")
    return tuple(dict.fromkeys((*model.unread, *UNREAD, *head)))


def _token_ids(words: tuple[str, str], folder: Path) -> tuple[int, ...]:
    """Return the ids of words that must be one token each."""
    from engine.text.tokenizer import Tokenizer  # imported here because few models need it

    try:
        tokenizer = Tokenizer(folder)
    except CheckpointError as error:
        raise TaskError(f"model.task: score needs the ids of {' and '.join(words)}: {error}") from error
    ids = [_token_id(tokenizer, word) for word in words]
    for word, token in zip(words, ids, strict=True):
        if token is None:
            raise TaskError(
                f"model.pooling.score_tokens: {word!r} is not one token of {tokenizer.file} but "
                f"{len(tokenizer.encode(word, add_special_tokens=False))}; name two words that are one token each"
            )
    if ids[0] == ids[1]:
        raise TaskError(f"model.pooling.score_tokens: {words[0]!r} and {words[1]!r} are the same token; name two")
    return tuple(token for token in ids if token is not None)


def _token_id(tokenizer: "Tokenizer", word: str) -> int | None:
    """Return the token with this spelling in the vocabulary, else that of the word within or at the start of a text."""
    if (spelled := tokenizer.convert_tokens_to_ids(word)) is not None:
        return spelled
    try:
        ids = tokenizer.encode_bytes(word.encode())
    except ValueError:  # the vocabulary lacks tokens for some of its bytes
        return None
    for one in (ids, tokenizer.encode(word, add_special_tokens=False)):
        if len(one) == 1 and tokenizer.decode(one, skip_special_tokens=False).strip() == word.strip():
            return one[0]
    return None


def reroot(model: Model, names: Mapping[str, object]) -> Model:
    """Adapt the model to the prefix of its tensor names: some checkpoints are saved with that of the enclosing module,
    some without."""
    own = f"{join(model.root, model.embed.name)}.weight"
    if own in names or not names:
        return model
    last = f"{model.embed.name}.weight"
    ends = [name for name in names if name == last or name.endswith(f".{last}")]
    return replace(model, root=ends[0].removesuffix(last).rstrip(".")) if len(ends) == 1 else model
