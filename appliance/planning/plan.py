"""Deployment plan: manifest × checkpoint × machine → configuration of every process.

Planning is a pure function: it reads no files and no environment variables. It resolves every `auto`, with a reason.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from appliance.checkpoints.download_spec import Job
from appliance.checkpoints.facts import Facts
from appliance.config.fingerprint import outputs_hash
from appliance.config.gateway import GatewayConfig
from appliance.config.keys import leaves
from appliance.config.manifest import Manifest
from appliance.config.problems import Problem, Refused
from appliance.config.settings import Settings
from appliance.constraints.rule import TRITON, View, is_compiled
from appliance.constraints.unused_keys import problems as idle_keys
from appliance.constraints.weights import INTEGERS
from appliance.hardware.machine import Machine
from appliance.planning.capacity import size_cache
from appliance.planning.choice import Choice, refuse
from appliance.planning.draft import draft_choices
from appliance.planning.encoder_input import encoder_limits
from appliance.planning.estimate import Estimate, estimate
from appliance.planning.executor import check_executor
from appliance.planning.gateway import gateway_config, sampling_defaults
from appliance.planning.kernels import Resolved, resolve
from appliance.planning.memory import Memory, planned_parts
from appliance.planning.output_format import output_format
from appliance.planning.placement import ThreadPlacement, place
from appliance.planning.pooled import check_pieces, resolved_task
from appliance.planning.pooled import choices as pooled_choices
from appliance.planning.precision import matmul_precision
from appliance.planning.self_test import self_test, tolerance
from appliance.planning.shutdown import shutdown_timing
from appliance.planning.speculation import speculation
from appliance.planning.step_costs import hardware_limits, step_costs
from appliance.planning.targets import passed_on
from appliance.planning.torch_compile import programs_folder, torch_compile
from appliance.planning.weight_format import other_than_auto, weight_format
from engine.api import config as engine_config
from engine.api.config import (
    AdapterConfig,
    AdapterLoadingConfig,
    CacheConfig,
    EngineConfig,
    HardwareConfig,
    LifecycleConfig,
    MemoryConfig,
    ModelConfig,
    ObservabilityConfig,
    ParallelismConfig,
    QuantizationConfig,
    SchedulingConfig,
    SpeculationConfig,
    with_values,
)
from engine.api.files import real_path
from engine.api.golden import Recorded
from engine.models.checkpoint import Checkpoint
from engine.models.parts import Model


@dataclass(frozen=True)
class Effective:
    """Value of one key before and after planning."""

    key: str
    value: Any  # value in the manifest
    origin: str  # source location of the value
    resolved: Any  # value in effect: `auto` is resolved, and paths are relative to the manifest's folder
    reason: str = ""  # why `auto` was resolved to this value


@dataclass(frozen=True)
class Plan:
    """The plan of one deployment."""

    manifest: Manifest
    path: Path
    sha256: str  # identifies the effective manifest
    architecture: str
    engines: tuple[EngineConfig, ...]  # without their sockets, which the launcher adds
    gateway: GatewayConfig  # without its engines, which the launcher adds
    memory: Memory  # of one engine
    estimate: Estimate  # of one engine
    machine: Machine
    effective: tuple[Effective, ...]
    other_cpus: tuple[int, ...] = ()  # CPUs for all processes but the engines; empty: no restriction
    layers: tuple[str, ...] = ()  # files, overlays and profile that compose the manifest, as text
    notices: tuple[Problem, ...] = ()  # warnings for the operator
    crash_folder: Path | None = None  # the manifest's folder for crash bundles, if it sets one
    job: Job | None = None  # files to download before an engine starts
    origin: str = ""  # source of the checkpoint with its version, and its local path
    tokenizer: str = ""  # checkpoint file that defines the tokenizer
    assumed: tuple[str, ...] = ()  # facts not checked because the checkpoint folder has no weights


def plan(
    settings: Settings,
    checkpoint: Checkpoint,
    machine: Machine,
    origin: Facts | None = None,
    *,
    locked: bool = False,
    golden: Recorded | None = None,
) -> Plan:
    """Build the plan. Raise Refused if this machine or this checkpoint cannot serve the manifest.

    `origin` is where the checkpoint comes from, unless it is its own path. `locked` is true if a lock file exists
    beside the manifest; `golden` are its reference outputs, if the lock is enforced.
    """
    manifest, idle = settings.manifest, _unused_keys(settings, checkpoint.model)
    resolved = resolve(settings, checkpoint, machine)
    view = resolved.view
    budget = resolved.budget
    places = place(settings, machine, view.device, view.tensor)
    max_context, cache, memory = size_cache(settings, checkpoint, machine, budget, resolved.suggestions)
    check_pieces(settings, max_context.value)
    sha256 = fingerprint(settings)
    check_executor(settings, checkpoint.model, view)
    precision = matmul_precision(settings, view, budget)
    sampling, sampling_choices = sampling_defaults(manifest, checkpoint)
    drain, linger = shutdown_timing(settings)
    origin = origin or Facts(checkpoint.path, checkpoint.path, "")
    names = _names(settings, checkpoint, origin)
    choices: dict[str, Choice[Any]] = {
        **_model_choices(settings, checkpoint, origin, names, locked=locked),
        **resolved.choices,
        **_prefix(checkpoint),
        **weight_format(settings, checkpoint, view),
        "hardware.matmul_precision": precision,
        "hardware.torch_compile": torch_compile(settings, checkpoint.model, view),
        "model.max_context": max_context,
        "hardware.threads": places.threads,
        "hardware.cpus": places.pinned,
        "hardware.reserved_cores": places.reserved,
        "hardware.kv_cache_memory": cache,
        "hardware.capacity.tokens": _length(manifest, max_context.value),
        "engine.scheduling.max_running": budget.running,
        "engine.scheduling.max_step_tokens": budget.step,
        "speculation.method": speculation(manifest, checkpoint, view, budget.size, budget.ranks[0]),
        "lifecycle.drain": drain,
        "lifecycle.linger": linger,
        **sampling_choices,
    }
    config = _engine_config(settings, checkpoint, choices, resolved, memory, golden)
    choices["lifecycle.self_test.tolerance"] = tolerance(manifest, config)
    effective = _effective(settings, choices)
    estimated = estimate(
        checkpoint,
        machine,
        budget,
        threads=places.threads.value,
        engines=manifest.parallelism.data,
        max_context=max_context.value,
        most_rows=min(budget.running.value, max(1, memory.concurrency[0].requests)),
    )
    return Plan(
        manifest=manifest,
        path=real_path(settings.path),
        sha256=sha256,
        architecture=checkpoint.architecture,
        engines=_engines(config, settings, places),
        gateway=gateway_config(
            settings,
            checkpoint,
            choices=choices,
            names=names,
            encoder=encoder_limits(checkpoint, max_context.value, config),
            sampling=sampling,
            sha256=sha256,
            outputs_sha256=outputs_hash(resolved_values(effective)),
            hardware=hardware_limits(estimated.limits),
        ),
        memory=memory,
        estimate=estimated,
        machine=machine,
        other_cpus=places.others,
        layers=settings.layers,
        effective=effective,
        notices=(*settings.notices, *idle),
        crash_folder=_crash_folder(settings),
        job=origin.job,
        origin=f"{origin.shown or origin.path}: {origin.note}" if origin.note else str(origin.path),
    )


def _engine_config(
    settings: Settings,
    checkpoint: Checkpoint,
    choices: Mapping[str, Choice[Any]],
    resolved: Resolved,
    memory: Memory,
    golden: Recorded | None,
) -> EngineConfig:
    """Return the configuration of each engine, without its CPUs and its recording file."""
    manifest, view, budget = settings.manifest, resolved.view, resolved.budget
    group_size, head = other_than_auto(view, checkpoint)
    invariant = view.batch_invariant or is_compiled(view.kernels)
    passed = partial(passed_on, manifest, choices=choices)
    return EngineConfig(
        **passed("engine"),
        model=ModelConfig(
            **passed("engine.model"),
            path=str(checkpoint.path),
            dtype=view.activations,
            task=resolved_task(manifest, checkpoint),
        ),
        adapter_loading=AdapterLoadingConfig(**passed("engine.adapter_loading")),
        adapters=tuple(AdapterConfig(name=one.name, path=str(one.path)) for one in checkpoint.adapters),
        quantization=QuantizationConfig(
            **passed("engine.quantization"),
            weights=view.weights,
            group_size=group_size,
            head=head,
            embedding=view.facts.embedding,
            folder=_weight_cache(settings, view),
        ),
        parallelism=ParallelismConfig(**passed("engine.parallelism")),
        hardware=HardwareConfig(
            **passed("engine.hardware"),
            batch_invariant=invariant,
            graph_sizes=budget.graph_sizes,
            mixed_graph_sizes=budget.mixed_graph_sizes,
            torch_compile_folder=programs_folder(settings, choices["hardware.torch_compile"]),
        ),
        memory=MemoryConfig(
            **passed("engine.memory"),
            kv_cache=memory.cache,
            kv_cache_measured=view.device == "cuda"
            and memory.cache > 0
            and manifest.hardware.kv_cache_memory == "auto",
            weights=memory.weights,
            workspace=memory.workspace,
            graphs=memory.graphs,
            ranks=planned_parts(memory),
        ),
        scheduling=SchedulingConfig(**passed("engine.scheduling")),
        cache=CacheConfig(**passed("engine.cache")),
        speculation=SpeculationConfig(
            **passed("engine.speculation"),
            adaptive=manifest.speculation.method == "auto" and view.speculation != "off",
            model=_draft_path(manifest, checkpoint),
        ),
        lifecycle=LifecycleConfig(self_test=self_test(manifest, golden, skipped=_has_no_prompts(checkpoint.model))),
        observability=ObservabilityConfig(
            step_costs=step_costs(settings, checkpoint, budget), profiler_folder=_profiler_folder(settings)
        ),
    )


def _profiler_folder(settings: Settings) -> str:
    wanted = settings.manifest.observability.profiler_folder
    return "" if wanted is None else str(settings.file(("observability", "profiler_folder")))


def _draft_path(manifest: Manifest, checkpoint: Checkpoint) -> str:
    draft = checkpoint.draft
    return "" if draft is None or manifest.speculation.model is None else str(draft.path)


def _has_no_prompts(model: Model) -> bool:
    return model.pooler is not None or model.audio is not None


def _crash_folder(settings: Settings) -> Path | None:
    wanted = settings.manifest.lifecycle.crash_bundles
    return None if wanted.folder is None else settings.file(("lifecycle", "crash_bundles", "folder"))


def resolved_values(effective: Iterable[Effective]) -> dict[str, Any]:
    """Return the resolved value of every key; the keys of unused sources are None."""
    values = {one.key: one.resolved for one in effective}
    platform = next((values[key] for key in PLATFORMS if key in values), None)
    sources = {key.name: None for key in leaves() if key.path[:2] == ("model", "source")}
    return sources | {"model.source.path": platform} | values


def _unused_keys(settings: Settings, model: Model) -> tuple[Problem, ...]:
    """Return warnings about keys without an effect. Raise Refused if one of them is an error."""
    found = tuple(idle_keys(settings, model))
    if errors := [problem for problem in found if problem.level == "error"]:
        raise Refused(errors)
    return found


def _names(settings: Settings, checkpoint: Checkpoint, origin: Facts) -> tuple[str, ...]:
    """Return the names of the model. Raise Refused if an adapter has one of them."""
    manifest = settings.manifest
    names = manifest.model.names or (origin.name or checkpoint.path.name.removesuffix(".gguf"),)
    if (taken := next((one.name for one in manifest.adapters if one.name in names), None)) is not None:
        refuse(settings, "adapters", f"{taken} is the name of the model; give the adapter another name")
    return names


def _model_choices(
    settings: Settings, checkpoint: Checkpoint, origin: Facts, names: tuple[str, ...], *, locked: bool
) -> dict[str, Choice[Any]]:
    """Return the choices that say which files and names are served, and how replies and vectors are read."""
    manifest = settings.manifest
    return {
        **_source(manifest, origin),
        **_adapters(settings),
        **draft_choices(settings),
        "model.names": Choice(list(names), "" if manifest.model.names else "the last part of the source's name"),
        "model.lock": _lock(manifest, locked),
        **pooled_choices(manifest, checkpoint),
        "model.format": output_format(settings, checkpoint, origin.folder),
    }


PLATFORMS = ("model.source.sagemaker", "model.source.vertex")  # kinds of source without keys of their own


def _source(manifest: Manifest, origin: Facts) -> dict[str, Choice[Any]]:
    """Return the resolved checkpoint source, by the key that selects it."""
    kind = manifest.model.source.kind
    if kind == "path":
        return {"model.source.path": Choice(str(origin.path))}
    if kind == "huggingface":
        return {"model.source.huggingface.revision": Choice(origin.revision, origin.version)}
    if kind == "pypi":
        return {"model.source.pypi.sha256": Choice(origin.revision, origin.version)}
    if kind in ("http", "s3", "gs", "az"):
        return {f"model.source.{kind}.{'url' if kind == 'http' else 'uri'}": Choice(origin.shown, origin.version)}
    return {f"model.source.{kind}": Choice(origin.shown or str(origin.path), origin.version or origin.note)}


def _adapters(settings: Settings) -> dict[str, Choice[Any]]:
    """Return the adapters with paths relative to the manifest's folder."""
    each = enumerate(settings.manifest.adapters)
    found = [
        {"name": one.name, "path": settings.from_manifest(("adapters", at, "path"))}
        if one.uri is None
        else {"name": one.name, "uri": one.uri}
        for at, one in each
    ]
    folders = [settings.from_manifest(("adapter_loading", "folders", at))
               for at in range(len(settings.manifest.adapter_loading.folders))]  # fmt: skip
    named = {"adapters": Choice(found)} if found else {}
    return named | ({"adapter_loading.folders": Choice(folders)} if folders else {})


