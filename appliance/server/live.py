"""What a running gateway changes in place: which keys act on which of its settings, and how these take effect.

Requests read `service.config` when they arrive, so most keys act from the next request on, and no open one notices.
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
    """A setting that only a new process takes."""

    code = "reload"


async def take(service: Service, wanted: GatewayConfig) -> int:
    """Makes a running service follow another configuration, at once for all requests to come, and reads the files of
    API keys and of the chat template anew. How many keys there are. Raises EngineError, and has then changed
    nothing."""
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
    # Nothing below can fail, and nothing waits: no request sees a part of it.
    if opened is not None:
        opened.rebound(outputs=wanted.outputs_sha256, keep_s=wanted.journal_keep_s, size=wanted.journal_bytes)
    stored = service.stored_responses
    if stored is not None:
        keep_s, size = service.config.responses_keep_s, service.config.responses_bytes
        stored.rebound(outputs=wanted.outputs_sha256, keep_s=keep_s, size=size)
    # Replies that are being generated go on where they began, though nobody can ask for them any more.
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
