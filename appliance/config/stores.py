"""How long stored responses and durable replies last: a line for `slipway check`, `slipway plan` and the log."""

from pathlib import Path

from appliance.config.gateway import GatewayConfig
from appliance.config.keys import spell

CURE = "set lifecycle.journal.folder to a folder on a volume to keep them"


def storage_line(config: GatewayConfig) -> str:
    """Say what is kept, for how long and where. Returns "" if nothing is kept."""
    kept = []
    if config.responses:
        kept.append(f"stored responses for {spell(config.responses_keep_s, 'duration')}")
    if config.journal:
        kept.append(f"replies with an Idempotency-Key for {spell(config.journal_keep_s, 'duration')}")
    if not kept:
        return ""
    what = " and ".join(kept)
    if is_temporary(config):
        return f"{what}, in the run directory: a restart of the service deletes them; {CURE}"
    return f"{what}, in {_folder(config)}: a restart of the service keeps them"


def is_temporary(config: GatewayConfig) -> bool:
    """Return True if the files are in the run directory. The plan names them without a folder then."""
    return _folder(config) in (Path(), Path(config.run))


def _folder(config: GatewayConfig) -> Path:
    return Path(config.responses or config.journal).parent