def fingerprint(settings: Settings) -> str:
    """Return the SHA-256 of the effective manifest, independent of its spelling and of its division into files."""
    value = settings.manifest.model_dump(mode="json")
    for (*above, name), path in settings.paths().items():
        section: Any = value
        for part in above:
            section = section[part]
        section[name] = path
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _lock(manifest: Manifest, locked: bool) -> Choice[str]:
    if manifest.model.lock != "auto":
        return Choice(manifest.model.lock)
    return (
        Choice("require", "there is a lock file next to the manifest")
        if locked
        else Choice("off", "there is no lock file")
    )


def _prefix(checkpoint: Checkpoint) -> dict[str, Choice[Any]]:
    """Return the choice that disables prefix caching, for models whose cached state cannot be shared by requests."""
    if checkpoint.model.encoder is None:
        return {}
    return {"engine.cache.prefix": Choice(False, "cross-attention states depend on the whole encoder input")}


def _weight_cache(settings: Settings, view: View) -> str | None:
    quantized = view.weights in INTEGERS or view.facts.head in INTEGERS
    if not quantized or view.kernels == TRITON or not settings.manifest.quantization.keep or settings.cache is None:
        return None
    return str(settings.cache / "weights")


def _length(manifest: Manifest, max_context: int) -> Choice[int]:
    wanted = manifest.hardware.capacity.tokens
    return Choice(wanted) if wanted != "auto" else Choice(max_context, "all of model.max_context")


