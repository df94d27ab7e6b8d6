"""Metrics of the gateway: recorded once, and exported under Slipway's names and, if configured, also under vLLM's. One
store and one collector serve both, so that they cannot differ."""

import time
from bisect import bisect_left
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
from appliance.observability.families import UNITS, Family, counters, gauges, histograms
from appliance.observability.http_metrics import HttpMetrics
from engine.api.messages import Finish, Ready, Stats

OPENMETRICS = "application/openmetrics-text"

TraceIds = tuple[str, str]  # trace and span of a value, in hexadecimal

PHASES = ("starting", "loading", "warming", "ready", "restarting", "failed", "draining")


class Buckets:
    """Counts of one histogram series. A value belongs to the first bucket whose bound is greater than or equal to
    it."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self.exemplars: dict[int, Exemplar] = {}
        """The last traced value of each bucket, by the bucket's index."""

    def add(self, value: float, times: int = 1, trace: TraceIds | None = None) -> None:
        index = bisect_left(self.bounds, value)
        self.counts[index] += times
        self.sum += value * times
        if trace is not None:
            self.exemplars[index] = Exemplar({"trace_id": trace[0], "span_id": trace[1]}, value, round(time.time(), 3))

    def cumulative(self) -> list[tuple[str, float, Exemplar | None]]:
        total, rows = 0, []
        for index, (bound, count) in enumerate(zip((*self.bounds, float("inf")), self.counts, strict=True)):
            total += count
            text = "+Inf" if bound == float("inf") else str(bound)
            rows.append((text, float(total), self.exemplars.get(index)))
        return rows


