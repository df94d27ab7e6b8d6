"""In-place reload of a running gateway: which settings can change and how they take effect.

Requests read `service.config` when they arrive, so most keys apply to the next request and do not affect open ones.
"""

import asyncio

from appliance.config.gateway import GatewayConfig
from appliance.config.live_keys import FIELDS, FOLLOW
from appliance.observability.log import RequestLog, set_level
from appliance.security.certificate import read_certificate
from appliance.security.keys import read_keys
from appliance.server.chat.text import load_text
from appliance.server.http.service import Service
from appliance.server.reply_store.journal import open_ledger
from engine.api.errors import ConfigError


class NotLive(ConfigError):
    """Raised for a setting that only takes effect in a new process."""

    code = "reload"


async def take(service: Service, wanted: GatewayConfig) -> int:
    """Apply a new configuration to a running service and return the number of API keys.

    It applies at once to all further requests. The files of API keys and of the chat template are read again. Raise
    EngineError; nothing has changed in that case.
    """
    may = {field.partition(".")[0] for fields in FIELDS.values() for field in fields} | set(FOLLOW)
    fixed = [
        name
        for name in GatewayConfig.__struct_fields__
        if name not in may and getattr(wanted, name) != getattr(service.config, name)
    ]
    if fixed:
        raise NotLive(f"{', '.join(fixed)} of a running gateway cannot be changed")
    text = None
    again = (wanted.chat_template, wanted.format) != (service.config.chat_template, service.config.format)
    if again or wanted.chat_template:
        if not service.has_text:
            raise NotLive("the tokenizer is being loaded; reload again in a moment")
        text = await asyncio.to_thread(load_text, wanted)
    keys = read_keys(wanted.api_keys)
    if (wanted.tls is None) != (service.certificate is None):
        raise NotLive("endpoints.tls of a running gateway can be changed, but neither be begun nor ended")
    renewed = None if wanted.tls is None else read_certificate(wanted.tls)
    opened = service.ledger or service.shelved
    if wanted.journal and opened is None:
        opened = open_ledger(wanted, service.metrics)
    # Nothing below can fail or wait, so no request sees a partial change.
    if opened is not None:
        opened.rebound(outputs=wanted.outputs_sha256, keep_s=wanted.journal_keep_s, size=wanted.journal_bytes)
    stored = service.stored_responses
    if stored is not None:
        keep_s, size = service.config.responses_keep_s, service.config.responses_bytes
        stored.rebound(outputs=wanted.outputs_sha256, keep_s=keep_s, size=size)
    # Replies that are being generated continue in the old store, although clients can no longer find them.
    service.ledger, service.shelved = (opened, None) if wanted.journal else (None, opened)
    service.config = wanted
    if text is not None:
        service.set_text(text)
    service.set_keys(keys)
    if service.certificate is not None and renewed is not None:
        service.certificate.become(renewed)
    service.log = RequestLog(wanted)
    service.metrics.reconfigure(wanted)
    service.router.reconfigure(wanted)
    set_level(wanted)
    return len(keys)
