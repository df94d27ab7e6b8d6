"""Metadata of a checkpoint that a plan needs, for local and remote sources."""

from dataclasses import dataclass
from pathlib import Path

from appliance.checkpoints.download_spec import Job
from appliance.checkpoints.remote import SourceError


class NotDownloaded(SourceError):
    """Raised if nothing is known about the checkpoint before it is downloaded."""


@dataclass(frozen=True)
class Facts:
    """Metadata of a checkpoint."""

    folder: Path  # folder to read now
    path: Path  # folder in which the checkpoint is or will be
    name: str  # default name of the model; empty for the name of the checkpoint's folder
    shown: str = ""  # name of the source for messages
    revision: str = ""
    note: str = ""  # where it comes from, and how much of it is in the cache
    version: str = ""  # how the revision of the source was resolved
    job: Job | None = None  # the download that is still needed
