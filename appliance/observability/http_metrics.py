"""HTTP metrics with the names of the FastAPI instrumentator, which existing dashboards use."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, Summary
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

_DURATION_S = (0.1, 0.5, 1)
_FINE_DURATION_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 7.5, 10, 30, 60
)  # fmt: skip


class HttpMetrics(Collector):
    """HTTP metrics, updated once per request. The handler is the template of the route, so that paths with names share
    one series."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        by_handler = ("handler", "method", "status")
        self._requests = Counter("http_requests", "Requests.", by_handler, registry=registry)
        self._duration = Histogram(
            "http_request_duration_seconds", "Time to the end of the reply.", ("handler", "method"),
            buckets=_DURATION_S, registry=registry,
        )  # fmt: skip
        self._fine = Histogram(
            "http_request_duration_highr_seconds", "Time to the end of the reply, over all handlers, in finer buckets.",
            buckets=_FINE_DURATION_S, registry=registry,
        )  # fmt: skip
        self._received = Summary(
            "http_request_size_bytes", "Size of request bodies in bytes.", ("handler",), registry=registry
        )
        self._sent = Summary(
            "http_response_size_bytes", "Size of response bodies in bytes.", ("handler",), registry=registry
        )

    def request(self, handler: str, method: str, status: int, seconds: float, received: int, sent: int) -> None:
        self._requests.labels(handler, method, f"{status // 100}xx").inc()
        self._duration.labels(handler, method).observe(seconds)
        self._fine.observe(seconds)
        self._received.labels(handler).observe(received)
        self._sent.labels(handler).observe(sent)

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            if not metric.name.endswith("_created"):
                yield metric
