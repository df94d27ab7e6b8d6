"""The format of a flight recording, which `slipway replay` and `slipway whatif` read from untrusted files.

A file is a sequence of records: a little-endian u32 length, then that many bytes of MessagePack. Every value is decoded
by the type declared here; a file cannot name a type or a function. `Started` begins the records of one process; a file
that is appended to contains several.
"""

import math
import os
import stat
import struct
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol, get_type_hints

import msgspec

from engine.api.errors import ConfigError
from engine.api.messages import Delta, Finish, Submit
from engine.core.config import SchedulerConfig
from engine.core.plan import StepPlan
from engine.core.snapshot import SchedulerState
from engine.models.parts import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    NoRotation,
    ProportionalScaling,
    Rope,
    Scaling,
    YarnScaling,
)

FORMAT = 6
LENGTH = struct.Struct("<I")
MAX_BLOCKS = 1 << 24  # a scheduler with this many KV blocks takes about 1 GB of memory
MAX_RUNNING = 1 << 20
SCALINGS: dict[str, type[Scaling]] = {
    kind.__name__: kind
    for kind in (
        *(NoRotation, ProportionalScaling, LinearScaling, DynamicScaling, Llama3Scaling, YarnScaling),
        LongScaling,
    )
}


class RecordedRope(msgspec.Struct, frozen=True):
    """A `Rope`. `scaling` is one of SCALINGS with its fields, or None."""

    dim: int
    theta: float
    interleaved: bool
    scaling: tuple[str, msgspec.Raw] | None


class Started(msgspec.Struct, frozen=True, tag="started"):
    """Start of the records of one process, or of its next file after one was full."""

    format: int
    config: dict[str, msgspec.Raw]
    """Fields of `SchedulerConfig`, each in MessagePack."""
    step: int = 0
    """Number of steps planned before."""
    state: SchedulerState | None = None
    """State after `step` steps, or None at the start of a process."""
    gap: bool = False
    """True if records before this one were lost."""


class Submitted(msgspec.Struct, frozen=True, tag="submitted"):
    submit: Submit
    now: float


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    id: str
    finish: Finish


class Proposed(msgspec.Struct, frozen=True, tag="proposed"):
    """Draft of the next tokens of a request."""

    id: str
    tokens: tuple[int, ...]


class AllEnded(msgspec.Struct, frozen=True, tag="all_ended"):
    pass


class CacheReset(msgspec.Struct, frozen=True, tag="cache_reset"):
    pass


class AdapterRecord(msgspec.Struct, frozen=True):
    """An event of an adapter."""


class AdapterLoaded(AdapterRecord, frozen=True, tag="adapter_loaded"):
    name: str


class AdapterUnloaded(AdapterRecord, frozen=True, tag="adapter_unloaded"):
    name: str


class AdapterPrepared(AdapterRecord, frozen=True, tag="adapter_prepared"):
    """The host cache has this version of an adapter."""

    version: int


class AdapterFailed(AdapterRecord, frozen=True, tag="adapter_failed"):
    """This version of an adapter could not be read."""

    version: int


class DeadlinesPassed(msgspec.Struct, frozen=True, tag="deadlines_passed"):
    now: float


class PlanMade(msgspec.Struct, frozen=True, tag="plan"):
    now: float
    plan: StepPlan | None
    """The plan, or None if no step could be planned."""


class Applied(msgspec.Struct, frozen=True, tag="applied"):
    """The part of a `StepResult` that plans depend on."""

    now: float
    step: int
    sampled: tuple[int, ...]
    failed: dict[int, str]
    further: dict[int, tuple[int, ...]] = {}
    drafts: dict[int, tuple[int, ...]] = {}


Record = (
    Started
    | Submitted
    | Proposed
    | Ended
    | DeadlinesPassed
    | AllEnded
    | CacheReset
    | PlanMade
    | Applied
    | AdapterLoaded
    | AdapterUnloaded
    | AdapterPrepared
    | AdapterFailed
)


class AdapterEvents(Protocol):
    """The events of adapters, of a scheduler."""

    def load_adapter(self, name: str) -> int: ...
    def unload_adapter(self, name: str) -> None: ...
    def adapter_prepared(self, version: int) -> None: ...
    def adapter_failed(self, version: int) -> list[Delta]: ...


