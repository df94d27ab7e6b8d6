"""What rank 0 and the other ranks of an engine tell one another, over a socket for each: MessagePack, one message each.

A rank gets the plans that rank 0's worker gets, in the same order, and answers with no result: it draws the same tokens
from the same gathered logits with the same keyed noise. What it sends of a step is a checksum of them, so that ranks
which went different ways are found at once and not by their text.
"""

import zlib
from concurrent.futures import Future

import msgspec
import numpy as np

from engine.api.config import EngineConfig
from engine.api.messages import RankMemory
from engine.core.plan import Late, Masks, StepPlan, StepResult


class Meeting(msgspec.Struct, frozen=True):
    """Where ranks find each other: `file`, not there at first, for a process group; `memory`, the descriptor of an
    empty file in memory, for compiled kernels. Which of them is used, their kernels decide."""

    file: str
    memory: int


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """The first message to a rank."""

    config: EngineConfig
    rank: int
    meeting: Meeting


Packed = dict[int, bytes]  # allowed tokens by index of the plan's row, 32 to a word


class Step(msgspec.Struct, frozen=True, tag="step"):
    """Without `masks` they follow in a message of their own."""

    plan: StepPlan
    masks: Packed | None


class LateMasks(msgspec.Struct, frozen=True, tag="masks"):
    """Of the oldest step that came without any."""

    masks: Packed


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    """How far the start is; see engine.api.messages.Loading."""

    phase: str
    fraction: float


class Built(msgspec.Struct, frozen=True, tag="built"):
    """The rank is warm: steps may come. `blocks` of its KV pool count the null block."""

    weight_bytes: int
    blocks: int
    memory: RankMemory


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The next step has ended; `drawn` is a checksum of its tokens."""

    drawn: int


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """Sent every `ALIVE_S` whatever the rank does."""


class Broken(msgspec.Struct, frozen=True, tag="broken"):
    """The rank ends. `code`: of an EngineError, or "" for what nobody expected."""

    code: str
    message: str


ALIVE_S = 1.0

ToRank = Begin | Step | LateMasks
FromRank = Loading | Built | Done | Alive | Broken

encode = msgspec.msgpack.Encoder().encode
to_rank = msgspec.msgpack.Decoder(ToRank).decode
from_rank = msgspec.msgpack.Decoder(FromRank).decode


def step_message(plan: StepPlan, masks: Masks | Late) -> bytes:
    return encode(Step(plan, None if isinstance(masks, Future) else _packed(masks)))


def masks_message(masks: Masks) -> bytes:
    return encode(LateMasks(_packed(masks)))


def unpacked(masks: Packed) -> Masks:
    return {row: np.frombuffer(mask, np.uint32) for row, mask in masks.items()}


def _packed(masks: Masks) -> Packed:
    return {row: np.ascontiguousarray(mask, np.uint32).tobytes() for row, mask in masks.items()}


def checksum(result: StepResult) -> int:
    """Of the tokens that were drawn; those of failed rows mean nothing."""
    kept = [-1 if row in result.failed else token for row, token in enumerate(result.sampled)]
    return zlib.crc32(np.array(kept, np.int64).tobytes())
