"""In-place reload of a running gateway: which settings can change and how they take effect.

Requests read `service.config` when they arrive, so most keys apply to the next request and do not affect open ones.
"""

import asyncio

from appliance.config.gateway import GatewayConfig
from appliance.observability.log import RequestLog, set_level
from appliance.security.certificate import read_certificate
from appliance.security.headers import read_headers
from appliance.security.keys import read_keys
from appliance.server.chat.text import load_text
from appliance.server.http.service import Service
from appliance.server.reply_store.journal import open_reply_store
from engine.api.errors import ConfigError


class NotReloadable(ConfigError):
    """Raised for a setting that only takes effect in a new process."""

    code = "reload"


def _fixed_fields(now: GatewayConfig, wanted: GatewayConfig) -> tuple[str, ...]:
    from appliance.config.live_keys import fixed_fields  # imports the manifest's schema, which takes 0.1 s

    return fixed_fields(now, wanted)


async def apply(service: Service, new: GatewayConfig) -> int:
    """Apply a new configuration to a running service and return the number of API keys.

    It applies at once to all further requests. The files of API keys and of the chat template are read again. Raise
    EngineError; nothing has changed in that case.
    """
    if fixed := await asyncio.to_thread(_fixed_fields, service.config, new):
        raise NotReloadable(f"{', '.join(fixed)} can only be changed by a restart")
    text = None
    again = (new.chat_template, new.format) != (service.config.chat_template, service.config.format)
    if again or new.chat_template:
        if not service.has_text:
            raise NotReloadable("the tokenizer is still being loaded; repeat the reload in a few seconds")
        text = await asyncio.to_thread(load_text, new)
    keys = read_keys(new.api_keys)
    trace_headers = None if new.trace_headers is None else read_headers(new.trace_headers)
    if (new.tls is None) != (service.certificate is None):
        raise NotReloadable("endpoints.tls can only be added or removed by a restart")
    renewed = None if new.tls is None else read_certificate(new.tls)
    opened = service.reply_store or service.shelved
    if new.journal and opened is None:
        opened = open_reply_store(new, service.metrics)
    # Nothing below can fail or wait, so no request sees a partial change.
    if opened is not None:
        opened.reconfigure(
            outputs=new.outputs_sha256, keep_s=new.lifecycle.journal.keep, size=new.lifecycle.journal.size
        )
    stored = service.stored_responses
    if stored is not None:
        keep_s, size = service.config.endpoints.responses.keep, service.config.endpoints.responses.size
        stored.reconfigure(outputs=new.outputs_sha256, keep_s=keep_s, size=size)
    # Replies that are being generated continue in the old store, although clients can no longer find them.
    service.reply_store, service.shelved = (opened, None) if new.journal else (None, opened)
    service.config = new
    if text is not None:
        service.set_text(text)
    service.set_keys(keys)
    if service.certificate is not None and renewed is not None:
        service.certificate.replace_with(renewed)
    service.log = RequestLog(new)
    service.metrics.reconfigure(new)
    service.router.reconfigure(new)
    if trace_headers is not None:
        service.tracing.set_headers(trace_headers)
    set_level(new)
    return len(keys)