class Metrics(Collector):
    """Values by family name and label values. The label of an engine is its index in the configuration."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._speculates = config.speculation != "off"
        families = (*gauges(), *counters(), *histograms(config.max_context))
        self.families = tuple(one for one in families if self._speculates or not one.speculative)
        self._engines = tuple(str(index) for index in range(len(config.engines)))
        self._numbers: dict[str, dict[tuple[str, ...], float]] = {}
        self._histograms: dict[str, dict[tuple[str, ...], Buckets]] = {}
        self._last = [Stats() for _ in config.engines]
        self._ready: list[Ready | None] = [None for _ in config.engines]
        self.phase = "starting"
        self.connections: Callable[[], tuple[int, int]] = lambda: (0, 0)
        """Returns the open connections and how many of them are idle; called when metrics are rendered."""
        self.http = HttpMetrics()
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.registry.register(self.http)
        ProcessCollector(registry=self.registry)
        for family in self.families:
            self._start(family)
        self._start_adapters()
        for engine in self._engines:
            self.set("self_test_last_result", -1, engine)

    def _start(self, family: Family) -> None:
        engines = [(engine,) for engine in self._engines] if family.per_engine else [()]
        keys = [(*engine, *labels) for engine in engines for labels in family.start]
        if family.kind == "histogram":
            self._histograms[family.name] = {key: Buckets(family.buckets) for key in keys}
        else:
            self._numbers[family.name] = dict.fromkeys(keys, 0.0)

    def _start_adapters(self) -> None:
        """Create the series of adapters, starting at 0."""
        for engine in self._engines:
            for adapter in self._config.adapters:
                self._numbers["adapter_requests"][engine, adapter] = 0.0
                self._numbers["adapter_generation_tokens"][engine, adapter] = 0.0

    def reconfigure(self, config: GatewayConfig) -> None:
        """Keep the values, with the names of another configuration."""
        self._config = config

    # Recording -----------------------------------------------------------------------------------------------------

    def add(self, name: str, value: float, *labels: str) -> None:
        self._numbers[name][labels] += value

    def set(self, name: str, value: float, *labels: str) -> None:
        self._numbers[name][labels] = value

    def total(self, name: str) -> float:
        """Return the sum of a counter or gauge over all its series."""
        return sum(self._numbers[name].values())

    def mean(self, name: str) -> float:
        """Return the mean of a counter or gauge over its series; 0 without any."""
        numbers = self._numbers[name].values()
        return sum(numbers) / max(1, len(numbers))

    def register_keys(self, names: Iterable[str]) -> None:
        """Create the series of API keys by name, starting at 0."""
        for name in names:
            self._numbers["key_tokens"].setdefault((name,), 0.0)
            for unit in UNITS:
                self._numbers["key_refusals"].setdefault((name, unit), 0.0)

    def observe(
        self, name: str, value: float, *labels: str, times: int = 1, trace: TraceIds | None = None
    ) -> None:
        """Add a value to a histogram. A value with `trace` becomes the exemplar of its bucket."""
        self._histograms[name][labels].add(value, times, trace)

    def prompt(self, engine: str, tokens: int, cached: int) -> None:
        """Record a computed prompt; `cached` of its tokens came from the prefix cache."""
        self.add("prompt_tokens", tokens, engine)
        self.add("prompt_tokens_cached", cached, engine)
        self.add("prompt_tokens_by_source", tokens - cached, engine, "local_compute")
        self.add("prompt_tokens_by_source", cached, engine, "local_cache_hit")
        self.add("prompt_tokens_cached_by_source", cached, engine, "device")
        self.observe("request_prompt_tokens", tokens, engine)
        self.observe("request_prefill_kv_computed_tokens", tokens - cached, engine)

    def finished(self, engine: str, reason: Finish, generated: int, max_tokens: int, adapter: str = "") -> None:
        """Record the end of a sequence. Each child of one request counts (ME-03)."""
        if adapter:
            for name, count in (("adapter_requests", 1), ("adapter_generation_tokens", generated)):
                self._numbers[name].setdefault((engine, adapter), 0.0)  # the adapter may have been loaded since
                self.add(name, count, engine, adapter)
        self.add("requests", 1, engine, reason)
        self.observe("request_generation_tokens", generated, engine)
        self.observe("request_params_max_tokens", max_tokens, engine)

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

    def stats(self, index: int, stats: Stats) -> None:
        """Update gauges to the new values and counters by their increments, because a restarted engine counts from
        0."""
        engine, last = self._engines[index], self._last[index]
        self.set("requests_running", stats.running, engine)
        self.set("requests_waiting", stats.waiting, engine)
        self.set("requests_waiting_by_reason", stats.waiting, engine, "capacity")
        self.set("kv_cache_usage_ratio", stats.kv_blocks_used / max(1, stats.kv_blocks_total), engine)
        self.add("preemptions", max(0, stats.preemptions - last.preemptions), engine)
        self.add("prefix_cache_query_tokens", max(0, stats.prefix_queries - last.prefix_queries), engine)
        self.add("prefix_cache_hit_tokens", max(0, stats.prefix_hits - last.prefix_hits), engine)
        self.add("recomputed_tokens", max(0, stats.recomputed_tokens - last.recomputed_tokens), engine)
        if self._speculates:
            self._drafts(engine, last, stats)
        self.add("self_test_yields", max(0, stats.self_test_yields - last.self_test_yields), engine)
        tested = max(0, stats.self_tests - last.self_tests)
        if tested:
            self.add("self_test_runs", tested, engine)
            self.set("self_test_seconds", stats.self_test_s, engine)
            self.set("self_test_last_result", 1, engine)
        self.add("grammars_compiled", max(0, stats.grammars_compiled - last.grammars_compiled), engine)
        self.add("grammars_cached", max(0, stats.grammars_cached - last.grammars_cached), engine)
        self.add("grammar_compile_seconds", max(0.0, stats.grammar_seconds - last.grammar_seconds), engine)
        self.add("masks", max(0, stats.masks - last.masks), engine)
        self.add("mask_seconds", max(0.0, stats.mask_seconds - last.mask_seconds), engine)
        self.set("adapters_loaded", stats.adapters_loaded, engine)
        self.set("adapters_active", stats.adapters_active, engine)
        self.set("requests_waiting_for_adapter", stats.adapter_waiting, engine)
        self.add("adapter_evictions", max(0, stats.adapter_evictions - last.adapter_evictions), engine)
        self.add("adapter_loads", max(0, stats.adapter_loads - last.adapter_loads), engine)
        self.add("adapter_load_seconds", max(0.0, stats.adapter_load_seconds - last.adapter_load_seconds), engine)
        self.add("media_encoded", max(0, stats.media_encoded - last.media_encoded), engine)
        self.add("media_cached", max(0, stats.media_cached - last.media_cached), engine)
        self.add("media_encode_seconds", max(0.0, stats.media_seconds - last.media_seconds), engine)
        self._last[index] = stats

    def _drafts(self, engine: str, last: Stats, stats: Stats) -> None:
        self.add("drafts", max(0, stats.drafts - last.drafts), engine)
        self.add("draft_tokens", max(0, stats.draft_tokens - last.draft_tokens), engine)
        self.add("draft_accepted_tokens", max(0, stats.accepted_tokens - last.accepted_tokens), engine)
        self.add("draft_search_seconds", max(0.0, stats.drafting_seconds - last.drafting_seconds), engine)
        for position, accepted in enumerate(stats.accepted_at):
            before = last.accepted_at[position] if position < len(last.accepted_at) else 0
            self._numbers["draft_accepted_tokens_by_position"].setdefault((engine, str(position)), 0.0)
            self.add("draft_accepted_tokens_by_position", max(0, accepted - before), engine, str(position))
        mean = 1 + stats.accepted_tokens / stats.drafts if stats.drafts else 0.0
        self.set("draft_acceptance_length", mean, engine)

    def self_test_failed(self, index: int) -> None:
        """Record that an engine ended because of a failed self-test prompt, which its last Stats do not include."""
        engine = self._engines[index]
        self.add("self_test_runs", 1, engine)
        self.add("self_test_failures", 1, engine)
        self.set("self_test_last_result", 0, engine)

    def engine_up(self, index: int, ready: Ready) -> None:
        engine = self._engines[index]
        if self._ready[index] is not None:
            self.add("engine_restarts", 1, engine)
        self._ready[index] = ready
        self._last[index] = Stats()
        self.set("engine_up", 1, engine)

    def engine_down(self, index: int) -> None:
        """Set the gauges of an engine that ended to 0."""
        self.stats(index, Stats())
        self.set("engine_up", 0, self._engines[index])

    # Rendering -----------------------------------------------------------------------------------------------------

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Return the exposition and its media type: OpenMetrics, with exemplars, if the Accept header asks for it,
        else the text format of Prometheus."""
        if OPENMETRICS not in accept:
            return generate_latest(self.registry), CONTENT_TYPE_PLAIN_0_0_4
        # The other escapings replace the colon of `vllm:` in samples.
        body = openmetrics.generate_latest(self.registry, openmetrics.ALLOWUTF8)
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
            for key, buckets in self._histograms[family.name].items():
                histogram.add_metric((model, *key), buckets.cumulative(), buckets.sum)
            return histogram
        kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
        numbers = kind(name, family.help, labels=labels)
        for key, value in self._numbers[family.name].items():
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
        for engine, ready in zip(self._engines, self._ready, strict=True):
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
