"""Tracing of requests: the sampling decision, the span of each request, and the exporter."""

import asyncio
import logging
import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from appliance.observability.log import FIELDS
from appliance.observability.metrics import Metrics
from appliance.observability.otlp_logs import OtlpHandler
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

        def on_logs_sent(records: int) -> None:
            metrics.add("log_records_exported", records)

        def on_logs_dropped(records: int, reason: "DropReason") -> None:
            metrics.add("log_records_dropped", records, reason)

        self._settings = settings
        self._exporter: Exporter | None = None
        self._logs: Exporter | None = None
        self._handler: logging.Handler | None = None
        if settings is not None:
            from appliance.observability import otlp  # importing httpx takes 60 ms

            self._exporter = otlp.Exporter(settings, version, on_sent, on_dropped, transport)
            if settings.logs_url:
                self._logs = otlp.Exporter(
                    *(settings, version, on_logs_sent, on_logs_dropped, transport),
                    signal=otlp.LOGS,
                    url=settings.logs_url,
                )

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
        """Export spans and log records in the background. Needs a running event loop."""
        if self._exporter is not None:
            self._exporter.start()
        if self._logs is not None:
            self._logs.start()
            self._handler = OtlpHandler(self._logs.add, FIELDS)
            logging.getLogger().addHandler(self._handler)

    async def stop(self, timeout_s: float) -> None:
        """Export the remaining spans and log records within `timeout_s` seconds."""
        if self._handler is not None:
            logging.getLogger().removeHandler(self._handler)
            await asyncio.sleep(0)  # records that were passed on just now
        open_exporters = [each for each in (self._exporter, self._logs) if each is not None]
        await asyncio.gather(*(each.stop(timeout_s) for each in open_exporters))

    def set_headers(self, headers: Mapping[str, str]) -> None:
        """Send other headers to the collector from the next batch on."""
        for exporter in (self._exporter, self._logs):
            if exporter is not None:
                exporter.headers = dict(headers)
