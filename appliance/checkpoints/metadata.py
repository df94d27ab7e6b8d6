"""Metadata of a checkpoint for the plan, from a local folder or from a download source."""

import contextlib
from collections.abc import Iterator, Mapping

from appliance.checkpoints.download_spec import DownloadSpec, LocalFolder
from appliance.checkpoints.facts import Facts
from appliance.checkpoints.remote import Policy


@contextlib.contextmanager
def facts(found: LocalFolder | DownloadSpec, policy: Policy, environ: Mapping[str, str]) -> Iterator[Facts]:
    """Yield the metadata of a checkpoint. Raise SourceError; raise NotDownloaded if it has to be downloaded first."""
    if isinstance(found, LocalFolder):
        yield Facts(found.path, found.path, "", note=found.reason)
        return
    from appliance.checkpoints.remote_metadata import remote_facts  # not imported for a local folder

    with remote_facts(found, policy, environ) as known:
        yield known
