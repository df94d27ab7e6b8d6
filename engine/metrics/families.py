"""Declarations of all metrics: kind, name, and vLLM's name of the same metric.

Names follow the Prometheus conventions (base units, no colon, `_total` only on counters). docs/metrics.md documents
them.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Family:
    """A metric family."""

    kind: Literal["counter", "gauge", "histogram"]
    name: str  # without prefix and without `_total`
    help: str
    vllm: str | None = None
    """Name in vLLM, without prefix and `_total`; None if vLLM has no such metric."""
    labels: tuple[str, ...] = ()
    start: tuple[tuple[str, ...], ...] = ((),)
    """Label values, without model_name and engine, of the series that exist from the start."""
    buckets: tuple[float, ...] = ()
    per_engine: bool = True  # whether each engine has its own series
    speculative: bool = False  # exists only with speculative decoding
    costs: bool = False  # exists only with `observability.mfu_metrics`


_FIRST_TOKEN_S = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10,
    20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_TOKEN_S = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5,
    10, 20, 40, 80,
)  # fmt: skip
_REQUEST_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60,
    120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
_CHECK_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_STEP_TOKENS = tuple(float(2**exponent) for exponent in range(15) if exponent not in (1, 2))
_CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)
_PREEMPTIONS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)


def token_buckets(max_context: int) -> tuple[float, ...]:
    """Return 1, 2, 5, 10, … up to the context length; at least one bucket."""
    steps = [float(mantissa * 10**exponent) for exponent in range(10) for mantissa in (1, 2, 5)]
    return tuple(step for step in steps if step <= max(1, max_context))


FINISHES = (("stop",), ("length",), ("abort",), ("error",), ("deadline",), ("repetition",))
SOURCES = (("local_compute",), ("local_cache_hit",), ("external_kv_transfer",))
UNITS = ("requests", "tokens")
TOOL_CALLS = tuple(
    (mode, outcome, "chat_completions")
    for mode in ("streaming", "non_streaming")
    for outcome in ("tool_call", "no_tool_call")
)


CONNECTIONS = (("active",), ("idle",))
CLOSED_CONNECTIONS = tuple(
    (reason,) for reason in ("max", "max_idle", "max_per_address", "max_head", "max_headers", "head_timeout", "invalid")
)
GRAMMAR_CHECKS = (("kept",), ("valid",), ("invalid",), ("limit",))


def gauges() -> tuple[Family, ...]:
    return (
        Family("gauge", "requests_running", "Requests in the running batch.", "num_requests_running"),
        Family("gauge", "requests_waiting", "Requests that wait for the engine.", "num_requests_waiting"),
        Family(
            "gauge",
            "requests_waiting_by_reason",
            "Waiting requests by the resource that they wait for.",
            "num_requests_waiting_by_reason",
            ("reason",),
            (("capacity",), ("deferred",)),
        ),
        Family("gauge", "kv_cache_usage_ratio", "Used share of the KV cache blocks, 0 to 1.", "kv_cache_usage_perc"),
        Family(
            "gauge",
            "draft_acceptance_length",
            "Mean number of tokens of a row with a draft since the start of the engine; 0 without drafts.",
            speculative=True,
        ),
        Family(
            "gauge",
            "hardware_flops_per_second",
            "Floating-point operations per second of an engine's hardware; 0 for an unknown device.",
            costs=True,
        ),
        Family(
            "gauge",
            "hardware_bytes_per_second",
            "Memory bandwidth of an engine's hardware; 0 for an unknown device.",
            costs=True,
        ),
        Family("gauge", "adapters_loaded", "LoRA adapters that requests can select."),
        Family("gauge", "adapters_active", "LoRA adapters on the device."),
        Family("gauge", "requests_waiting_for_adapter", "Requests that wait for a LoRA adapter or a slot for it."),
        Family("gauge", "requests_held", "Sequences that wait for an engine to restart.", per_engine=False),
        Family("gauge", "journal_bytes", "Size of the journal of durable replies.", per_engine=False),
        Family(
            "gauge",
            "self_test_last_result",
            "Result of the last golden prompt of an engine: 1 pass, 0 fail, -1 not run.",
            start=((),),
        ),
        Family("gauge", "self_test_seconds", "Duration of the last golden prompt of an engine."),
        Family("gauge", "responses_bytes", "Size of the file of stored responses.", per_engine=False),
        Family("gauge", "engine_up", "1 if the engine serves, otherwise 0."),
        Family(
            "gauge",
            "tls_certificate_end_seconds",
            "Expiry time of the certificate of endpoints.tls, in seconds since 1970; 0 without one.",
            per_engine=False,
        ),
        Family(
            "gauge",
            "connections",
            "Open client connections, with a request in progress (active) and without one (idle).",
            labels=("state",),
            start=CONNECTIONS,
            per_engine=False,
        ),
        Family("gauge", "open_requests", "Open HTTP requests, including streams.", per_engine=False),
    )


def _drafts() -> tuple[Family, ...]:
    """Return the counters of speculative decoding, with their names in vLLM."""

    def counter(name: str, text: str, vllm: str) -> Family:
        return Family("counter", name, text, vllm, speculative=True)

    return (
        counter("drafts", "Rows of steps with draft tokens of speculative decoding.", "spec_decode_num_drafts"),
        counter("draft_tokens", "Draft tokens of speculative decoding.", "spec_decode_num_draft_tokens"),
        counter("draft_accepted_tokens", "Draft tokens that became reply tokens.", "spec_decode_num_accepted_tokens"),
        Family("counter", "draft_search_seconds", "Time to search drafts by lookup.", speculative=True),
        Family(
            "counter",
            "draft_accepted_tokens_by_position",
            "Draft tokens that became reply tokens, by position in their draft, the first at 0.",
            "spec_decode_num_accepted_tokens_per_pos",
            ("position",),
            (("0",),),
            speculative=True,
        ),
    )


def counters() -> tuple[Family, ...]:
    def counter(name: str, text: str, vllm: str | None = None) -> Family:
        return Family("counter", name, text, vllm or name)

    return (
        counter("prompt_tokens", "Prompt tokens of requests that produced a token, including cached ones."),
        counter("prompt_tokens_cached", "Prompt tokens that came from the prefix cache."),
        Family(
            "counter",
            "prompt_tokens_by_source",
            "Prompt tokens by the origin of their keys and values.",
            "prompt_tokens_by_source",
            ("source",),
            SOURCES,
        ),
        Family(
            "counter",
            "prompt_tokens_cached_by_source",
            "Cached prompt tokens by the location of the cache.",
            "prompt_tokens_cached_by_source",
            ("source",),
            (("device",),),
        ),
        counter("generation_tokens", "Generated tokens."),
        Family(
            "counter",
            "requests",
            "Finished sequences by finish reason.",
            "request_success",
            ("finished_reason",),
            FINISHES,
        ),
        Family("counter", "adapter_requests", "Finished sequences of a LoRA adapter.", labels=("adapter",), start=()),
        Family(
            "counter", "adapter_generation_tokens", "Generated tokens of a LoRA adapter.", labels=("adapter",), start=()
        ),
        Family("counter", "adapter_evictions", "LoRA adapters that left their slot for another one."),
        Family("counter", "adapter_loads", "LoRA adapters that were read from their files or the host cache."),
        Family("counter", "adapter_load_seconds", "Time to read LoRA adapters."),
        counter("preemptions", "Preemptions of running requests, which released their KV blocks.", "num_preemptions"),
        counter("prefix_cache_query_tokens", "Prompt tokens looked up in the prefix cache.", "prefix_cache_queries"),
        counter("prefix_cache_hit_tokens", "Prompt tokens found in the prefix cache.", "prefix_cache_hits"),
        *_drafts(),
        Family(
            "counter",
            "recomputed_tokens",
            "Prompt tokens in the prefix cache that were computed nevertheless, for the logits of a cached prompt.",
            "prompt_tokens_recomputed",
        ),
        Family("counter", "flops", "Floating-point operations of steps: matrix products and attention.", costs=True),
        Family("counter", "read_bytes", "Bytes of weights, keys and values that steps read.", costs=True),
        Family("counter", "step_seconds", "Time in which steps ran.", costs=True),
        Family(
            "counter",
            "request_interruptions",
            "Interruptions of sequences by the loss of their engine.",
            per_engine=False,
        ),
        Family(
            "counter",
            "requests_quarantined",
            "Sequences that were isolated because they crash engines.",
            per_engine=False,
        ),
        Family(
            "counter",
            "requests_joined",
            "Requests with an Idempotency-Key that joined or resumed an existing generation.",
            per_engine=False,
        ),
        Family(
            "counter",
            "journal_errors",
            "Failed writes of the journal of durable replies.",
            per_engine=False,
        ),
        Family(
            "counter",
            "journal_skipped_records",
            "Damaged sections of the journal of durable replies that were skipped at the start of the gateway.",
            per_engine=False,
        ),
        Family("counter", "self_test_runs", "Golden prompts that engines computed, at their start and when idle."),
        Family("counter", "self_test_yields", "Golden prompts that were abandoned because a request arrived."),
        Family("counter", "self_test_failures", "Golden prompts with wrong results; each ended an engine."),
        Family(
            "counter",
            "grammar_checks",
            "Grammars of requests, by result: compiled before, valid, invalid, over a limit.",
            None,
            ("outcome",),
            GRAMMAR_CHECKS,
            per_engine=False,
        ),
        Family("counter", "grammars_compiled", "Grammars that the engine compiled."),
        Family("counter", "grammars_cached", "Grammars that the engine had compiled already."),
        Family(
            "counter",
            "grammar_compile_seconds",
            "Time of the engine's grammar compilations, concurrent with its steps.",
        ),
        Family("counter", "masks", "Rows of steps whose tokens were limited by a grammar."),
        Family("counter", "mask_seconds", "Time to compute grammar masks, mostly while a step runs."),
        Family("counter", "media_encoded", "Images and videos whose embeddings the engine computed."),
        Family("counter", "media_cached", "Images and videos whose embeddings the engine still had."),
        Family(
            "counter",
            "media_encode_seconds",
            "Time of steps for the embeddings of images and videos; on a GPU, without the device's own time.",
        ),
        Family("counter", "engine_restarts", "Restarts of a serving engine."),
        Family(
            "counter",
            "admission_rejections",
            "Requests refused with 503 due to the queue length in requests or prompt tokens, or to deadlines.",
            "admission_rejections",
            ("reason",),
            (("max_num_queued_reqs",), ("max_num_queued_tokens",), ("ttft_deadline_ms",), ("deadline_ms",)),
            per_engine=False,
        ),
        Family(
            "counter",
            "connections_closed",
            "Client connections refused or closed by a limit of endpoints.connections, or for an invalid request.",
            labels=("reason",),
            start=CLOSED_CONNECTIONS,
            per_engine=False,
        ),
        Family("counter", "trace_spans_exported", "Spans that the collector of traces accepted.", per_engine=False),
        Family(
            "counter",
            "trace_spans_dropped",
            "Spans that were lost: the queue was full, the collector was unreachable or rejected them, or the gateway "
            "ended first.",
            labels=("reason",),
            start=(("queue_full",), ("unreachable",), ("rejected",), ("shutdown",)),
            per_engine=False,
        ),
        Family("counter", "log_records_exported", "Log records that the collector accepted.", per_engine=False),
        Family(
            "counter",
            "log_records_dropped",
            "Log records that were lost: the queue was full, the collector was unreachable or rejected them, or the "
            "gateway ended first.",
            labels=("reason",),
            start=(("queue_full",), ("unreachable",), ("rejected",), ("shutdown",)),
            per_engine=False,
        ),
        Family("counter", "audio_seconds", "Duration of the audio of speech requests.", per_engine=False),
        Family(
            "counter",
            "audio_fallbacks",
            "Windows of audio that were decoded again at a higher temperature, because their text was implausible.",
            per_engine=False,
        ),
        Family(
            "counter",
            "key_tokens",
            "Computed prompt and reply tokens of an API key, without tokens from the prefix cache.",
            labels=("key",),
            start=(),
            per_engine=False,
        ),
        Family(
            "counter",
            "key_refusals",
            "Requests refused with 429 because their API key exceeded its requests or tokens per minute.",
            labels=("key", "unit"),
            start=(),
            per_engine=False,
        ),
        Family(
            "counter",
            "tool_call_parser_invocations",
            "Replies searched for tool calls.",
            "tool_call_parser_invocations",
            ("mode", "outcome", "request_type"),
            TOOL_CALLS,
            per_engine=False,
        ),
    )


def histograms(max_context: int) -> tuple[Family, ...]:
    tokens = token_buckets(max_context)

    def histogram(
        name: str, text: str, buckets: tuple[float, ...], vllm: str | None = None, *, per_engine: bool = True
    ) -> Family:
        bounds = tuple(map(float, buckets))
        return Family("histogram", name, text, vllm or name, buckets=bounds, per_engine=per_engine)

    return (
        histogram("request_prompt_tokens", "Prompt tokens of a request.", tokens),
        histogram("request_generation_tokens", "Generated tokens of a sequence.", tokens),
        histogram("request_max_num_generation_tokens", "Longest choice in tokens.", tokens, per_engine=False),
        histogram("request_params_max_tokens", "max_tokens of a sequence.", tokens),
        histogram("request_prefill_kv_computed_tokens", "Prompt tokens computed, not cached.", tokens),
        histogram("request_params_n", "Choices that a request asks for.", _CHOICES, per_engine=False),
        histogram("request_preemptions", "Preemptions of a request.", _PREEMPTIONS, "request_num_preemptions"),
        histogram("iteration_tokens", "Prompt and generated tokens of a step.", _STEP_TOKENS, "iteration_tokens_total"),
        histogram("time_to_first_token_seconds", "Time from arrival to first token.", _FIRST_TOKEN_S),
        histogram("inter_token_latency_seconds", "Time between two tokens of a sequence.", _TOKEN_S),
        histogram("request_time_per_output_token_seconds", "Mean time between the tokens of a sequence.", _TOKEN_S),
        histogram(
            "request_duration_seconds", "Time from arrival to last token.", _REQUEST_S, "e2e_request_latency_seconds"
        ),
        histogram("request_queue_time_seconds", "Time from arrival to first scheduling.", _REQUEST_S),
        histogram("request_inference_time_seconds", "Time from first scheduling to last token.", _REQUEST_S),
        histogram("request_prefill_time_seconds", "Time from first scheduling to first token.", _REQUEST_S),
        Family(
            "histogram",
            "interruption_seconds",
            "Time from the loss of a sequence's engine until the next engine resumes it.",
            buckets=_REQUEST_S,
        ),
        Family(
            "histogram",
            "grammar_check_seconds",
            "Time to check a new grammar of a request.",
            buckets=_CHECK_S,
            per_engine=False,
        ),
        Family(
            "histogram",
            "media_fetch_seconds",
            "Time to fetch an image, video or audio clip of a request, or to decode its data URL.",
            buckets=_CHECK_S,
            per_engine=False,
        ),
        Family(
            "histogram",
            "media_process_seconds",
            "Time to decode and process an image, video or audio clip that is not in the gateway's cache.",
            buckets=_CHECK_S,
            per_engine=False,
        ),
        histogram("request_decode_time_seconds", "Time from first token to last token.", _REQUEST_S),
    )
