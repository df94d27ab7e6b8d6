"""The plan: manifest × checkpoint facts × machine → what will run. A pure function: it reads no file, no environment.

Every `auto` is resolved here, with the reason.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from appliance.declare.fingerprint import outputs_hash
from appliance.declare.keys import leaves
from appliance.declare.problems import Problem
from appliance.declare.settings import Settings
from appliance.gateway.config import GatewayConfig
from appliance.manifest import Manifest
from appliance.plan.capacity import Device, batch_limit, measure, share_out
from appliance.plan.choice import Choice
from appliance.plan.gateway import gateway_config, sampling_defaults
from appliance.plan.kernels import graph_sizes, resolve
from appliance.plan.machine import Machine
from appliance.plan.memory import ELEMENT_BYTES, Memory, graph_bytes
from appliance.plan.placement import Places, place
from appliance.plan.precision import matmul_precision
from appliance.plan.ranks import STEP_TOKENS
from appliance.rules.rule import is_compiled
from appliance.source.facts import Facts
from appliance.source.order import Job
from engine.api import config as engine_config
from engine.api.config import EngineConfig, WeightBits
from engine.kv.layout import SCALE_BYTES, layout
from engine.models.checkpoint import Checkpoint


@dataclass(frozen=True)
class Effective:
    """One key as it will be: its value in the manifest, where that was written, and what `auto` became and why."""

    key: str
    value: Any
    origin: str
    resolved: Any = None
    reason: str = ""


@dataclass(frozen=True)
class Plan:
    """`engines` lack their sockets and `gateway` its engines: the launcher fills them in. `memory` is that of one
    engine. `sha256` identifies the effective manifest. `other_cpus`: where all but the engines run; empty: anywhere.
    `notices` are warnings for the operator."""

    manifest: Manifest
    path: Path
    sha256: str
    architecture: str
    engines: tuple[EngineConfig, ...]
    gateway: GatewayConfig
    memory: Memory
    machine: Machine
    effective: tuple[Effective, ...]
    other_cpus: tuple[int, ...] = ()
    notices: tuple[Problem, ...] = ()
    job: Job | None = None  # what is to be downloaded before an engine starts
    origin: str = ""  # the checkpoint's source with its version, and where it lies here


def plan(settings: Settings, checkpoint: Checkpoint, machine: Machine, origin: Facts | None = None) -> Plan:
    """What will run. `origin`: where the checkpoint comes from, if that is not its own path.
    Raises Refused for what this machine or this checkpoint cannot do."""
    manifest = settings.manifest
    resolved = resolve(settings, checkpoint, machine)
    view = resolved.view
    element_bytes = ELEMENT_BYTES[view.dtype]
    running = batch_limit(manifest, checkpoint, machine, view.device)
    sizes = graph_sizes(view, running.value)
    places = place(settings, machine, view.device, view.tensor)
    step_tokens = _step_tokens(manifest, view.device)
    invariant = view.batch_invariant or is_compiled(view.kernels)
    pages = layout(
        checkpoint.model,
        block_tokens=view.block_tokens,
        element_bytes=ELEMENT_BYTES[view.kv_cache],
        scale_bytes=SCALE_BYTES.get(view.kv_cache, 0),
        ranks=view.tensor,
    )
    room = measure(
        settings,
        checkpoint,
        machine,
        device=view.device,
        element_bytes=element_bytes,
        step_tokens=step_tokens.value,
        rows=running.value,
        compiled=is_compiled(view.kernels),
        bits=view.weights,
        graph_sizes=sizes,
        ranks=view.tensor,
    )
    max_context, cache, memory = share_out(settings, checkpoint, room, pages, view.device, running.value)
    folder, sha256 = settings.path.resolve().parent, fingerprint(manifest)
    config = EngineConfig(
        model=str(checkpoint.path),
        device=view.device,
        dtype=view.dtype,
        kv_dtype=view.kv_cache,
        kv_bytes=memory.cache,
        kv_measured=view.device == "cuda" and manifest.hardware.kv_cache_memory == "auto",
        weight_bytes=memory.weights,
        workspace_bytes=memory.workspace,
        max_context=max_context.value,
        block_tokens=view.block_tokens,
        max_running=running.value,
        max_step_tokens=step_tokens.value,
        policy=manifest.engine.scheduling.policy,
        prefix_cache=manifest.engine.cache.prefix,
        overlap=manifest.engine.scheduling.overlap,
        threads=places.threads.value,
        tensor=view.tensor,
        kernels=view.kernels,
        invariant=invariant,
        matmul_precision=matmul_precision(settings, view.kernels, view.dtype, invariant),
        graph_sizes=sizes,
        graph_bytes=graph_bytes(checkpoint.model, sizes=sizes, element_bytes=element_bytes),
        weights=view.weights,
        weight_cache=_weight_cache(settings, view.weights),
        record_bytes=manifest.engine.record_size,
        trust_remote_code=manifest.model.trust_remote_code,
    )
    sampling, sampling_choices = sampling_defaults(manifest, checkpoint)
    origin = origin or Facts(checkpoint.path, checkpoint.path, "")
    names = manifest.model.names or (origin.name or checkpoint.path.name,)
    choices: dict[str, Choice[Any]] = {
        **_source(manifest, origin),
        "model.names": Choice(list(names), "the last part of the source's name"),
        **resolved.choices,
        "model.max_context": max_context,
        "hardware.threads": places.threads,
        "hardware.cpus": places.pinned,
        "hardware.reserved_cores": places.reserved,
        "hardware.kv_cache_memory": cache,
        "engine.scheduling.max_running": running,
        "engine.scheduling.max_step_tokens": step_tokens,
        **sampling_choices,
    }
    effective = _effective(settings, choices)
    return Plan(
        manifest=manifest,
        path=settings.path.resolve(),
        sha256=sha256,
        architecture=checkpoint.architecture,
        engines=_engines(config, manifest, folder, places),
        gateway=gateway_config(
            *(manifest, checkpoint, folder),
            names=names,
            max_context=max_context.value,
            sampling=sampling,
            sha256=sha256,
            outputs_sha256=outputs_hash(settled(effective)),
        ),
        memory=memory,
        machine=machine,
        other_cpus=places.others,
        effective=effective,
        notices=settings.notices,
        job=origin.job,
        origin=f"{origin.shown or origin.path}: {origin.note}" if origin.note else str(origin.path),
    )


def settled(effective: Iterable[Effective]) -> dict[str, Any]:
    """Every key with the value that it has come to; keys of sources that are not taken have none."""
    values = {one.key: one.resolved if one.reason else one.value for one in effective}
    platform = next((values[key] for key in PLATFORMS if key in values), None)
    sources = {key.name: None for key in leaves() if key.path[:2] == ("model", "source")}
    return sources | {"model.source.path": platform} | values


PLATFORMS = ("model.source.sagemaker", "model.source.vertex")  # kinds without keys of their own


def _source(manifest: Manifest, origin: Facts) -> dict[str, Choice[Any]]:
    """Where the checkpoint lies, behind the key that named it."""
    kind = manifest.model.source.kind
    if kind == "path":
        return {"model.source.path": Choice(str(origin.path))}
    if kind == "huggingface":
        return {"model.source.huggingface.revision": Choice(origin.revision, origin.version)}
    if kind in ("http", "s3", "gs"):
        return {f"model.source.{kind}.{'url' if kind == 'http' else 'uri'}": Choice(origin.shown, origin.version)}
    return {f"model.source.{kind}": Choice(origin.shown or str(origin.path), origin.version or origin.note)}


def fingerprint(manifest: Manifest) -> str:
    """SHA-256 of the effective manifest, whatever its spelling was."""
    return hashlib.sha256(manifest.model_dump_json().encode()).hexdigest()


def _weight_cache(settings: Settings, weights: WeightBits) -> str | None:
    if weights == "stored" or not settings.manifest.quantization.keep or settings.cache is None:
        return None
    return str(settings.cache / "weights")


def _step_tokens(manifest: Manifest, device: Device) -> Choice[int]:
    wanted = manifest.engine.scheduling.max_step_tokens
    return Choice(wanted) if wanted != "auto" else Choice(STEP_TOKENS[device], f"for {device}")


def _engines(config: EngineConfig, manifest: Manifest, folder: Path, places: Places) -> tuple[EngineConfig, ...]:
    """One configuration a replica, with its CPUs; with several, each records into a file of its own. Only the threads
    of compiled kernels are pinned one by one: torch's inherit what the process may use."""
    count, record, compiled = manifest.parallelism.data, manifest.engine.record, is_compiled(config.kernels)
    names: list[str | None] = [None] * count
    if record is not None:
        file = folder / record
        files = [file] if count == 1 else [file.with_name(f"{file.stem}-{i}{file.suffix}") for i in range(count)]
        names = [str(file) for file in files]
    homes = [
        engine_config.Place(cpus if compiled else (), home if compiled else cpus)
        for cpus, home in zip(places.cpus, places.homes, strict=True)
    ]
    each = config.tensor
    return tuple(
        msgspec.structs.replace(
            config,
            record=name,
            cpus=homes[number * each].cpus,
            process_cpus=homes[number * each].process_cpus,
            rank_cpus=tuple(homes[number * each + 1 : (number + 1) * each]),
            gpu=number * each if each > 1 and config.device == "cuda" else 0,
        )
        for number, name in enumerate(names)
    )


def _effective(settings: Settings, choices: dict[str, Choice[Any]]) -> tuple[Effective, ...]:
    """Every key with its value; secrets by their names only."""
    found = []
    values = settings.manifest.model_dump()
    for key in leaves():
        if "*" in key.path:
            continue
        value: Any = values
        for part in key.path[:-1]:
            value = None if value is None else value[part]
        if value is None or (key.path[:2] == ("model", "source") and value[key.path[-1]] is None):
            continue  # of another kind of source
        value = value[key.path[-1]]
        choice = choices.get(key.name)
        if choice and choice.reason:
            found.append(Effective(key.name, value, settings.origin(key), choice.value, choice.reason))
        else:
            found.append(Effective(key.name, value, settings.origin(key), value))
    for name in PLATFORMS:
        if choice := choices.get(name):
            place = settings.origin(tuple(name.split(".")))
            found.insert(1, Effective(name, "{}", place, choice.value, choice.reason))
    for name in settings.manifest.secrets:
        found.append(Effective(f"secrets.{name}", "(a reference)", settings.origin(("secrets", name)), "(a reference)"))
    return tuple(found)
