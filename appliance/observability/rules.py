"""Recording rules for Prometheus, and names of what alerts and the dashboard query.

Names of recorded series have the form level:metric:operation, as Prometheus recommends. A service is identified by the
labels `job` and `instance`, which Prometheus adds.
"""

from dataclasses import dataclass

SERVICE = "job, instance"
RANGES = ("5m", "30m", "1h", "6h")
"""Periods of the burn rates of an objective."""
PROBES = "/ready|/live|/health|/healthz|/ping|/metrics"
"""Handlers whose replies are no replies to clients."""
QUANTILES = (0.5, 0.95, 0.99)
LATENCIES = {
    "time_to_first_token": "time_to_first_token_seconds",
    "inter_token_latency": "inter_token_latency_seconds",
    "request_duration": "request_duration_seconds",
    "queue_time": "request_queue_time_seconds",
}
"""Histograms with recorded quantiles, by a short name."""


@dataclass(frozen=True)
class Record:
    """A recording rule."""

    name: str
    expr: str


@dataclass(frozen=True)
class Objectives:
    """Objectives of latency. Both times are bounds of buckets of their histograms."""

    first_token_s: float = 2.5
    """Time from arrival to first token, in seconds."""
    token_s: float = 0.1
    """Time between two tokens, in seconds."""
    share: float = 0.99
    """Share of requests, or of tokens, that must be at least as fast."""

    @property
    def budget(self) -> float:
        """Share that may be slower."""
        return 1 - self.share


def recordings(objectives: Objectives) -> tuple[Record, ...]:
    """Return all recording rules."""
    return (*_rates(), *_quantiles(), *_slow_shares(objectives))


def _sum(expr: str, by: str = SERVICE) -> str:
    return f"sum by ({by}) ({expr})"


def _rates() -> list[Record]:
    http = f'http_requests_total{{handler!~"{PROBES}"}}'
    failed = f'http_requests_total{{handler!~"{PROBES}", status="5xx"}}'
    hits, queries = "slipway_prefix_cache_hit_tokens_total", "slipway_prefix_cache_query_tokens_total"
    return [
        Record("service:slipway_requests_waiting:sum", _sum("slipway_requests_waiting")),
        Record("service:slipway_requests_running:sum", _sum("slipway_requests_running")),
        Record("service:slipway_requests:rate5m", _sum("rate(slipway_requests_total[5m])")),
        Record("service:slipway_prompt_tokens:rate5m", _sum("rate(slipway_prompt_tokens_total[5m])")),
        Record("service:slipway_generation_tokens:rate5m", _sum("rate(slipway_generation_tokens_total[5m])")),
        Record("service:slipway_preemptions:rate5m", _sum("rate(slipway_preemptions_total[5m])")),
        Record(
            "service:slipway_prefix_cache_hits:ratio_rate5m",
            f"{_sum(f'rate({hits}[5m])')} / ({_sum(f'rate({queries}[5m])')} > 0)",
        ),
        *(
            Record(
                f"service:slipway_{name}:ratio_rate5m",
                f"{_sum(f'rate(slipway_{used}_total[5m])')} / ({_sum(f'slipway_hardware_{limit}_per_second')} > 0)",
            )
            for name, used, limit in (("mfu", "flops", "flops"), ("bandwidth_utilization", "read_bytes", "bytes"))
        ),
        Record(
            "service:http_errors:ratio_rate5m",
            # No series exists before the first error, so a zero is added for each service.
            f"({_sum(f'rate({failed}[5m])')} or 0 * {_sum(f'rate({http}[5m])')}) / ({_sum(f'rate({http}[5m])')} > 0)",
        ),
    ]


def _quantiles() -> list[Record]:
    return [
        Record(
            f"service:slipway_{name}_seconds:p{round(100 * quantile)}_rate5m",
            f"histogram_quantile({quantile}, {_sum(f'rate(slipway_{metric}_bucket[5m])', f'{SERVICE}, le')})",
        )
        for name, metric in LATENCIES.items()
        for quantile in QUANTILES
    ]


def slow_share(name: str, period: str) -> str:
    """Return the name of the recorded share of slow requests or tokens. `name` is a key of LATENCIES."""
    return f"service:slipway_{name}_slow:ratio_rate{period}"


def _slow_shares(objectives: Objectives) -> list[Record]:
    bounds = {"time_to_first_token": objectives.first_token_s, "inter_token_latency": objectives.token_s}
    records = []
    for name, bound in bounds.items():
        metric = f"slipway_{LATENCIES[name]}"
        for period in RANGES:
            fast = _sum(f'rate({metric}_bucket{{le="{float(bound)}"}}[{period}])')
            every = _sum(f"rate({metric}_count[{period}])")
            records.append(Record(slow_share(name, period), f"1 - {fast} / ({every} > 0)"))
    return records
