"""What a running gateway changes in place: which keys act on which of its settings, and how these take effect.

Requests read `service.config` when they arrive, so most keys act from the next request on, and no open one notices.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from appliance.config.gateway import GatewayConfig, SamplingDefaults
from appliance.observability.log import RequestLog, set_level
from appliance.security.certificate import read_certificate
from appliance.security.keys import read_keys
from appliance.server.chat.text import load_text
from appliance.server.http.service import Service
from appliance.server.reply_store.journal import open_ledger
from engine.api.errors import ConfigError

# Key, as in config/effects.py where it is marked live → settings of GatewayConfig; `sampling.x` is one of them alone.
FIELDS: dict[str, tuple[str, ...]] = {
    "model.names": ("names",),
    "model.chat_template": ("chat_template",),
    "model.format": ("format",),
    "model.generation_config": (
        "eos_token_ids",
        *(f"sampling.{name}" for name in SamplingDefaults.__struct_fields__),
    ),
    "engine.sampling.temperature": ("sampling.temperature",),
    "engine.sampling.top_p": ("sampling.top_p",),
    "engine.sampling.top_k": ("sampling.top_k",),
    "engine.sampling.min_p": ("sampling.min_p",),
    "engine.sampling.repetition_penalty": ("sampling.repetition_penalty",),
    "endpoints.api_keys": ("api_keys",),
    "endpoints.tls.certificate": ("tls",),
    "endpoints.tls.key": ("tls",),
    "endpoints.tls.least_version": ("tls",),
    "endpoints.compat": ("compat",),
    "endpoints.unknown_fields": ("unknown_fields",),
    "endpoints.invocations_without_key": ("invocations_without_key",),
    "endpoints.cors_origins": ("cors_origins",),
    "endpoints.keep_alive": ("keep_alive_s",),
    "endpoints.stream_keep_alive": ("stream_keep_alive_s",),
    "endpoints.connections.max": ("connections.max",),
    "endpoints.connections.max_idle": ("connections.max_idle",),
    "endpoints.connections.max_per_address": ("connections.max_per_address",),
    "endpoints.connections.max_head": ("connections.max_head_bytes",),
    "endpoints.connections.max_headers": ("connections.max_headers",),
    "endpoints.connections.head_timeout": ("connections.head_timeout_s",),
    "endpoints.connections.body_timeout": ("connections.body_timeout_s",),
    "endpoints.trust_request_chat_template": ("trust_request_chat_template",),
    "endpoints.docs": ("docs",),
    "endpoints.page": ("page",),
    "limits.max_waiting": ("max_waiting",),
    "limits.max_waiting_tokens": ("max_waiting_tokens",),
    "limits.max_body": ("max_body_bytes",),
    "limits.max_output_tokens": ("max_output_tokens",),
    "limits.max_choices": ("max_choices",),
    "limits.max_prompts": ("max_prompts",),
    "limits.max_logprobs": ("max_logprobs",),
    "limits.max_stop": ("max_stop",),
    "limits.per_key.requests_per_minute": ("key_requests_per_minute",),
    "limits.per_key.tokens_per_minute": ("key_tokens_per_minute",),
    "limits.grammar_size": ("grammar_bytes",),
    "limits.grammar_time": ("grammar_time_s",),
    "limits.grammar_memory": ("grammar_memory_bytes",),
    "lifecycle.linger": ("drain_linger_s",),
    "lifecycle.restart.hold": ("hold_s",),
    "lifecycle.journal.keep": ("journal", "journal_keep_s"),
    "lifecycle.journal.size": ("journal_bytes",),
    "lifecycle.journal.linger": ("linger_s",),
    "lifecycle.chaos": ("chaos",),
    "observability.log_level": ("log_level",),
    "observability.log_requests": ("log_requests",),
    "observability.log_outputs": ("log_outputs",),
    "observability.stories": ("stories",),
    "observability.vllm_metrics": ("vllm_metrics",),
    "secrets.*.file": ("api_keys",),
}
FOLLOW = ("manifest_sha256", "outputs_sha256")  # identities of the manifest, which change with it


class NotLive(ConfigError):
    """A setting that only a new process takes."""

    code = "reload"


def mixed(now: GatewayConfig, wanted: GatewayConfig, keys: Sequence[str], **follow: str) -> GatewayConfig:
    """What runs, with the settings of these live keys as they are wanted."""
    changed: dict[str, Any] = dict(follow)
    for path in dict.fromkeys(field for key in keys for field in FIELDS[key]):
        name, _, part = path.partition(".")
        value = getattr(wanted, name)
        if part:
            value = msgspec.structs.replace(changed.get(name, getattr(now, name)), **{part: getattr(value, part)})
        changed[name] = value
    return msgspec.structs.replace(now, **changed)


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
    if service.responses is not None:
        stored = service.responses.ledger
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