def _engines(config: EngineConfig, settings: Settings, places: ThreadPlacement) -> tuple[EngineConfig, ...]:
    """Return one configuration per replica, with its CPUs. With several replicas, each records to its own file.

    Only threads of compiled kernels are pinned to single CPUs; torch's threads inherit the CPUs of the process.
    """
    count, compiled = settings.manifest.parallelism.data, is_compiled(config.hardware.kernels)
    names: list[str | None] = [None] * count
    if settings.manifest.engine.record is not None:
        file = settings.file(("engine", "record"))
        files = [file] if count == 1 else [file.with_name(f"{file.stem}-{i}{file.suffix}") for i in range(count)]
        names = [str(file) for file in files]
    homes = [
        engine_config.Place(cpus if compiled else (), home if compiled else cpus)
        for cpus, home in zip(places.cpus, places.homes, strict=True)
    ]
    each = config.parallelism.tensor
    return tuple(
        with_values(
            config,
            {
                "record": name,
                "hardware.cpus": homes[number * each].cpus,
                "hardware.process_cpus": homes[number * each].process_cpus,
                "parallelism.rank_cpus": tuple(homes[number * each + 1 : (number + 1) * each]),
                "hardware.gpu": number * each if each > 1 and config.hardware.device == "cuda" else 0,
            },
        )
        for number, name in enumerate(names)
    )


