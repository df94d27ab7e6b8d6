"""The plan: manifest × checkpoint facts × machine → what will run. A pure function: it reads no file, no environment.

Every `auto` is resolved here, with the reason.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from appliance.declare.keys import leaves
from appliance.declare.settings import Settings
from appliance.gateway.config import GatewayConfig
from appliance.manifest import Manifest
from appliance.plan.capacity import Device, measure, share_out
from appliance.plan.choice import Choice, refuse
from appliance.plan.gateway import gateway_config, sampling_defaults
from appliance.plan.kernels import (
    batch_invariant,
    dtype_of,
    graph_sizes,
    is_compiled,
    kernels,
    kv_type,
    weight_bits,
)
from appliance.plan.machine import Machine
from appliance.plan.memory import ELEMENT_BYTES, Memory, graph_bytes
from appliance.plan.placement import Places, place
from appliance.source.facts import Facts
from appliance.source.order import Job
from engine.api.config import EngineConfig, WeightBits
from engine.kv.layout import SCALE_BYTES, layout
from engine.models.checkpoint import Checkpoint

STEP_TOKENS = {"cpu": 512, "cuda": 8192}


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
    engine. `sha256` identifies the effective manifest. `other_cpus`: where all but the engines run; empty: anywhere."""

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
    job: Job | None = None  # what is to be downloaded before an engine starts
    warnings: tuple[str, ...] = ()
    origin: str = ""  # the checkpoint's source with its version, and where it lies here


def plan(settings: Settings, checkpoint: Checkpoint, machine: Machine, origin: Facts | None = None) -> Plan:
    """What will run. `origin`: where the checkpoint comes from, if that is not its own path.
    Raises Refused for what this machine or this checkpoint cannot do."""
    manifest = settings.manifest
    device = _device(settings, machine)
    dtype = dtype_of(settings, checkpoint, machine, device.value)
    chosen = kernels(settings, checkpoint, machine, device.value, dtype.value)
    weights = weight_bits(settings, checkpoint, chosen.value, dtype.value)
    kv_dtype = kv_type(settings, checkpoint, machine, dtype.value, chosen.value, weights.value)
    sizes = graph_sizes(settings, chosen.value)
    places = place(settings, machine, device.value)
    step_tokens = _step_tokens(manifest, device.value)
    pages = layout(
        checkpoint.model,
        block_tokens=manifest.engine.cache.block_tokens,
        element_bytes=ELEMENT_BYTES[kv_dtype.value],
        scale_bytes=SCALE_BYTES.get(kv_dtype.value, 0),
    )
    room = measure(
        settings,
        checkpoint,
        machine,
        device=device.value,
        element_bytes=ELEMENT_BYTES[dtype.value],
        step_tokens=step_tokens.value,
        compiled=is_compiled(chosen.value),
        bits=weights.value,
        graph_sizes=sizes,
    )
    max_context, cache, memory = share_out(settings, checkpoint, room, pages, device.value)
    folder, sha256 = settings.path.resolve().parent, fingerprint(manifest)
    config = EngineConfig(
        model=str(checkpoint.path),
        device=device.value,
        dtype=dtype.value,
        kv_dtype=kv_dtype.value,
        kv_bytes=memory.cache,
        kv_measured=device.value == "cuda" and manifest.hardware.kv_cache_memory == "auto",
        weight_bytes=memory.weights,
        workspace_bytes=memory.workspace,
        max_context=max_context.value,
        block_tokens=manifest.engine.cache.block_tokens,
        max_running=manifest.engine.scheduling.max_running,
        max_step_tokens=step_tokens.value,
        policy=manifest.engine.scheduling.policy,
        prefix_cache=manifest.engine.cache.prefix,
        overlap=manifest.engine.scheduling.overlap,
        threads=places.threads.value,
        kernels=chosen.value,
        invariant=batch_invariant(settings, chosen.value),
        graph_sizes=sizes,
        graph_bytes=graph_bytes(checkpoint.model, sizes=sizes, element_bytes=ELEMENT_BYTES[dtype.value]),
        weights=weights.value,
        weight_cache=_weight_cache(settings, weights.value),
        record_bytes=manifest.engine.record_size,
        trust_remote_code=manifest.model.trust_remote_code,
    )
    sampling, sampling_choices = sampling_defaults(manifest, checkpoint)
    origin = origin or Facts(checkpoint.path, checkpoint.path, "")
    names = manifest.model.names or (origin.name or checkpoint.path.name,)
    choices: dict[str, Choice[Any]] = {
        **_source(manifest, origin),
        "model.names": Choice(list(names), "the last part of the source's name"),
        "model.dtype": dtype,
        "model.max_context": max_context,
        "quantization.weights": weights,
        "quantization.kv_cache": kv_dtype,
        "hardware.device": device,
        "hardware.threads": places.threads,
        "hardware.cpus": places.pinned,
        "hardware.reserved_cores": places.reserved,
        "hardware.kernels": chosen,
        "hardware.kv_cache_memory": cache,
        "engine.scheduling.max_step_tokens": step_tokens,
        **sampling_choices,
    }
    return Plan(
        manifest=manifest,
        path=settings.path.resolve(),
        sha256=sha256,
        architecture=checkpoint.architecture,
        engines=_engines(config, manifest, folder, places),
        gateway=gateway_config(
            manifest, checkpoint, folder, names=names, max_context=max_context.value, sampling=sampling, sha256=sha256
        ),
        memory=memory,
        machine=machine,
        other_cpus=places.others,
        job=origin.job,
        origin=f"{origin.shown or origin.path}: {origin.note}" if origin.note else str(origin.path),
        effective=_effective(settings, choices),
    )


def _source(manifest: Manifest, origin: Facts) -> dict[str, Choice[Any]]:
    """Where the checkpoint lies, behind the key that named it."""
    kind = manifest.model.source.kind
    if kind == "huggingface":
        return {"model.source.huggingface.revision": Choice(origin.revision, origin.note)}
    if kind in ("http", "s3", "gs"):
        return {f"model.source.{kind}.{'url' if kind == 'http' else 'uri'}": Choice(origin.shown, origin.note)}
    return {"model.source.path": Choice(str(origin.path))} if kind == "path" else {}


def fingerprint(manifest: Manifest) -> str:
    """SHA-256 of the effective manifest, whatever its spelling was."""
    return hashlib.sha256(manifest.model_dump_json().encode()).hexdigest()


def _device(settings: Settings, machine: Machine) -> Choice[Device]:
    wanted = settings.manifest.hardware.device
    if wanted == "cuda" and not machine.gpus:
        refuse(settings, "hardware.device", f"cuda: there is no usable GPU here ({machine.no_gpu}); use cpu or auto")
    if wanted != "auto":
        return Choice(wanted)
    if machine.gpus:
        return Choice("cuda", f"there is a {machine.gpus[0].name}")
    return Choice("cpu", machine.no_gpu)


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
    return tuple(
        msgspec.structs.replace(
            config, record=name, cpus=cpus if compiled else (), process_cpus=home if compiled else cpus
        )
        for name, cpus, home in zip(names, places.cpus, places.homes, strict=True)
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
    for name in settings.manifest.secrets:
        found.append(Effective(f"secrets.{name}", "(a reference)", settings.origin(("secrets", name)), "(a reference)"))
    return tuple(found)
