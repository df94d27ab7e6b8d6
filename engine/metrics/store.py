"""Values of metrics: recorded by the gateway for `/metrics`, and by `LLM` for `get_metrics`."""

import time
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from engine.api.messages import Finish, Ready, Stats
from engine.metrics.families import Family

TraceIds = tuple[str, str]  # trace and span of a value, in hexadecimal


class Exemplar(NamedTuple):
    """A value of a histogram with the trace of its request."""

    trace: TraceIds
    value: float
    unix_s: float  # when it was recorded


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
            self.exemplars[index] = Exemplar(trace, value, time.time())

    def cumulative(self) -> dict[str, int]:
        """Return the number of values up to each bound, with the bounds as text."""
        bounds = (*map(str, self.bounds), "+Inf")
        return dict(zip(bounds, accumulate(self.counts), strict=True))


class MetricStore:
    """Values by family name and label values. The first label of a family with `per_engine` is the engine."""

    def __init__(self, families: Sequence[Family], engines: Sequence[str]) -> None:
        self.families = tuple(families)
        self.numbers: dict[str, dict[tuple[str, ...], float]] = {}
        self.histograms: dict[str, dict[tuple[str, ...], Buckets]] = {}
        self._engines = tuple(engines)
        self._last = [Stats() for _ in engines]
        self._speculates = any(family.speculative for family in families)
        self._counts_costs = any(family.costs for family in families)
        self.ready: list[Ready | None] = [None for _ in engines]
        for family in self.families:
            self._start(family)
        for engine in self._engines:
            self.set("self_test_last_result", -1, engine)

    def _start(self, family: Family) -> None:
        engines = [(engine,) for engine in self._engines] if family.per_engine else [()]
        keys = [(*engine, *labels) for engine in engines for labels in family.start]
        if family.kind == "histogram":
            self.histograms[family.name] = {key: Buckets(family.buckets) for key in keys}
        else:
            self.numbers[family.name] = dict.fromkeys(keys, 0.0)

    def add(self, name: str, value: float, *labels: str) -> None:
        self.numbers[name][labels] += value

    def set(self, name: str, value: float, *labels: str) -> None:
        self.numbers[name][labels] = value

    def total(self, name: str) -> float:
        """Return the sum of a counter or gauge over all its series."""
        return sum(self.numbers[name].values())

    def mean(self, name: str) -> float:
        """Return the mean of a counter or gauge over its series; 0 without any."""
        numbers = self.numbers[name].values()
        return sum(numbers) / max(1, len(numbers))

    def observe(self, name: str, value: float, *labels: str, times: int = 1, trace: TraceIds | None = None) -> None:
        """Add a value to a histogram. A value with `trace` becomes the exemplar of its bucket."""
        self.histograms[name][labels].add(value, times, trace)

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
                self.numbers[name].setdefault((engine, adapter), 0.0)  # the adapter may have been loaded since
                self.add(name, count, engine, adapter)
        self.add("requests", 1, engine, reason)
        self.observe("request_generation_tokens", generated, engine)
        self.observe("request_params_max_tokens", max_tokens, engine)

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
        if self._counts_costs:
            for name in ("flops", "read_bytes", "step_seconds"):
                self.add(name, max(0.0, getattr(stats, name) - getattr(last, name)), engine)
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
            self.numbers["draft_accepted_tokens_by_position"].setdefault((engine, str(position)), 0.0)
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
        if self.ready[index] is not None:
            self.add("engine_restarts", 1, engine)
        self.ready[index] = ready
        self._last[index] = Stats()
        self.set("engine_up", 1, engine)

    def engine_down(self, index: int) -> None:
        """Set the gauges of an engine that ended to 0."""
        self.stats(index, Stats())
        self.set("engine_up", 0, self._engines[index])
