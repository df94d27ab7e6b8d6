"""Build the resolved GatewayConfig from the manifest and the checkpoint."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import msgspec

from appliance.config.gateway import (
    SECTIONS,
    EncoderLimits,
    GatewayConfig,
    HardwareLimits,
    SamplingDefaults,
    SecretRef,
    Tls,
    value_at,
    with_values,
)
from appliance.config.keys import metadata
from appliance.config.manifest import Manifest
from appliance.config.sections.secrets import SecretFile
from appliance.config.settings import Settings
from appliance.config.version import __version__
from appliance.planning.choice import Choice, refuse
from appliance.planning.output_format import model_type
from appliance.planning.pooled import pooled_model, tasks_of
from appliance.planning.speech import speech_model, transcriber
from appliance.planning.targets import passed_on
from engine.api.media import Modality
from engine.lowering.lower import lower
from engine.lowering.rewrites import keep_routes
from engine.media.families import known_modalities
from engine.models.checkpoint import Checkpoint

JOURNAL = "requests.journal"
RESPONSES = "responses.journal"
_GENERATION = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
_GENERATION |= {name: name for name in ("presence_penalty", "frequency_penalty")} | {"max_new_tokens": "max_tokens"}


def sampling_defaults(manifest: Manifest, checkpoint: Checkpoint) -> tuple[SamplingDefaults, dict[str, Choice[Any]]]:
    """Return the sampling defaults, and a choice with its reason for each key.

    The manifest takes precedence over generation_config.json, and that over the defaults of the API. Encoder-decoder
    models default to greedy decoding, unless the checkpoint sets `do_sample`.
    """
    values: dict[str, Any] = {}
    choices: dict[str, Choice[Any]] = {}
    if manifest.model.generation_config == "auto":
        for theirs, ours in _GENERATION.items():
            value = checkpoint.generation.get(theirs)
            if isinstance(value, int | float) and not isinstance(value, bool):
                values[ours] = value
                choices[f"engine.sampling.{ours}"] = Choice(value, "generation_config.json")
    drawn = manifest.model.generation_config == "auto" and checkpoint.generation.get("do_sample") is True
    if checkpoint.model.encoder is not None and not drawn:
        values["temperature"] = 0.0
        choices["engine.sampling.temperature"] = Choice(0.0, "used for encoder-decoder models")
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
    choices: Mapping[str, Choice[Any]],
    names: tuple[str, ...],
    encoder: EncoderLimits | None,
    sampling: SamplingDefaults,
    sha256: str,
    outputs_sha256: str,
    hardware: HardwareLimits | None = None,
) -> GatewayConfig:
    """Return the gateway's configuration without its engines, which the launcher adds. Raise Refused.

    `choices` are the resolved values by key.
    """
    _check_limits(settings)
    _check_grpc(settings)
    manifest = settings.manifest
    template, api_keys = manifest.model.chat_template, manifest.endpoints.api_keys
    trace_headers = manifest.observability.traces.headers
    config = GatewayConfig(
        **{name: getattr(manifest, name) for name in SECTIONS},
        **passed_on(manifest, "gateway", choices),
        names=names,
        adapters=tuple(adapter.name for adapter in manifest.adapters),
        adapter_folders=_adapter_folders(settings),
        model=str(checkpoint.path),
        engines=(),
        vocab_size=checkpoint.model.embed.vocab,
        eos_token_ids=_end_tokens(manifest, checkpoint),
        tasks=tasks_of(checkpoint),
        pooled=pooled_model(checkpoint, manifest.model.pooling.max_input or 0),
        encoder=encoder,
        speech=speech_model(checkpoint),
        routed_experts=_routed_experts(manifest, checkpoint),
        transcriber=transcriber(checkpoint),
        modalities=_modalities(manifest, checkpoint),
        embedded_modalities=_embedded_modalities(manifest, checkpoint),
        media_width=_media_width(manifest, checkpoint),
        chat_template=None if template is None else str(settings.file(("model", "chat_template"))),
        format=manifest.model.format,
        model_type=model_type(checkpoint),
        api_keys=None if api_keys is None else _secret(settings, api_keys),
        trace_headers=None if trace_headers is None else _secret(settings, trace_headers),
        tls=_tls(settings),
        profiler=manifest.observability.profiler_folder is not None,
        hardware=hardware if manifest.observability.mfu_metrics else None,
        sampling=sampling,
        journal=_journal(settings),
        responses=_responses(settings),
        version=__version__,
        manifest_sha256=sha256,
        outputs_sha256=outputs_sha256,
    )
    return with_values(config, _unused(config))


def _routed_experts(manifest: Manifest, checkpoint: Checkpoint) -> tuple[int, ...]:
    if not manifest.engine.return_routed_experts:
        return ()
    return tuple(routes.width for routes in keep_routes(lower(checkpoint.model)).routes)


def _modalities(manifest: Manifest, checkpoint: Checkpoint) -> tuple[Modality, ...]:
    """Return the modalities for which the served model has a tower and a known processor, and which are not turned
    off."""
    media, limits = checkpoint.model.media, manifest.limits.media
    if media is None:
        return ()
    counts = {"image": limits.images, "video": limits.videos, "audio": limits.audios}
    known = known_modalities(checkpoint.path)
    return tuple(kind for kind in known if counts[kind] and (kind == "audio" or limits.images))


def _embedded_modalities(manifest: Manifest, checkpoint: Checkpoint) -> tuple[Modality, ...]:
    """Return the modalities whose embeddings requests may have."""
    if checkpoint.model.media is None or not manifest.model.media.accept_embeddings:
        return ()
    return tuple(kind for kind in known_modalities(checkpoint.path) if kind in checkpoint.model.media.modalities)


def _media_width(manifest: Manifest, checkpoint: Checkpoint) -> int:
    media = checkpoint.model.media
    return media.width if media is not None and manifest.model.media.accept_embeddings else 0


def _unused(config: GatewayConfig) -> dict[str, Any]:
    """Return the defaults of keys that the gateway does not read, so that their changes do not concern it: keys of
    engines, and paths as they are written. Complete paths are fields of their own."""
    defaults = msgspec.structs.replace(config, **{name: type(getattr(config, name))() for name in SECTIONS})
    keys = [key for key, declared in metadata().items() if declared.effect.restart == "engine" or declared.is_path]
    return {key: value_at(defaults, key) for key in keys if key.partition(".")[0] in SECTIONS}


def _adapter_folders(settings: Settings) -> tuple[str, ...]:
    """Return the folders from which adapters may be loaded. Raise Refused without slots for them."""
    loading = settings.manifest.adapter_loading
    if loading.folders and loading.max_active is None:
        refuse(settings, "adapter_loading.folders", "requires adapter_loading.max_active, the number of adapter slots")
    if loading.on_request and not loading.folders:
        refuse(settings, "adapter_loading.on_request", "requires adapter_loading.folders")
    return tuple(str(settings.file(("adapter_loading", "folders", at))) for at in range(len(loading.folders)))


def _tls(settings: Settings) -> Tls | None:
    wanted = settings.manifest.endpoints.tls
    if wanted.certificate is None and wanted.key is None:
        return None
    if wanted.key is None:
        refuse(settings, "endpoints.tls.certificate", "requires endpoints.tls.key, the file of its private key")
    if wanted.certificate is None:
        refuse(settings, "endpoints.tls.key", "requires endpoints.tls.certificate, the file of its certificate")
    files = {name: str(settings.file(("endpoints", "tls", name))) for name in ("certificate", "key")}
    return Tls(**files, least_version=wanted.least_version)


def _journal(settings: Settings) -> str:
    """Return the file of the reply journal; without a configured folder a bare name, resolved in the run directory."""
    return _in_folder(settings, JOURNAL) if settings.manifest.lifecycle.journal.keep else ""


def _responses(settings: Settings) -> str:
    """Return the file of stored responses, by the same rule as the journal."""
    return _in_folder(settings, RESPONSES) if settings.manifest.endpoints.responses.keep else ""


def _in_folder(settings: Settings, name: str) -> str:
    wanted = settings.manifest.lifecycle.journal.folder
    return name if wanted is None else str(settings.file(("lifecycle", "journal", "folder")) / name)


def _end_tokens(manifest: Manifest, checkpoint: Checkpoint) -> tuple[int, ...]:
    """Return the end tokens of config.json, and those of generation_config.json unless it is ignored."""
    if manifest.model.generation_config == "auto":
        return checkpoint.eos_token_ids
    own = checkpoint.config.get("eos_token_id")
    listed = own if isinstance(own, list) else [own]
    return tuple(token for token in checkpoint.eos_token_ids if token in listed)


def _check_limits(settings: Settings) -> None:
    """Raise Refused for limits per API key if no API keys are configured, as nothing would enforce the limits."""
    for name, value in settings.manifest.limits.per_key:
        if value is not None and settings.manifest.endpoints.api_keys is None:
            refuse(settings, f"limits.per_key.{name}", "requires API keys; set endpoints.api_keys")


def _check_grpc(settings: Settings) -> None:
    """Raise Refused for a gRPC port without the packages for it, or on the port of HTTP."""
    endpoints = settings.manifest.endpoints
    if endpoints.grpc_port is None:
        return
    if find_spec("grpc") is None or find_spec("google.protobuf") is None:
        refuse(settings, "endpoints.grpc_port", "requires the package grpcio: pip install 'slipway-serve[grpc]'")
    if endpoints.grpc_port == endpoints.port:
        refuse(settings, "endpoints.grpc_port", "is the port of HTTP; use another one, such as 8081")


def _secret(settings: Settings, name: str) -> SecretRef:
    secret = settings.manifest.secrets[name]
    if isinstance(secret, SecretFile):
        return SecretRef(file=str(settings.file(("secrets", name, "file"))))
    return SecretRef(env=secret.env)
