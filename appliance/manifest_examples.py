"""Values that somebody might write, by section and key: what editors offer, the page of all keys and `slipway explain`
show. Keys that take fixed words, true or false need none."""

from typing import Any

EXAMPLES: dict[str, tuple[Any, ...]] = {
    "Source.path": ("/models/Qwen3-0.6B", "../models/llama"),
    "HubSource.files": (["*.json", "model.safetensors"],),
    "ArchiveSource.sha256": ("0123456789abcdef" * 4,),
    "ArchiveSource.max_size": ("40GiB",),
    "Model.credentials": ("hub",),
    "Download.cache": ("/var/cache/slipway",),
    "Download.stall_timeout": ("30s",),
    "Download.attempts": (10,),
    "Download.total_timeout": ("2h",),
    "Download.min_free": ("20GiB",),
    "Model.names": (["assistant"], ["assistant", "qwen3-0.6b"]),
    "Model.max_context": (8192, 32768),
    "Model.chat_template": ("templates/chat.jinja",),
    "Parallelism.data": (2,),
    "Parallelism.tensor": (2, 8),
    "Hardware.threads": (4,),
    "Hardware.cpus": ("0-3,8",),
    "Hardware.reserved_cores": (1,),
    "Hardware.kv_cache_memory": ("4GiB",),
    "Hardware.memory_share": (0.9,),
    "Capacity.requests": (16,),
    "Capacity.tokens": (8192,),
    "Scheduling.max_running": (16, 512),
    "Scheduling.max_step_tokens": (256, 16384),
    "Cache.block_tokens": (32,),
    "Sampling.temperature": (0.7,),
    "Sampling.top_p": (0.8,),
    "Sampling.top_k": (20,),
    "Sampling.min_p": (0.05,),
    "Sampling.repetition_penalty": (1.1,),
    "Engine.record": ("steps.jsonl",),
    "Engine.record_size": ("64MiB",),
    "Endpoints.host": ("127.0.0.1", "::"),
    "Endpoints.port": (8080,),
    "Endpoints.api_keys": ("clients",),
    "Endpoints.cors_origins": (["https://chat.example.com"],),
    "Endpoints.keep_alive": ("5s",),
    "Limits.max_waiting": (256,),
    "Limits.max_waiting_tokens": (400000,),
    "Limits.max_body": ("1MiB",),
    "Limits.max_output_tokens": (4096,),
    "Limits.max_choices": (4,),
    "Limits.max_prompts": (16,),
    "Limits.max_logprobs": (5, -1),
    "Limits.max_stop": (4,),
    "Health.startup_budget": ("1h",),
    "Health.stalled_loading": ("15m",),
    "Health.stalled_busy": ("5m",),
    "Health.stalled_idle": ("3m",),
    "Lifecycle.drain": ("25s",),
    "Restart.max": (3,),
    "Restart.window": ("5m",),
    "Restart.backoff": ("2s",),
    "Restart.longest_backoff": ("1m",),
    "Restart.hold": ("0s", "30s"),
    "Journal.folder": ("/var/lib/slipway/journal",),
    "CrashBundles.folder": ("/var/lib/slipway/crashes",),
    "Journal.keep": ("1h",),
    "Journal.size": ("256MiB",),
    "Journal.linger": ("5m",),
    "Observability.stories": (1000,),
    "ManifestFile.extends": ("parts/service.yaml",),
    "ManifestFile.overlays": ({"dev": {"observability": {"log_level": "debug"}}},),
    "ManifestFile.variables": ({"context": 8192},),
    "Profiled.profiles": (
        [{"name": "h200", "match": {"gpu": "H200"}, "set": {"engine": {"scheduling": {"max_running": 512}}}}],
    ),
    "Profile.name": ("h200",),
    "Profile.set": ({"model": {"max_context": 32768}},),
    "Match.gpu": ("H200",),
    "Match.count": (2, ">=2"),
    "Match.memory": (">=75GB",),
    "Match.compute_capability": (">=9.0",),
    "Match.cores": (">=16",),
    "SecretFile.file": ("/run/secrets/api_keys",),
    "SecretEnv.env": ("API_KEYS",),
}


def for_editors(schema: dict[str, Any], section: type) -> None:
    """Lays the examples of a section's keys into its JSON Schema; a section that extends another has the other's. Takes
    out titles that only repeat the key."""
    for name, node in schema.get("properties", {}).items():
        node.pop("title", None)
        for owner in section.__mro__:
            if found := EXAMPLES.get(f"{owner.__name__}.{name}"):
                node.setdefault("examples", list(found))
