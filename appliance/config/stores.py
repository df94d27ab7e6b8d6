"""Retention of stored responses and durable replies: a line for `slipway check`, `slipway plan` and the log."""

from pathlib import Path

from appliance.config.gateway import GatewayConfig
from appliance.config.spelling import spell

CURE = "set lifecycle.journal.folder to a folder on a volume to keep them"


def storage_line(config: GatewayConfig) -> str:
    """Return a line with the stored data, retention and location, or "" if nothing is stored."""
    kept = []
    if config.responses:
        kept.append(f"stored responses for {spell(config.endpoints.responses.keep, 'duration')}")
    if config.journal:
        kept.append(f"replies with an Idempotency-Key for {spell(config.lifecycle.journal.keep, 'duration')}")
    if not kept:
        return ""
    what = " and ".join(kept)
    if is_temporary(config):
        return f"{what}, in the run directory: a restart of the service deletes them; {CURE}"
    return f"{what}, in {_folder(config)}: a restart of the service keeps them"


def is_temporary(config: GatewayConfig) -> bool:
    """Return True if the files are in the run directory, which the plan represents by names without a folder."""
    return _folder(config) in (Path(), Path(config.run))


def _folder(config: GatewayConfig) -> Path:
    return Path(config.responses or config.journal).parent
