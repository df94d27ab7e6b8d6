"""What the gateway is told: manifest and checkpoint facts as one resolved GatewayConfig."""

from typing import Any

import msgspec

from appliance import __version__
from appliance.declare.settings import Settings
from appliance.gateway.config import GatewayConfig, SamplingDefaults, SecretRef
from appliance.manifest import Manifest, SecretFile
from appliance.plan.choice import Choice
from engine.models.checkpoint import Checkpoint

JOURNAL = "requests.journal"
_GENERATION = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
_GENERATION |= {name: name for name in ("presence_penalty", "frequency_penalty")} | {"max_new_tokens": "max_tokens"}


def sampling_defaults(manifest: Manifest, checkpoint: Checkpoint) -> tuple[SamplingDefaults, dict[str, Choice[Any]]]:
    """Manifest over generation_config.json over the API's defaults, and what to say about each key."""
    values: dict[str, Any] = {}
    choices: dict[str, Choice[Any]] = {}
    if manifest.model.generation_config == "auto":
        for theirs, ours in _GENERATION.items():
            value = checkpoint.generation.get(theirs)
            if isinstance(value, int | float) and not isinstance(value, bool):
                values[ours] = value
                choices[f"engine.sampling.{ours}"] = Choice(value, "generation_config.json")
    for name, value in manifest.engine.sampling:
        if value is not None:
            values[name] = value
            choices[f"engine.sampling.{name}"] = Choice(value)
    defaults = msgspec.convert(values, SamplingDefaults)
    for name in type(manifest.engine.sampling).model_fields:
        choices.setdefault(f"engine.sampling.{name}", Choice(getattr(defaults, name), "the API's default"))
    return defaults, choices


def gateway_config(
    settings: Settings,
    checkpoint: Checkpoint,
    *,
    names: tuple[str, ...],
    max_context: int,
    sampling: SamplingDefaults,
    sha256: str,
    outputs_sha256: str,
    drain_s: float,
    linger_s: float,
) -> GatewayConfig:
    """The launcher fills in the engines."""
    manifest = settings.manifest
    endpoints, limits, observability = manifest.endpoints, manifest.limits, manifest.observability
    template = manifest.model.chat_template
    return GatewayConfig(
        host=endpoints.host,
        port=endpoints.port,
        names=names,
        model=str(checkpoint.path),
        engines=(),
        max_context=max_context,
        vocab_size=checkpoint.model.embed.vocab,
        eos_token_ids=_end_tokens(manifest, checkpoint),
        chat_template=None if template is None else str(settings.file(("model", "chat_template"))),
        api_keys=None if endpoints.api_keys is None else _secret(settings, endpoints.api_keys),
        compat=endpoints.compat,
        cors_origins=endpoints.cors_origins,
        keep_alive_s=endpoints.keep_alive,
        trust_request_chat_template=endpoints.trust_request_chat_template,
        docs=endpoints.docs,
        page=endpoints.page,
        policy=manifest.engine.scheduling.policy,
        max_waiting=limits.max_waiting,
        max_waiting_tokens=limits.max_waiting_tokens,
        max_body_bytes=limits.max_body,
        max_output_tokens=limits.max_output_tokens,
        max_choices=limits.max_choices,
        max_prompts=limits.max_prompts,
        max_logprobs=limits.max_logprobs,
        max_stop=limits.max_stop,
        sampling=sampling,
        drain_s=drain_s,
        drain_linger_s=linger_s,
        hold_s=manifest.lifecycle.restart.hold,
        journal=_journal(settings),
        journal_keep_s=manifest.lifecycle.journal.keep,
        journal_bytes=manifest.lifecycle.journal.size,
        linger_s=manifest.lifecycle.journal.linger,
        log_level=observability.log_level,
        log_format=observability.log_format,
        log_requests=observability.log_requests,
        log_outputs=observability.log_outputs,
        vllm_metrics=observability.vllm_metrics,
        stories=observability.stories,
        version=__version__,
        manifest_sha256=sha256,
        outputs_sha256=outputs_sha256,
    )


def _journal(settings: Settings) -> str:
    """The file of durable replies; without a folder the name alone, which the launcher puts into the run directory."""
    wanted = settings.manifest.lifecycle.journal
    if not wanted.keep:
        return ""
    return JOURNAL if wanted.folder is None else str(settings.file(("lifecycle", "journal", "folder")) / JOURNAL)


def _end_tokens(manifest: Manifest, checkpoint: Checkpoint) -> tuple[int, ...]:
    """End tokens of config.json, and those that generation_config.json adds unless it is ignored."""
    if manifest.model.generation_config == "auto":
        return checkpoint.eos_token_ids
    own = checkpoint.config.get("eos_token_id")
    listed = own if isinstance(own, list) else [own]
    return tuple(token for token in checkpoint.eos_token_ids if token in listed)


def _secret(settings: Settings, name: str) -> SecretRef:
    secret = settings.manifest.secrets[name]
    if isinstance(secret, SecretFile):
        return SecretRef(file=str(settings.file(("secrets", name, "file"))))
    return SecretRef(env=secret.env)
