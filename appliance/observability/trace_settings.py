"""Settings of traces: keys of the manifest first, then the standard OTEL_ variables, then the defaults of OpenTelemetry
(https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/).

A variable with an invalid value is ignored with a warning, as the specification requires.
"""

import logging
import os
import platform
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar
from urllib.parse import urlsplit

from appliance.config.gateway import GatewayConfig
from appliance.security.headers import check_headers, parse_pairs, read_headers
from engine.api.errors import ConfigError

log = logging.getLogger(__name__)

PATH, LOGS_PATH = "/v1/traces", "/v1/logs"

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class Sampler:
    """Choice of the requests that are traced."""

    ratio: float = 1.0  # share of requests, by their trace ID
    follows_parent: bool = True  # the caller's decision precedes the ratio

    def samples(self, trace_id: str, parent: bool | None) -> bool:
        """Return whether to trace a request; `parent` is the caller's decision, None without a caller."""
        if self.follows_parent and parent is not None:
            return parent
        return int(trace_id[16:], 16) < round(self.ratio * 2**64)  # as TraceIdRatioBased of OpenTelemetry's SDK


_SAMPLERS = {
    "always_on": Sampler(1.0, follows_parent=False),
    "always_off": Sampler(0.0, follows_parent=False),
    "traceidratio": Sampler(1.0, follows_parent=False),
    "parentbased_always_on": Sampler(),
    "parentbased_always_off": Sampler(0.0),
    "parentbased_traceidratio": Sampler(),
}


@dataclass(frozen=True)
class TraceSettings:
    """Resolved settings of traces. Times are in seconds."""

    url: str  # complete address of the collector's route
    logs_url: str = ""  # that of log records; "": they are not exported
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    sampler: Sampler = Sampler()
    resource: Mapping[str, str] = field(default_factory=dict)
    has_content: bool = False
    compresses: bool = False
    timeout_s: float = 10.0
    delay_s: float = 5.0  # maximum time between two batches
    max_queue: int = 2048  # spans
    max_batch: int = 512  # spans


def trace_settings(config: GatewayConfig, environ: Mapping[str, str]) -> TraceSettings | None:
    """Return the settings, or None if traces are off. Raise ConfigError for headers that cannot be read."""
    wanted = config.observability.traces
    url = _url(wanted.endpoint, environ)
    if url is None:
        return None
    batch = _number(environ, "OTEL_BSP_MAX_EXPORT_BATCH_SIZE", 512, int, lambda value: value >= 1)
    return TraceSettings(
        url,
        logs_url=_logs_url(url, environ) if wanted.logs else "",
        headers=read_headers(config.trace_headers) if config.trace_headers else _headers_of(environ),
        sampler=_sampler(environ) if wanted.sample is None else Sampler(wanted.sample),
        resource=_resource(config, environ),
        has_content=wanted.content or environ.get(CONTENT, "").lower() in ("true", "span_only", "span_and_event"),
        compresses=_otlp(environ, "COMPRESSION") == "gzip",
        timeout_s=_milliseconds(environ, "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT", 10_000),
        delay_s=_milliseconds(environ, "OTEL_BSP_SCHEDULE_DELAY", "", 5_000),
        max_queue=max(batch, _number(environ, "OTEL_BSP_MAX_QUEUE_SIZE", 2048, int, lambda value: value >= 1)),
        max_batch=batch,
    )


CONTENT = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"


def _otlp(environ: Mapping[str, str], name: str) -> str:
    """Return the variable of traces, else the one of all signals."""
    return environ.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}") or environ.get(f"OTEL_EXPORTER_OTLP_{name}") or ""


def _url(endpoint: str | None, environ: Mapping[str, str]) -> str | None:
    """Return the address to send traces to, None if traces are off. Only the variable of traces is used as it is."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if endpoint is None:
        exporter = environ.get("OTEL_TRACES_EXPORTER", "otlp")
        if exporter not in ("otlp", ""):
            return None
        own = environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "")
        base = own or environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")
        if not base:
            return None
        parts = urlsplit(base)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            log.warning("traces are off: OTEL_EXPORTER_OTLP_ENDPOINT must be an http:// or https:// address")
            return None
        if _otlp(environ, "PROTOCOL") == "grpc":
            log.warning("OTEL_EXPORTER_OTLP_PROTOCOL=grpc is not supported: traces are sent with http/json")
        if own:
            return own
        endpoint = base
    base = endpoint.rstrip("/")
    return base if base.endswith(PATH) else base + PATH


def _logs_url(traces_url: str, environ: Mapping[str, str]) -> str:
    """Return the address to send log records to: beside the route of traces, unless the variable of logs is set."""
    return environ.get("OTEL_EXPORTER_OTLP_LOGS_ENDPOINT") or traces_url.removesuffix(PATH) + LOGS_PATH


def _sampler(environ: Mapping[str, str]) -> Sampler:
    name = environ.get("OTEL_TRACES_SAMPLER") or "parentbased_always_on"
    if name not in _SAMPLERS:
        log.warning("OTEL_TRACES_SAMPLER is ignored: it must be one of %s", ", ".join(_SAMPLERS))
        return Sampler()
    sampler = _SAMPLERS[name]
    if not name.endswith("traceidratio"):
        return sampler
    ratio = _number(environ, "OTEL_TRACES_SAMPLER_ARG", 1.0, float, lambda value: 0 <= value <= 1)
    return Sampler(ratio, sampler.follows_parent)


def _number(
    environ: Mapping[str, str],
    name: str,
    default: Number,
    convert: Callable[[str], Number],
    is_valid: Callable[[Number], bool],
) -> Number:
    text = environ.get(name, "")
    if not text:
        return default
    try:
        value = convert(text)
    except ValueError:
        value = None
    if value is None or not is_valid(value):
        log.warning("%s is ignored: %r is not a valid value", name, text)
        return default
    return value


def _milliseconds(environ: Mapping[str, str], name: str, general: str, default_ms: int) -> float:
    chosen = name if environ.get(name) else general
    return _number(environ, chosen, default_ms, int, lambda value: value > 0) / 1000


def _resource(config: GatewayConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the attributes of this process. The manifest overrides the variables, which override the defaults."""
    try:
        given = parse_pairs(environ.get("OTEL_RESOURCE_ATTRIBUTES", ""), "OTEL_RESOURCE_ATTRIBUTES")
    except ConfigError as error:
        log.warning("%s; it is ignored", error)
        given = {}
    if name := environ.get("OTEL_SERVICE_NAME"):
        given["service.name"] = name
    wanted = config.observability.traces
    own = dict(pair.split("=", 1) for pair in wanted.attributes)
    if wanted.service_name is not None:
        own["service.name"] = wanted.service_name
    return {
        "service.name": "slipway",
        "service.version": config.version,
        "service.instance.id": str(uuid.uuid4()),
        "telemetry.sdk.name": "slipway",
        "telemetry.sdk.language": "python",
        "telemetry.sdk.version": config.version,
        "process.pid": str(os.getpid()),
        "host.name": platform.node(),
        "slipway.manifest.sha256": config.manifest_sha256,
        **given,
        **own,
    }


def _headers_of(environ: Mapping[str, str]) -> dict[str, str]:
    place = "OTEL_EXPORTER_OTLP_HEADERS"
    try:
        return check_headers(parse_pairs(_otlp(environ, "HEADERS"), place), place)
    except ConfigError as error:
        log.warning("%s; it is ignored", error)
        return {}
