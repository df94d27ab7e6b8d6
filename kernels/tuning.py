"""Settings of kernels by device and size, as data: `kernels/tuned/*.json`, which `python -m benchmarks.kernels --tune`
writes.

There is no tuning while serving: a kernel queries its settings and gets the entry of its device with the nearest sizes,
or its own default, which may depend on the device's `shared_memory`. A file lists prefixes of the names of its devices:

    {"devices": ["NVIDIA H200"], "architecture": "sm_90", "ops": {"rms_norm": [
        {"sizes": {"=size": 4096, "rows": 32}, "settings": {"warps": 8}, "us": {CASE: [of the default, …], …}}]}}
"""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent / "tuned"
Settings = Mapping[str, Any]

_forced: ContextVar[dict[str, Settings] | None] = ContextVar("forced", default=None)
_assumed: ContextVar["Assumed | None"] = ContextVar("assumed", default=None)
_queries: ContextVar[list["TuningQuery"] | None] = ContextVar("queries", default=None)


SHARED = 227 << 10  # bytes of shared memory of Hopper, assumed for unknown devices and without a device
LARGE_TILES = 160 << 10  # bytes of shared memory from which kernels use the tiles of Hopper


@dataclass(frozen=True)
class Assumed:
    """A device to compile for: its name, the maximum bytes of shared memory of a program, and whether products have
    their sums in tensor memory."""

    name: str
    shared: int
    tensor_memory: bool


@dataclass(frozen=True)
class TuningQuery:
    """Query of a kernel for its settings."""

    op: str
    default: Settings
    sizes: dict[str, int]


def settings(op: str, default: Settings, device: torch.device, **sizes: int) -> dict[str, Any]:
    """Return `default` with the settings of the device's table for this operation at the nearest sizes. Entries
    that name more of the sizes precede entries that name fewer: a table may have a fallback for all sizes. Sizes of an
    entry that begin with = must be equal; the sum of |log2| ratios of the other sizes decides."""
    queries = _queries.get()
    if queries is not None:
        queries.append(TuningQuery(op, dict(default), sizes))
    forced = (_forced.get() or {}).get(op)
    if forced is not None:
        return dict(default) | dict(forced)
    there = _assumed.get()
    name = _device_name(device) if there is None else there.name
    nearest = _nearest(name, op, tuple(sizes.items())) if op in _table(name) else None
    return dict(default) if nearest is None else dict(default) | dict(nearest)


@lru_cache(maxsize=8192)
def _nearest(device: str, op: str, sizes: tuple[tuple[str, int], ...]) -> Settings | None:
    """Return the settings of the entry with the nearest sizes. Kept, because every launch asks."""
    best: tuple[int, float, Settings] | None = None
    for entry in _table(device).get(op, ()):
        distance = _distance(entry["sizes"], dict(sizes))
        if distance is not None and (best is None or (-len(entry["sizes"]), distance) < best[:2]):
            best = -len(entry["sizes"]), distance, entry["settings"]
    return None if best is None else best[2]


def _distance(wanted: Mapping[str, int], given: Mapping[str, int]) -> float | None:
    total = 0.0
    for key, value in wanted.items():
        if key.startswith("="):
            if given.get(key[1:]) != value:
                return None
        elif key not in given:
            return None
        else:
            total += abs(math.log2((given[key] + 1) / (value + 1)))
    return total


@contextmanager
def forced(op: str, values: Settings) -> Iterator[None]:
    """Run this operation with these settings within the context, for measurements."""
    token = _forced.set((_forced.get() or {}) | {op: values})
    try:
        yield
    finally:
        _forced.reset(token)


@contextmanager
def recorded_queries() -> Iterator[list[TuningQuery]]:
    """Record the queries of kernels within the context."""
    queries: list[TuningQuery] = []
    token = _queries.set(queries)
    try:
        yield queries
    finally:
        _queries.reset(token)


@contextmanager
def assumed(device: str, shared: int = SHARED, *, tensor_memory: bool = False) -> Iterator[None]:
    """Use the settings of a device of this name and memory within the context, to compile ahead of time."""
    token = _assumed.set(Assumed(device, shared, tensor_memory))
    try:
        yield
    finally:
        _assumed.reset(token)


def shared_memory(device: torch.device) -> int:
    """Return the maximum bytes of shared memory of a program on this device: 227 KiB on Hopper, 163 on an A100, 99 on
    GPUs of compute capability 8.6, 8.9 and 12.0, 64 on AMD GPUs."""
    there = _assumed.get()
    return _shared_memory(device) if there is None else there.shared


def has_tensor_memory(device: torch.device) -> bool:
    """Return whether products have their sums in tensor memory, as on GPUs of compute capability 10."""
    there = _assumed.get()
    return _has_tensor_memory(device) if there is None else there.tensor_memory


@cache
def _has_tensor_memory(device: torch.device) -> bool:
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device)[0] == 10


@cache
def _shared_memory(device: torch.device) -> int:
    if device.type != "cuda":
        return SHARED
    properties = torch.cuda.get_device_properties(device)
    return max(properties.shared_memory_per_block, getattr(properties, "shared_memory_per_block_optin", 0))


@cache
def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def devices(architecture: str) -> tuple[str, ...]:
    """Return the names of the devices of this architecture that have a table."""
    tables = [json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))]
    return tuple(name for table in tables if table["architecture"] == architecture for name in table["devices"])


@cache
def _table(device: str) -> dict[str, list[dict[str, Any]]]:
    for path in sorted(FOLDER.glob("*.json")):
        table = json.loads(path.read_text())
        if any(device.startswith(name) for name in table["devices"]):
            return table["ops"]
    return {}
