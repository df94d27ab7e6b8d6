"""What a plan has to know of a checkpoint, wherever it lies."""

from dataclasses import dataclass
from pathlib import Path

from appliance.checkpoints.download_spec import Job
from appliance.checkpoints.remote import SourceError


class NotHere(SourceError):
    """Nothing is known of it before it is downloaded."""


@dataclass(frozen=True)
class Facts:
    """`folder` is to be read now, `path` is where the checkpoint is or will be. `note` says where it comes from and how
    much of it is here, `version` what the key that names it has come to and why; `name` is what the model is called
    if nobody says, empty for the checkpoint's own folder."""

    folder: Path
    path: Path
    name: str
    shown: str = ""
    revision: str = ""
    note: str = ""
    version: str = ""
    job: Job | None = None