PATH_LISTS = ("adapters", "adapter_loading.folders")  # lists with paths, which `_adapters` resolves


def _effective(settings: Settings, choices: dict[str, Choice[Any]]) -> tuple[Effective, ...]:
    """Return every key with its value. Secrets appear by name only."""
    found = []
    values, paths = settings.manifest.model_dump(), settings.paths()
    for key in leaves():
        if "*" in key.path:
            continue
        value: Any = values
        for part in key.path[:-1]:
            value = None if value is None else value[part]
        if value is None or (key.path[:2] == ("model", "source") and value[key.path[-1]] is None):
            continue  # belongs to another kind of source
        value = value[key.path[-1]]
        choice = choices.get(key.name)
        if choice and choice.reason:
            found.append(Effective(key.name, value, settings.origin(key), choice.value, choice.reason))
        else:
            resolved = choice.value if key.name in PATH_LISTS and choice else paths.get(key.path, value)
            found.append(Effective(key.name, value, settings.origin(key), resolved))
    for name in PLATFORMS:
        if choice := choices.get(name):
            place = settings.origin(tuple(name.split(".")))
            found.insert(1, Effective(name, "{}", place, choice.value, choice.reason))
    for name in settings.manifest.secrets:
        found.append(Effective(f"secrets.{name}", "(a reference)", settings.origin(("secrets", name)), "(a reference)"))
    return tuple(found)
