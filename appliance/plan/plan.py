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
from appliance.plan.machine import Machine
from appliance.plan.memory import ELEMENT_BYTES, Memory
from engine.api.config import Dtype, EngineConfig, WeightBits
from engine.kv.layout import layout
from engine.models.checkpoint import Checkpoint

TORCH = "torch"
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
    engine. `sha256` identifies the effective manifest."""

    manifest: Manifest
    path: Path
    sha256: str
    architecture: str
    engines: tuple[EngineConfig, ...]
    gateway: GatewayConfig
    memory: Memory
    machine: Machine
    effective: tuple[Effective, ...]


def plan(settings: Settings, checkpoint: Checkpoint, machine: Machine) -> Plan:
    """What will run. Raises Refused for what this machine or this checkpoint cannot do."""
    manifest = settings.manifest
    device = _device(settings, machine)
    dtype = _dtype(manifest, checkpoint, device.value)
    kv_dtype: Choice[Dtype] = Choice(dtype.value, "the type of the activations")
    if manifest.quantization.kv_cache != "auto":
        kv_dtype = Choice(manifest.quantization.kv_cache)
    threads = _threads(manifest, machine)
    step_tokens = _step_tokens(manifest, device.value)
    pages = layout(
        checkpoint.model,
        block_tokens=manifest.engine.cache.block_tokens,
        element_bytes=ELEMENT_BYTES[kv_dtype.value],
    )
    kernels = _kernels(settings, machine, device.value, dtype.value)
    weights = _weights(settings, checkpoint, kernels.value)
    room = measure(
        settings,
        checkpoint,
        machine,
        device=device.value,
        element_bytes=ELEMENT_BYTES[dtype.value],
        step_tokens=step_tokens.value,
        compiled=kernels.value != TORCH,
        bits=weights.value,
    )
    max_context, cache, memory = share_out(settings, checkpoint, room, pages, device.value)
    folder, sha256 = settings.path.resolve().parent, fingerprint(manifest)
    config = EngineConfig(
        model=str(checkpoint.path),
        device=device.value,
        dtype=dtype.value,
        kv_dtype=kv_dtype.value,
        kv_bytes=memory.cache,
        weight_bytes=memory.weights,
        workspace_bytes=memory.workspace,
        max_context=max_context.value,
        block_tokens=manifest.engine.cache.block_tokens,
        max_running=manifest.engine.scheduling.max_running,
        max_step_tokens=step_tokens.value,
        policy=manifest.engine.scheduling.policy,
        prefix_cache=manifest.engine.cache.prefix,
        overlap=manifest.engine.scheduling.overlap,
        threads=threads.value,
        kernels=kernels.value,
        weights=weights.value,
        weight_cache=_weight_cache(settings, weights.value),
        record_bytes=manifest.engine.record_size,
        trust_remote_code=manifest.model.trust_remote_code,
    )
    sampling, sampling_choices = sampling_defaults(manifest, checkpoint)
    names = manifest.model.names or (checkpoint.path.name,)
    choices: dict[str, Choice[Any]] = {
        "model.path": Choice(str(checkpoint.path)),
        "model.names": Choice(list(names), "the name of the checkpoint's folder"),
        "model.dtype": dtype,
        "model.max_context": max_context,
        "quantization.weights": weights,
        "quantization.kv_cache": kv_dtype,
        "hardware.device": device,
        "hardware.threads": threads,
        "hardware.kernels": kernels,
        "hardware.kv_cache_memory": cache,
        "engine.scheduling.max_step_tokens": step_tokens,
        **sampling_choices,
    }
    return Plan(
        manifest=manifest,
        path=settings.path.resolve(),
        sha256=sha256,
        architecture=checkpoint.architecture,
        engines=_engines(config, manifest, folder),
        gateway=gateway_config(
            manifest, checkpoint, folder, names=names, max_context=max_context.value, sampling=sampling, sha256=sha256
        ),
        memory=memory,
        machine=machine,
        effective=_effective(settings, choices),
    )


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


def _dtype(manifest: Manifest, checkpoint: Checkpoint, device: Device) -> Choice[Dtype]:
    if manifest.model.dtype != "auto":
        return Choice(manifest.model.dtype)
    if device == "cpu":
        return Choice("float32", "the type CPUs compute in")
    return Choice(checkpoint.dtype, "the checkpoint's type")  # type: ignore[arg-type]


def _kernels(settings: Settings, machine: Machine, device: Device, dtype: Dtype) -> Choice[str]:
    wanted = settings.manifest.hardware.kernels
    serves = device == "cpu" and dtype == "float32"
    if wanted not in ("auto", TORCH):
        if not serves:
            message = f"{wanted}: compiled kernels are for float32 on a CPU, and this is {dtype} on {device}; use auto"
            refuse(settings, "hardware.kernels", message)
        if wanted not in machine.kernels:
            there = ", ".join((*machine.kernels, TORCH, "auto"))
            refuse(settings, "hardware.kernels", f"{wanted}: not compiled, or not for this CPU; use one of {there}")
    if wanted != "auto":
        return Choice(wanted)
    if not serves:
        return Choice(TORCH, f"compiled kernels are for float32 on a CPU, and this is {dtype} on {device}")
    if not machine.kernels:
        return Choice(TORCH, "none are compiled: install with a C++ compiler and be 2 to 6 times as fast")
    return Choice(machine.kernels[0], "the fastest compiled kernels for this CPU")


def _weights(settings: Settings, checkpoint: Checkpoint, kernels: str) -> Choice[WeightBits]:
    wanted = settings.manifest.quantization.weights
    if wanted == "auto":
        return Choice("stored", f"the checkpoint's {checkpoint.dtype}")
    if kernels == TORCH:
        message = f"{wanted}: only compiled kernels of a CPU multiply by such weights, and torch serves here; use auto"
        refuse(settings, "quantization.weights", message)
    return Choice(wanted)


def _weight_cache(settings: Settings, weights: WeightBits) -> str | None:
    if weights == "stored" or not settings.manifest.quantization.keep or settings.cache is None:
        return None
    return str(settings.cache / "weights")


def _threads(manifest: Manifest, machine: Machine) -> Choice[int]:
    if manifest.hardware.threads != "auto":
        return Choice(manifest.hardware.threads)
    engines = manifest.parallelism.data
    shared = f" for {engines} engines" if engines > 1 else ""
    return Choice(max(1, machine.cores // engines), f"{machine.cores} cores by {machine.cores_from}{shared}")


def _step_tokens(manifest: Manifest, device: Device) -> Choice[int]:
    wanted = manifest.engine.scheduling.max_step_tokens
    return Choice(wanted) if wanted != "auto" else Choice(STEP_TOKENS[device], f"for {device}")


def _engines(config: EngineConfig, manifest: Manifest, folder: Path) -> tuple[EngineConfig, ...]:
    """One configuration a replica; with several, each records into a file of its own."""
    count, record = manifest.parallelism.data, manifest.engine.record
    if record is None:
        return (config,) * count
    file = folder / record
    names = [file] if count == 1 else [file.with_name(f"{file.stem}-{i}{file.suffix}") for i in range(count)]
    return tuple(msgspec.structs.replace(config, record=str(name)) for name in names)


def _effective(settings: Settings, choices: dict[str, Choice[Any]]) -> tuple[Effective, ...]:
    """Every key with its value; secrets by their names only."""
    found = []
    values = settings.manifest.model_dump()
    for key in leaves():
        if "*" in key.path:
            continue
        value: Any = values
        for part in key.path:
            value = value[part]
        choice = choices.get(key.name)
        if choice and choice.reason and value in ("auto", None, ()):
            found.append(Effective(key.name, value, settings.origin(key), choice.value, choice.reason))
        else:
            found.append(Effective(key.name, value, settings.origin(key), value))
    for name in settings.manifest.secrets:
        found.append(Effective(f"secrets.{name}", "(a reference)", settings.origin(("secrets", name)), "(a reference)"))
    return tuple(found)
