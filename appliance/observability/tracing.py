"""Tracing of requests: the sampling decision, the span of each request, and the exporter."""

import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from appliance.observability.metrics import Metrics
from appliance.observability.spans import RequestSpan
from appliance.observability.trace import Trace
from appliance.observability.trace_settings import TraceSettings

if TYPE_CHECKING:
    import httpx

    from appliance.observability.otlp import DropReason, Exporter


class Tracing:
    """Traces of one gateway process. Without settings it records nothing."""

    def __init__(
        self,
        settings: TraceSettings | None,
        metrics: Metrics,
        version: str = "",
        transport: "httpx.AsyncBaseTransport | None" = None,
    ) -> None:
        def on_sent(spans: int) -> None:
            metrics.add("trace_spans_exported", spans)

        def on_dropped(spans: int, reason: "DropReason") -> None:
            metrics.add("trace_spans_dropped", spans, reason)

        self._settings = settings
        self._exporter: Exporter | None = None
        if settings is not None:
            from appliance.observability import otlp  # importing httpx takes 60 ms

            self._exporter = otlp.Exporter(settings, version, on_sent, on_dropped, transport)

    def begin(self, caller: Trace | None, start_s: float) -> tuple[Trace | None, RequestSpan | None]:
        """Return the trace of a request that arrived at `start_s` (monotonic), and its span if it is sampled.

        Without a caller's trace, a request begins a trace.
        """
        if self._settings is None or self._exporter is None:
            return caller, None
        parent = None if caller is None else caller.sampled
        trace = caller or Trace(secrets.token_hex(16), None)
        sampled = self._settings.sampler.samples(trace.trace_id, parent)
        trace = replace(trace, sampled=sampled)
        if not sampled:
            return trace, None
        return trace, RequestSpan(trace, start_s, self._exporter.add, has_content=self._settings.has_content)

    def start(self) -> None:
        """Export spans in the background. Needs a running event loop."""
        if self._exporter is not None:
            self._exporter.start()

    async def stop(self, timeout_s: float) -> None:
        """Export the remaining spans within `timeout_s` seconds."""
        if self._exporter is not None:
            await self._exporter.stop(timeout_s)

    def set_headers(self, headers: Mapping[str, str]) -> None:
        """Send other headers to the collector from the next batch on."""
        if self._exporter is not None:
            self._exporter.headers = dict(headers)
