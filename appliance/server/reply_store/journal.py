"""Stores of durable replies and of stored responses, opened as configured."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from appliance.config.gateway import GatewayConfig
from appliance.observability.metrics import Metrics
from appliance.server.reply_store.log import JournalTaken
from appliance.server.reply_store.store import ReplyStore
from engine.api.errors import ConfigError


class JournalUnusable(ConfigError):
    """Raised when the file of durable replies cannot be written."""

    code = "journal"


def open_reply_store(config: GatewayConfig, metrics: Metrics) -> ReplyStore | None:
    """Return the store of durable replies, or None if it is disabled. Raise JournalUnusable."""
    if not config.journal:
        return None
    return _opened(
        partial(
            ReplyStore,
            Path(config.journal),
            metrics,
            outputs=config.outputs_sha256,
            keep_s=config.lifecycle.journal.keep,
            size=config.lifecycle.journal.size,
        ),
        "keep: 0s",
    )


def open_responses(config: GatewayConfig, metrics: Metrics) -> ReplyStore | None:
    """Return the store of responses, or None if it is disabled. Raise JournalUnusable."""
    if not config.responses:
        return None
    return _opened(
        partial(
            ReplyStore,
            Path(config.responses),
            metrics,
            outputs=config.outputs_sha256,
            keep_s=config.endpoints.responses.keep,
            size=config.endpoints.responses.size,
            max_entries=config.endpoints.responses.count,
            gauge="responses_bytes",
        ),
        "endpoints.responses.keep: 0s",
    )


def _opened(make: Callable[[], ReplyStore], without: str) -> ReplyStore:
    try:
        return make()
    except OSError as error:
        reason = f"{error.filename}: {os.strerror(error.errno or 0)}"
    except JournalTaken as error:
        reason = str(error)
    raise JournalUnusable(f"{reason}; choose another lifecycle.journal.folder, or {without}")
