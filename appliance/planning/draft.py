"""Draft model or EAGLE head of the manifest, or prediction head of the checkpoint, which are read and checked before
anything starts."""

from typing import Any

from appliance.config import exits
from appliance.config.problems import Refused, unread
from appliance.config.settings import Settings
from appliance.planning.choice import Choice, refuse
from engine.api.config import FOLDER_METHODS, SpeculationMethod
from engine.api.errors import EngineError
from engine.kv.layout import layout, shared_group
from engine.models.checkpoint import Checkpoint
from engine.models.draft import with_drafts

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
    if wanted.method in FOLDER_METHODS and wanted.model is None:
        refuse(
            settings,
            "speculation.method",
            f"{wanted.method} needs the folder of a draft model or head; set speculation.model",
        )
    if wanted.method not in FOLDER_METHODS and wanted.model is not None:
        refuse(
            settings,
            "speculation.model",
            f"speculation.method {wanted.method} has no draft model; set it to one of {', '.join(FOLDER_METHODS)}",
        )
    method: SpeculationMethod = "mtp" if wanted.method == "auto" else wanted.method
    try:
        folder = "" if wanted.model is None else str(settings.file(KEY))
        found = with_drafts(checkpoint, method, folder, tokens=wanted.tokens)
        if found.draft is not None:
            groups, *own = (layout(one.model, block_tokens=1, element_bytes=1).groups for one in (found, *found.drafts))
            shared_group(groups, [group for each in own for group in each])
    except EngineError as error:
        if wanted.method == "auto":
            return checkpoint  # no prediction head, or it does not suit the model
        if wanted.method == "mtp":
            refuse(settings, "speculation.method", str(error), exits.CHECKPOINT, instead="ngram")
        raise Refused([unread(settings.place(KEY), KEY, str(error))], exits.CHECKPOINT) from error
    return found
