"""Messages between rank 0 and the other ranks of an engine: MessagePack, over one socket per rank.

A rank gets the plans of rank 0's worker, in the same order. It returns no results: it samples the same tokens from the
same gathered logits with the same keyed noise. It only returns a checksum of them for each step, so that ranks that
diverge are detected at once.
"""

import zlib
from concurrent.futures import Future
from typing import Literal

import msgspec
import numpy as np

from engine.api.config import AdapterConfig, EngineConfig
from engine.api.messages import RankMemory
from engine.core.plan import Masks, PendingMasks, StepPlan, StepResult


class Rendezvous(msgspec.Struct, frozen=True):
    """Rendezvous of the ranks. The kernels determine which one is used."""

    file: str  # path for a process group; does not exist at first
    memory: int  # descriptor of an empty memory file, for compiled kernels


class Begin(msgspec.Struct, frozen=True, tag="begin", rename={"rendezvous": "meeting"}):
    """The first message to a rank."""

    config: EngineConfig
    rank: int
    rendezvous: Rendezvous


Packed = dict[int, bytes]  # masks by number of the sample; bit i % 32 of word i // 32 is token i


class Step(msgspec.Struct, frozen=True, tag="step"):
    """A step to run."""

    plan: StepPlan
    masks: Packed | None  # None: they follow in a LateMasks message


class LateMasks(msgspec.Struct, frozen=True, tag="masks"):
    """Masks of the oldest step that was sent without them."""

    masks: Packed


class RegisterAdapter(msgspec.Struct, frozen=True, tag="register_adapter"):
    """Read a LoRA adapter, which gets this version."""

    version: int
    adapter: AdapterConfig


class HandleAdapter(msgspec.Struct, frozen=True, tag="handle_adapter"):
    """Prepare, release or forget a version of a LoRA adapter (engine/worker/adapters.py)."""

    verb: Literal["prepare", "release", "forget"]
    version: int


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    """Progress of the start; see engine.api.messages.Loading."""

    phase: str
    fraction: float


class Built(msgspec.Struct, frozen=True, tag="built"):
    """The rank is ready for steps."""

    weight_bytes: int
    blocks: int  # of its KV pool, including the null block
    memory: RankMemory


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The rank finished its next step."""

    drawn: int  # checksum of the sampled tokens


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """Sent every `ALIVE_S` seconds by a separate thread."""


class Broken(msgspec.Struct, frozen=True, tag="broken"):
    """The rank failed and exits."""

    code: str  # of an EngineError, or "" for an unexpected error
    message: str


ALIVE_S = 1.0

ToRank = Begin | Step | LateMasks | RegisterAdapter | HandleAdapter
FromRank = Loading | Built | Done | Alive | Broken

encode = msgspec.msgpack.Encoder().encode
to_rank = msgspec.msgpack.Decoder(ToRank).decode
from_rank = msgspec.msgpack.Decoder(FromRank).decode


def step_message(plan: StepPlan, masks: Masks | PendingMasks) -> bytes:
    return encode(Step(plan, None if isinstance(masks, Future) else _packed(masks)))


def masks_message(masks: Masks) -> bytes:
    return encode(LateMasks(_packed(masks)))


def unpacked(masks: Packed) -> Masks:
    return {row: np.frombuffer(mask, np.uint32) for row, mask in masks.items()}


def _packed(masks: Masks) -> Packed:
    return {row: np.ascontiguousarray(mask, np.uint32).tobytes() for row, mask in masks.items()}


def checksum(result: StepResult) -> int:
    """Return a checksum of the sampled tokens. Failed rows, whose tokens are undefined, count as -1."""
    kept = [-1 if row in result.failed else token for row, token in enumerate(result.sampled)]
    for row, tokens in sorted(result.further.items()):
        kept += (row, *tokens)
    return zlib.crc32(np.array(kept, np.int64).tobytes())
