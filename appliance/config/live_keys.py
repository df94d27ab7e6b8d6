"""Keys that a running gateway can change in place, and the fields of its configuration that each key affects."""

from collections.abc import Sequence
from typing import Any

import msgspec

from appliance.config.gateway import GatewayConfig, SamplingDefaults

# Fields of GatewayConfig by live key (config/effects.py). `sampling.x` is a single sampling default.
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
    "observability.stories": ("timelines",),
    "observability.vllm_metrics": ("vllm_metrics",),
    "secrets.*.file": ("api_keys",),
}
FOLLOW = ("manifest_sha256", "outputs_sha256")  # identities of the manifest, which always change with it


def mixed(now: GatewayConfig, wanted: GatewayConfig, keys: Sequence[str], **follow: str) -> GatewayConfig:
    """Return the running configuration `now` with the values of these live keys from `wanted`."""
    changed: dict[str, Any] = dict(follow)
    for path in dict.fromkeys(field for key in keys for field in FIELDS[key]):
        name, _, part = path.partition(".")
        value = getattr(wanted, name)
        if part:
            value = msgspec.structs.replace(changed.get(name, getattr(now, name)), **{part: getattr(value, part)})
        changed[name] = value
    return msgspec.structs.replace(now, **changed)
