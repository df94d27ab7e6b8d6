"""What a plan has to know of a checkpoint, wherever it lies."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from appliance.checkpoints.download_spec import Job, Local, Order
from appliance.checkpoints.remote import Policy, SourceError


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


@contextlib.contextmanager
def facts(found: Local | Order, policy: Policy, environ: Mapping[str, str]) -> Iterator[Facts]:
    """Raises SourceError; NotHere if it has to be downloaded whole before anything is known of it."""
    if isinstance(found, Local):
        yield Facts(found.path, found.path, "", note=found.why)
        return
    from appliance.checkpoints.remote_metadata import facts_from_afar  # nothing of this is loaded for a local folder

    with facts_from_afar(found, policy, environ) as known:
        yield known
