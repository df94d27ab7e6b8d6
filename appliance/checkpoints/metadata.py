"""Metadata of a checkpoint for the plan, from a local folder or from a download source."""

import contextlib
from collections.abc import Iterator, Mapping

from appliance.checkpoints.download_spec import Local, Order
from appliance.checkpoints.facts import Facts
from appliance.checkpoints.remote import Policy


@contextlib.contextmanager
def facts(found: Local | Order, policy: Policy, environ: Mapping[str, str]) -> Iterator[Facts]:
    """Yield the metadata of a checkpoint. Raise SourceError; raise NotHere if it has to be downloaded first."""
    if isinstance(found, Local):
        yield Facts(found.path, found.path, "", note=found.why)
        return
    from appliance.checkpoints.remote_metadata import facts_from_afar  # not imported for a local folder

    with facts_from_afar(found, policy, environ) as known:
        yield known