def do_adapter(scheduler: AdapterEvents, record: AdapterRecord) -> list[Delta]:
    """Repeat a recorded event of an adapter. Return the last deltas of requests that it ended."""
    match record:
        case AdapterLoaded(name):
            scheduler.load_adapter(name)
        case AdapterUnloaded(name):
            scheduler.unload_adapter(name)
        case AdapterPrepared(version):
            scheduler.adapter_prepared(version)
        case AdapterFailed(version):
            return scheduler.adapter_failed(version)
    return []


def older(path: Path) -> Path:
    """Return the path of the file with the records preceding `path`."""
    return path.with_name(f"{path.name}.1")


def read_records(path: Path) -> Iterator[Record]:
    """Yield the records of the older file, if there is one, and of `path`, beginning with `Started`.

    A last record that was truncated by a crash is left out. Raises ConfigError for a file that is not a recording of
    this version, OSError if it cannot be read.
    """
    files = [file for file in (older(path), path) if file.exists()]
    number = 0
    for file in files or [path]:
        for body in _bodies(file):
            number += 1
            try:
                record = _decode(body)
            except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
                raise ConfigError(f"record {number} is damaged, or of another version of Slipway: {error}") from error
            if number == 1 and not isinstance(record, Started):
                raise ConfigError("the first record does not begin a recording; is this a file of engine.record?")
            if not math.isfinite(getattr(record, "now", 0.0)):
                raise ConfigError(f"record {number} has no finite time")
            yield record
    if not number:
        raise ConfigError("holds no record; is this a file of engine.record?")


_decode = msgspec.msgpack.Decoder(Record).decode


def _bodies(path: Path) -> Iterator[bytes]:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError("is not a regular file")
        while len(head := file.read(LENGTH.size)) == LENGTH.size:
            (length,) = LENGTH.unpack(head)
            if length > found.st_size - file.tell():
                return
            yield file.read(length)


def encode_config(config: SchedulerConfig) -> dict[str, msgspec.Raw]:
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    values["ropes"] = tuple(
        RecordedRope(rope.dim, rope.theta, rope.interleaved, _encode_scaling(rope.scaling)) for rope in config.ropes
    )
    return {name: msgspec.Raw(msgspec.msgpack.encode(value)) for name, value in values.items()}


def _encode_scaling(scaling: Scaling | None) -> tuple[str, msgspec.Raw] | None:
    return None if scaling is None else (type(scaling).__name__, msgspec.Raw(msgspec.msgpack.encode(scaling)))


def decode_config(started: Started) -> SchedulerConfig:
    """Decode the configuration. Raises ConfigError for unknown fields, wrong types and implausible sizes."""
    if started.format != FORMAT:
        raise ConfigError(f"the recording has format {started.format}; this version of Slipway reads format {FORMAT}")
    kinds: dict[str, Any] = {**get_type_hints(SchedulerConfig), "ropes": tuple[RecordedRope, ...]}
    if unknown := started.config.keys() - kinds.keys():
        raise ConfigError(f"the recorded configuration has the unknown field {min(unknown)!a}")
    try:
        values = {name: msgspec.msgpack.decode(raw, type=kinds[name]) for name, raw in started.config.items()}
        values["ropes"] = tuple(map(_decode_rope, values["ropes"]))
        config = SchedulerConfig(**values)
    except (msgspec.DecodeError, RecursionError, KeyError, TypeError) as error:
        raise ConfigError(f"the recorded configuration cannot be read: {error}") from error
    bounds = {
        "blocks": (config.blocks, MAX_BLOCKS),
        "snapshots": (1 + (config.snapshots or 0), MAX_BLOCKS),
        "max_running": (config.max_running, MAX_RUNNING),
        "adapter_slots": (1 if config.adapter_slots is None else config.adapter_slots, MAX_RUNNING),
        "max_step_tokens": (config.max_step_tokens, MAX_BLOCKS),
        "layout.block_tokens": (config.layout.block_tokens, MAX_BLOCKS),
    }
    for name, (value, most) in bounds.items():
        if not 1 <= value <= most:
            raise ConfigError(f"the recorded {name} is {value}; it must be between 1 and {most}")
    return config


def _decode_rope(recorded: RecordedRope) -> Rope:
    scaling: Scaling | None = None
    if recorded.scaling is not None:
        kind, raw = recorded.scaling
        scaling = msgspec.msgpack.decode(raw, type=SCALINGS[kind])
    return Rope(dim=recorded.dim, theta=recorded.theta, interleaved=recorded.interleaved, scaling=scaling)
