"""Intermediate representation of a model's step on one rank: operations on named buffers, and the weights they use.

Independent of torch. `engine.lowering.lower` makes a `Program` from a declaration; `engine.lowering.rewrites` fuses
operations for an executor. The executors are in engine/layers: reference (torch), compiled (C++ on a CPU) and fused
(Triton). Memory and roofline of a plan are sums over the same list (`engine.lowering.measures`).

Every operation reads and writes the rows of all tokens of a step. Operations on a buffer run in order; a buffer has the
value that was written last.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache, cached_property
from typing import Any

from engine.lowering.operations import (
    AbsorbQueries,
    Activation,
    Add,
    AddMedia,
    AddNormalize,
    AllReduce,
    Attend,
    AttendContext,
    AttendLatent,
    AttendLocal,
    BlockLinear,
    Bound,
    Clamp,
    Columns,
    Combine,
    CutHeads,
    Embed,
    EmbedAudio,
    EmbedMedia,
    ExpandValues,
    ExpertLinear,
    FillMedia,
    ForeignDecoder,
    Gate,
    Input,
    InsertMedia,
    Keep,
    Linear,
    LookUp,
    LookUpPositions,
    Multiply,
    Normalize,
    NormalizeGroups,
    NormalizeParts,
    PadValues,
    PrepareIndex,
    PrepareKV,
    PrepareLatent,
    QKNorm,
    Quantized,
    ReadStates,
    RecurrentOp,
    Repeat,
    Rotate,
    Route,
    Scale,
    ScaleQueries,
    ScaleRoutes,
    SelectKeys,
    StreamOp,
    Value,
    Weight,
    WriteKV,
)
from engine.models.parts import Indexer, LatentAttention, Rope

SHORTCUT = "shortcut"  # buffer that is added after the last block of a layer

Op = (
    Input
    | Embed
    | EmbedAudio
    | LookUp
    | LookUpPositions
    | InsertMedia
    | EmbedMedia
    | FillMedia
    | Bound
    | ReadStates
    | AddMedia
    | Normalize
    | NormalizeParts
    | NormalizeGroups
    | Linear
    | Activation
    | Add
    | Multiply
    | Repeat
    | Scale
    | Clamp
    | AllReduce
    | QKNorm
    | Rotate
    | ScaleQueries
    | PadValues
    | CutHeads
    | WriteKV
    | PrepareKV
    | Attend
    | AttendContext
    | AttendLocal
    | PrepareLatent
    | PrepareIndex
    | SelectKeys
    | AbsorbQueries
    | AttendLatent
    | ExpandValues
    | BlockLinear
    | Route
    | ScaleRoutes
    | ExpertLinear
    | Combine
    | StreamOp
    | Gate
    | Keep
    | RecurrentOp
    | ForeignDecoder
    | AddNormalize
    | Quantized
)


@dataclass(frozen=True)
class Program:
    """A step of one rank. `encoder` computes encoder inputs first and writes their keys and values."""

    ops: tuple[Op, ...]
    out: Value  # the hidden states
    kept: Value | None = None  # inputs of some layers, side by side
    encoder: tuple[Op, ...] = ()
    encoder_out: Value | None = None
    rope_axes: tuple[int, ...] = ()  # M-RoPE: which of a token's three positions rotates each pair; empty: it has one
    queries: Value | None = None  # of cross-attention in the layers with alignment heads, side by side
    routes: tuple[Value, ...] = ()  # selected experts of each layer that has some, which are kept until the step's end
    windowed_spans: bool = False  # only layers with a window read the spans of tokens that see one another

    @cached_property
    def weights(self) -> tuple[Weight, ...]:
        """Return all weights in the order of their first use, which is the order of loading. Those of an encoder come
        first, after the tables of the decoder."""
        found: dict[str, Weight] = {}
        for op in (*self.ops[:1], *self.encoder, *self.ops[1:]):
            for weight in weights_of(op):
                found.setdefault(weight.name, weight)
        return tuple(found.values())

    @property
    def given(self) -> Value:
        """The rows that the caller gives."""
        (first, *_) = self.ops
        assert isinstance(first, Input), "the program receives rows"
        return first.y

    @cached_property
    def ropes(self) -> tuple[Rope, ...]:
        return tuple(dict.fromkeys(rope for op in (*self.encoder, *self.ops) for rope in _ropes(op)))


def _ropes(op: "Op") -> Iterator[Rope]:
    match op:
        case (
            Rotate(rope=Rope() as rope)
            | PrepareKV(rope=Rope() as rope)
            | PrepareLatent(part=LatentAttention(rope=rope))
            | PrepareIndex(part=Indexer(rope=rope))
        ):
            yield rope


@cache
def _fields_of(kind: type[Any]) -> tuple[str, ...]:
    return tuple(one.name for one in fields(kind))


def _fields(op: Op) -> tuple[str, ...]:
    """Return the names of an operation's fields, in order."""
    kind: Any = type(op)  # mypy: not hashable
    return _fields_of(kind)


def _buffers(op: Op, names: Sequence[str]) -> tuple[Value, ...]:
    """Return the buffers of these fields: a buffer, columns of one, or several buffers."""
    found = []
    for name in names:
        one = getattr(op, name)
        for each in one if isinstance(one, tuple) else (one,):
            if isinstance(each, Columns):
                found.append(each.value)
            elif isinstance(each, Value):
                found.append(each)
    return tuple(found)


def weights_of(op: Op) -> Iterator[Weight]:
    """Yield the weights of an operation."""
    if isinstance(op, Quantized):
        yield from weights_of(op.op)
        return
    for name in _fields(op):
        one = getattr(op, name)
        if isinstance(one, Weight):
            yield one
        elif isinstance(one, tuple):
            yield from (each for each in one if isinstance(each, Weight))
        elif isinstance(one, QKNorm):
            yield one.weight


def values_read(op: Op) -> tuple[Value, ...]:
    """Return the buffers that an operation reads."""
    if isinstance(op, Quantized):
        return values_read(op.op)
    return _buffers(op, [name for name in _fields(op) if name not in op.written])


def values_written(op: Op) -> tuple[Value, ...]:
    """Return the buffers that an operation writes, also partially or in place."""
    if isinstance(op, Quantized):
        return values_written(op.op)
    return _buffers(op, (*op.written, *op.in_place))
