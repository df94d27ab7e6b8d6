"""The ledger of durable replies as the configuration wants it."""

import os
from pathlib import Path

from appliance.durable.ledger import Ledger
from appliance.durable.log import JournalTaken
from appliance.gateway.config import GatewayConfig
from appliance.observe.metrics import Metrics
from engine.api.errors import ConfigError


class JournalUnusable(ConfigError):
    """The file of durable replies cannot be written."""

    code = "journal"


def open_ledger(config: GatewayConfig, metrics: Metrics) -> Ledger | None:
    """The durable replies. Raises JournalUnusable."""
    if not config.journal:
        return None
    path = Path(config.journal)
    try:
        return Ledger(
            path, metrics, outputs=config.outputs_sha256, keep_s=config.journal_keep_s, size=config.journal_bytes
        )
    except OSError as error:
        reason = f"{path}: {os.strerror(error.errno or 0)}"
    except JournalTaken as error:
        reason = str(error)
    raise JournalUnusable(f"{reason}; choose another lifecycle.journal.folder, or keep: 0s there")
