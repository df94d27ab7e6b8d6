"""Logs, metrics and traces: `observability`."""

from typing import Annotated, Literal

from pydantic import Field

from appliance.config.key import GATEWAY, LIVE, SERVICE, declare
from appliance.config.sections.values import SecretName, Section


class Traces(Section):
    endpoint: Annotated[str, Field(pattern=r"^https?://[^\s/?#]+[^\s?#]*$")] | None = declare(
        None,
        effect=GATEWAY,
        aliases={"vLLM": "otlp_traces_endpoint", "TGI": "otlp_endpoint"},
        example="http://otel-collector:4318",
    )
    """Address of an OpenTelemetry collector (OTLP/HTTP); default: OTEL_EXPORTER_OTLP_ENDPOINT. Without both, traces are
    off."""
    headers: SecretName | None = declare(None, effect=LIVE, affects="gateway.trace_headers", example="collector")
    """Name in `secrets` of HTTP headers for the collector, as `name=value` pairs; default:
    OTEL_EXPORTER_OTLP_HEADERS."""
    sample: Annotated[float, Field(ge=0, le=1)] | None = declare(None, effect=GATEWAY, example=0.1)
    """Share of requests to trace; a `traceparent` header decides for its request. Default: OTEL_TRACES_SAMPLER, or
    all."""
    service_name: str | None = declare(
        None, effect=GATEWAY, aliases={"TGI": "otlp_service_name"}, example="chat-production"
    )
    """`service.name` of the traces; default: OTEL_SERVICE_NAME, or slipway."""
    attributes: tuple[Annotated[str, Field(pattern=r"^[^\s=]+=.*$")], ...] = declare(
        (), effect=GATEWAY, example=["deployment.environment.name=production"], strict=False
    )
    """Further resource attributes as `name=value`; they override OTEL_RESOURCE_ATTRIBUTES."""
    logs: bool = declare(False, effect=GATEWAY)
    """Also send the log records of the gateway to the collector, with the trace and span of their request."""
    content: bool = declare(False, effect=GATEWAY)
    """Record prompts and replies in the spans."""


class Observability(Section):
    log_level: Literal["debug", "info", "warning", "error"] = declare(
        "info",
        effect=LIVE,
        aliases={"NVIDIA NIM": "NIM_LOG_LEVEL", "synonyms": "log_level"},
    )
    """Minimum severity of log records."""
    # the launcher uses it for its own log lines
    log_format: Literal["text", "json"] = declare("text", effect=SERVICE)
    """Log one line of text or one JSON object per record."""
    log_requests: bool = declare(False, effect=LIVE, aliases={"vLLM": "enable_log_requests"})
    """Log the parameters of each request, without prompt text."""
    log_outputs: Literal["off", "final", "deltas"] = declare("off", effect=LIVE)
    """Log generated text: once per reply, or also each streamed delta."""
    vllm_metrics: bool = declare(True, effect=LIVE)
    """Publish the metrics under vLLM's names too, for existing dashboards and autoscalers."""
    mfu_metrics: bool = declare(
        False,
        effect=SERVICE,
        affects=("engine.observability.step_costs", "gateway.hardware"),
        aliases={"vLLM": "enable_mfu_metrics"},
    )
    """Count floating-point operations and memory traffic of steps, and publish them with the limits of the hardware, so
    that the utilisation follows."""
    profiler_folder: str | None = declare(
        None,
        effect=SERVICE,
        affects=("engine.observability.profiler_folder", "gateway.profiler"),
        aliases={"vLLM": ("profiler_config", "torch_profiler_dir")},
        is_path=True,
        example="profiles",
    )
    """Enable the routes `/start_profile` and `/stop_profile`, which write traces of operations and steps to this
    folder. Profiles slow down the engine and contain no text."""
    timelines: Annotated[int, Field(ge=0)] = declare(1000, effect=LIVE, example=1000)
    """Number of replies whose timeline is available to `slipway why ID`; 0 keeps none."""
    traces: Traces = Traces()
    """Traces of requests, exported to an OpenTelemetry collector."""
