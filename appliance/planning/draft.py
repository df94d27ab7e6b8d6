"""Draft model of the manifest, or prediction head of the checkpoint: read and checked before anything starts."""

from dataclasses import replace
from typing import Any

from appliance.config import exits
from appliance.config.problems import Refused, unread
from appliance.config.settings import Settings
from appliance.planning.choice import Choice, refuse
from engine.api.errors import EngineError
from engine.kv.layout import layout, shared_group
from engine.models.checkpoint import Checkpoint
from engine.models.draft import prediction_head, read_draft

KEY = ("speculation", "model")


def draft_choices(settings: Settings) -> dict[str, Choice[Any]]:
    """Return the draft model with its path relative to the manifest's folder."""
    if settings.manifest.speculation.model is None:
        return {}
    return {"speculation.model": Choice(settings.from_manifest(KEY))}


def with_draft_model(settings: Settings, checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with its draft model or prediction head. Raise Refused for a draft model that is missing,
    superfluous or unsuited."""
    wanted = settings.manifest.speculation
    if wanted.method == "mtp" and wanted.model is None:
        return _with_head(settings, checkpoint)
    if wanted.method != "draft":
        if wanted.model is not None:
            refuse(
                settings, "speculation.model", f"speculation.method {wanted.method} has no draft model; set it to draft"
            )
        return checkpoint
    if wanted.model is None:
        refuse(settings, "speculation.method", "draft needs the folder of a draft model; set speculation.model")
    try:
        draft = read_draft(str(settings.file(KEY)), checkpoint)
        groups, own = (layout(one.model, block_tokens=1, element_bytes=1).groups for one in (checkpoint, draft))
        shared_group(groups, own)
    except EngineError as error:
        raise Refused([unread(settings.place(KEY), KEY, str(error))], exits.CHECKPOINT) from error
    return replace(checkpoint, draft=draft)


def _with_head(settings: Settings, checkpoint: Checkpoint) -> Checkpoint:
    try:
        return replace(checkpoint, draft=prediction_head(checkpoint))
    except EngineError as error:
        refuse(settings, "speculation.method", str(error), exits.CHECKPOINT, instead="ngram")
