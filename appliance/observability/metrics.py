"""Metrics of the gateway: recorded once, and exported under Slipway's names and, if configured, also under vLLM's. One
store and one collector serve both, so that they cannot differ."""

import time
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from appliance.config.gateway import GatewayConfig
from appliance.observability.http_metrics import HttpMetrics
from engine.metrics.families import UNITS, Family, counters, gauges, histograms
from engine.metrics.store import Buckets, MetricStore

OPENMETRICS = "application/openmetrics-text"

PHASES = ("starting", "loading", "warming", "ready", "restarting", "failed", "draining")


class Metrics(MetricStore, Collector):
    """Metrics of the gateway. The label of an engine is its index in the configuration."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        super().__init__(_families(config), [str(index) for index in range(len(config.engines))])
        self.phase = "starting"
        self.connections: Callable[[], tuple[int, int]] = lambda: (0, 0)
        """Returns the open connections and how many of them are idle; called when metrics are rendered."""
        self.http = HttpMetrics()
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.registry.register(self.http)
        ProcessCollector(registry=self.registry)
        self._start_adapters()
        if config.hardware is not None:
            for engine in self._engines:
                self.set("hardware_flops_per_second", config.hardware.flops, engine)
                self.set("hardware_bytes_per_second", config.hardware.bandwidth, engine)

    def _start_adapters(self) -> None:
        """Create the series of adapters, starting at 0."""
        for engine in self._engines:
            for adapter in self._config.adapters:
                self.numbers["adapter_requests"][engine, adapter] = 0.0
                self.numbers["adapter_generation_tokens"][engine, adapter] = 0.0

    def reconfigure(self, config: GatewayConfig) -> None:
        """Keep the values, with the names of another configuration."""
        self._config = config

    # Recording -----------------------------------------------------------------------------------------------------

    def register_keys(self, names: Iterable[str]) -> None:
        """Create the series of API keys by name, starting at 0."""
        for name in names:
            self.numbers["key_tokens"].setdefault((name,), 0.0)
            for unit in UNITS:
                self.numbers["key_refusals"].setdefault((name, unit), 0.0)

    def request_done(self, choices: int, most_tokens: int) -> None:
        """Record the end of an HTTP request with `choices` sequences, the longest of `most_tokens` tokens."""
        self.observe("request_params_n", choices)
        self.observe("request_max_num_generation_tokens", most_tokens)

    def tool_calls(self, streaming: bool, found: bool) -> None:
        """Record that a chat reply was searched for tool calls."""
        mode = "streaming" if streaming else "non_streaming"
        self.add("tool_call_parser_invocations", 1, mode, "tool_call" if found else "no_tool_call", "chat_completions")

    def grammar_checked(self, outcome: str, seconds: float) -> None:
        """Record the check of a request's grammar; "kept" means that the result was cached."""
        self.add("grammar_checks", 1, outcome)
        if outcome != "kept":
            self.observe("grammar_check_seconds", seconds)

    def media_loaded(self, fetch_s: float, process_s: float) -> None:
        """Record the loading of an image, video or audio clip; 0.0 means that it was processed before."""
        self.observe("media_fetch_seconds", fetch_s)
        if process_s:
            self.observe("media_process_seconds", process_s)

    # Rendering -----------------------------------------------------------------------------------------------------

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Return the exposition and its media type: OpenMetrics, with exemplars, if the Accept header asks for it,
        else the text format of Prometheus."""
        if OPENMETRICS not in accept:
            return generate_latest(self.registry), CONTENT_TYPE_PLAIN_0_0_4
        # The other escapings replace the colon of `vllm:` in samples.
        body = openmetrics.generate_latest(self.registry, openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call]
        return body, openmetrics.CONTENT_TYPE_LATEST

    def collect(self) -> Iterator[Metric]:
        connections, idle = self.connections()
        self.set("connections", connections - idle, "active")
        self.set("connections", idle, "idle")
        for family in self.families:
            yield self._family_metric(family, f"slipway_{family.name}")
        yield self._build_info()
        yield self._phase_metric()
        if self._config.observability.vllm_metrics:
            for family in self.families:
                if family.vllm is not None:
                    yield self._family_metric(family, f"vllm:{family.vllm}")
            yield self._cache_info()

    def _family_metric(self, family: Family, name: str) -> Metric:
        labels = ("model_name", *(("engine",) if family.per_engine else ()), *family.labels)
        model = self._config.names[0]
        if family.kind == "histogram":
            histogram = HistogramMetricFamily(name, family.help, labels=labels)
            for key, buckets in self.histograms[family.name].items():
                histogram.add_metric((model, *key), _rows(buckets), buckets.sum)
            return histogram
        kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
        numbers = kind(name, family.help, labels=labels)
        for key, value in self.numbers[family.name].items():
            numbers.add_metric((model, *key), value)
        return numbers

    def _build_info(self) -> Metric:
        info = GaugeMetricFamily(
            "slipway_build_info",
            "Version and manifest of this service; always 1.",
            labels=("version", "manifest_sha256", "model_name"),
        )
        info.add_metric((self._config.version, self._config.manifest_sha256, self._config.names[0]), 1)
        return info

    def _phase_metric(self) -> Metric:
        phases = GaugeMetricFamily(
            "slipway_phase", "1 for the current phase of the service, 0 for the others.", labels=("phase",)
        )
        for phase in sorted({*PHASES, self.phase}):
            phases.add_metric((phase,), float(phase == self.phase))
        return phases

    def _cache_info(self) -> Metric:
        labels = (
            "engine", "block_size", "num_gpu_blocks", "kv_cache_size_tokens", "kv_cache_max_concurrency"
        )  # fmt: skip
        info = GaugeMetricFamily("vllm:cache_config_info", "Sizes of the KV cache; always 1.", labels=labels)
        for engine, ready in zip(self._engines, self.ready, strict=True):
            if ready is None:
                info.add_metric((engine, "0", "0", "0", "0"), 1)
                continue
            concurrency = f"{ready.kv_tokens / ready.max_context:.2f}"
            sizes = (str(ready.block_tokens), str(ready.kv_blocks), str(ready.kv_tokens), concurrency)
            info.add_metric((engine, *sizes), 1)
        return info


def now() -> float:
    """Return the gateway's clock for latencies, in seconds."""
    return time.monotonic()


def _families(config: GatewayConfig) -> list[Family]:
    """Return the families that a gateway with this configuration has."""
    speculates, costs = config.speculation != "off", config.observability.mfu_metrics
    families = (*gauges(), *counters(), *histograms(config.max_context))
    return [one for one in families if (speculates or not one.speculative) and (costs or not one.costs)]


def _rows(buckets: Buckets) -> list[tuple[str, float] | tuple[str, float, Exemplar]]:
    """Return the cumulative counts, each with the exemplar of its bucket."""
    rows: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
    for index, (bound, count) in enumerate(buckets.cumulative().items()):
        found = buckets.exemplars.get(index)
        if found is None:
            rows.append((bound, float(count)))
            continue
        (trace_id, span_id), value, unix_s = found
        rows.append(
            (bound, float(count), Exemplar({"trace_id": trace_id, "span_id": span_id}, value, round(unix_s, 3)))
        )
    return rows
