"""Settings of pooling models: keys of the manifest, and configuration of the gateway."""

import re
from typing import Any, Literal

import msgspec

from appliance.config.gateway import LateReading, PooledModel, Task
from appliance.config.manifest import Manifest
from appliance.config.settings import Settings
from appliance.planning.choice import Choice, refuse
from appliance.planning.speech import transcriber
from appliance.planning.targets import passed_on
from engine.api.config import TaskConfig
from engine.models.checkpoint import Checkpoint
from engine.models.modules import LateInteraction
from engine.models.parts import Difference, Pooler, is_bidirectional

_KEY = re.compile(r"(model\.(?:task|text_only|(?:pooling|media)(?:\.\w+)?)): ")
Pairs = Literal["none", "tokenizer", "template", "reranker"]
POOLS = {"first": "cls", "last": "last", "mean": "mean", "max": "max"}
SIMILARITIES = {"dot": "dot", "dot_product": "dot", "euclidean": "euclidean", "manhattan": "manhattan"}


def resolved_task(manifest: Manifest, checkpoint: Checkpoint) -> TaskConfig:
    """Return the task configuration, with `auto` resolved by the checkpoint."""
    requested, pooler = task_config(manifest), checkpoint.model.pooler
    if requested.task != "auto" or (pooler is not None and pooler.task != "embed"):
        return requested
    return msgspec.structs.replace(requested, task="generate" if pooler is None else "embed")


def task_config(manifest: Manifest) -> TaskConfig:
    normalize = manifest.model.pooling.normalize
    return TaskConfig(
        **passed_on(manifest, "engine.model.task"),
        task=manifest.model.task,
        normalize=None if normalize == "auto" else normalize,
        images=manifest.limits.media.images > 0,
        audio=manifest.limits.media.audios > 0,
    )


def check_pieces(settings: Settings, max_context: int) -> None:
    """Raise Refused if model.pooling.max_input has no effect because one window holds a text of that length."""
    most = settings.manifest.model.pooling.max_input
    if most is not None and most <= max_context:
        message = (
            f"{most} has no effect, because model.max_context is {max_context}. Use a larger value, or leave it out"
        )
        refuse(settings, "model.pooling.max_input", message)


def named_key(message: str) -> tuple[str, ...] | None:
    """Return the manifest key at the start of an error message, or None."""
    found = _KEY.match(message)
    return None if found is None else tuple(found[1].split("."))


def tasks_of(checkpoint: Checkpoint) -> tuple[Task, ...]:
    """Return the tasks that requests may use.

    A classifier with a single label scores pairs of texts; an embedding model scores them by the similarity of vectors.
    """
    pooler = checkpoint.model.pooler
    if checkpoint.model.audio is not None:
        return ("transcribe",)
    if pooler is None:
        return ("generate",) if transcriber(checkpoint) is None else ("generate", "transcribe")
    if pooler.task == "embed":
        if checkpoint.model.encoder_only:
            return ("encode",)
        return ("embed", "token_embed", "score") if pooler.whole else ("token_embed", "score")
    if pooler.task == "token_classify":
        return ("token_classify",)
    return ("classify", "score") if pooler.width == 1 else ("classify",)


def pooled_model(checkpoint: Checkpoint, max_input: int = 0) -> PooledModel | None:
    pooler, modules = checkpoint.model.pooler, checkpoint.modules
    if pooler is None:
        return None
    similarity = SIMILARITIES.get("cosine" if modules is None else modules.similarity, "cosine")
    return PooledModel(
        labels=pooler.labels,
        width=pooler.width,
        dimensions=pooler.dimensions,
        any_dimensions=pooler.any_dimensions,
        max_input=max_input,
        activation=pooler.activation,
        pairs=_pairs(checkpoint, pooler),
        similarity=similarity,  # type: ignore[arg-type]  # the values of the table
        prompts={} if modules is None else dict(modules.prompts),
        default_prompt="" if modules is None else modules.default_prompt,
        late=None if modules is None or modules.late is None else _late(modules.late),
        is_dual=pooler.padding is not None or (checkpoint.model.media is not None and checkpoint.model.media.is_vector),
        padding=pooler.padding,
        canonical=pooler.canonical,
    )


def _late(late: LateInteraction) -> LateReading:
    return LateReading(
        markers=late.markers,
        lengths=late.lengths,
        skipped=late.skipped,
        expands=late.expands,
        prompts=late.prompts,
        padding=late.padding,
    )


def _pairs(checkpoint: Checkpoint, pooler: Pooler) -> Pairs:
    """Return what joins two texts into one prompt: the tokenizer of an encoder, or the template of a decoder."""
    if "score" not in tasks_of(checkpoint) or pooler.task == "embed":
        return "none"
    if is_bidirectional(checkpoint.model):
        return "tokenizer"
    is_yes_or_no = any(isinstance(stage, Difference) for stage in pooler.stages)
    return "reranker" if is_yes_or_no or checkpoint.architecture.startswith("Qwen3") else "template"


def choices(manifest: Manifest, checkpoint: Checkpoint) -> dict[str, Choice[Any]]:
    """Return the resolved values of `auto` in model.task and model.pooling."""
    pooler, wanted = checkpoint.model.pooler, manifest.model
    task = "generate" if pooler is None else ("embed" if pooler.task == "embed" else "classify")
    found: dict[str, Choice[Any]] = {}
    if wanted.task == "auto":
        listed = "modules.json has a pooling module" if checkpoint.modules is not None else checkpoint.architecture
        listed = "model.media.encoder_only" if checkpoint.model.encoder_only else listed
        found["model.task"] = Choice(task, listed)
    if pooler is None or pooler.task != "embed":
        for name in ("pool", "normalize"):
            found[f"model.pooling.{name}"] = Choice(getattr(wanted.pooling, name), "this model has no vectors")
        return found
    says = "modules.json" if checkpoint.modules is not None else "not set by the checkpoint"
    if not pooler.whole:
        found["model.pooling.pool"] = Choice("auto", "this model returns token vectors")
    elif wanted.pooling.pool == "auto":
        found["model.pooling.pool"] = Choice(POOLS[pooler.pool], says)
    if wanted.pooling.normalize == "auto":
        found["model.pooling.normalize"] = Choice(pooler.activation == "normalize", says)
    if not wanted.pooling.dimensions and pooler.dimensions:
        found["model.pooling.dimensions"] = Choice(list(pooler.dimensions), "config.json")
    return found
