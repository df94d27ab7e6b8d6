"""Operations of attention with keys and values of heads."""

from typing import ClassVar

from engine.lowering.operations.operation import Operation
from engine.lowering.operations.values import Value
from engine.lowering.operations.weights import (
    AlibiSlopes,
    DistanceBias,
    LocalWeights,
    QKNormVectors,
    SinkLogits,
    SlopedDistances,
)
from engine.models.declared import declared
from engine.models.parts import Attention, QueryScale, Rope


@declared(frozen=True, kw_only=True)
class QKNorm(Operation):
    """Normalise the first `heads` heads of qkv in place: queries, then keys."""

    written: ClassVar[tuple[str, ...]] = ()
    in_place: ClassVar[tuple[str, ...]] = ("qkv",)

    qkv: Value
    weight: QKNormVectors
    heads: int
    queries: int  # heads that are queries

    @property
    def separate(self) -> bool:
        """Whether each head is normalised separately; else all queries together, and all keys."""
        return self.weight.attention.qk_norm_span != "all"


@declared(frozen=True, kw_only=True)
class Rotate(Operation):
    """Rotary position embedding of the first `heads` heads of qkv, in place."""

    written: ClassVar[tuple[str, ...]] = ()
    in_place: ClassVar[tuple[str, ...]] = ("qkv",)

    qkv: Value
    rope: Rope
    heads: int
    head_dim: int


@declared(frozen=True, kw_only=True)
class PadValues(Operation):
    """y = x with zeros after the values of each head, so that they have the size of keys. x: heads that are queries or
    keys, then values."""

    x: Value
    y: Value
    heads: int  # queries and keys
    kv_heads: int
    head_dim: int
    value_dim: int


@declared(frozen=True, kw_only=True)
class CutHeads(Operation):
    """y = the first columns of each head of x."""

    x: Value
    y: Value
    heads: int


@declared(frozen=True, kw_only=True)
class ScaleQueries(Operation):
    """Multiply the first `heads` heads of qkv, the queries, by the factor of their position, in place."""

    written: ClassVar[tuple[str, ...]] = ()
    in_place: ClassVar[tuple[str, ...]] = ("qkv",)

    qkv: Value
    factor: QueryScale
    heads: int
    head_dim: int


@declared(frozen=True, kw_only=True)
class WriteKV(Operation):
    """Write keys and values to the pages of a layer. cross: of an encoder input, from kv = [keys, values]."""

    written: ClassVar[tuple[str, ...]] = ()

    qkv: Value
    layer: int
    heads: int  # of the queries before the keys; 0 in kv
    kv_heads: int
    head_dim: int
    cross: bool = False


@declared(frozen=True, kw_only=True)
class PrepareKV(Operation):
    """Fused QKNorm, Rotate and WriteKV."""

    written: ClassVar[tuple[str, ...]] = ()
    in_place: ClassVar[tuple[str, ...]] = ("qkv",)

    qkv: Value
    norm: QKNorm | None
    rope: Rope | None
    layer: int | None
    heads: int
    kv_heads: int
    head_dim: int


@declared(frozen=True, kw_only=True)
class Attend(Operation):
    """y = attention of the queries in qkv over the pages of a layer, or over the keys and values of the same step
    (layer None). cross: over an encoder input. windowed: over the window of a patch, in place of its row. With
    `queries_only`, qkv has only queries."""

    qkv: Value
    y: Value
    part: Attention
    layer: int | None
    heads: int
    kv_heads: int
    sinks: SinkLogits | None = None
    slopes: AlibiSlopes | None = None
    bias: DistanceBias | SlopedDistances | None = None
    cross: bool = False
    windowed: bool = False

    @property
    def queries_only(self) -> bool:
        return self.cross or self.part.shared_kv

    @property
    def scale(self) -> float:
        return float(self.part.head_dim**-0.5 if self.part.scale is None else self.part.scale)

    @property
    def window(self) -> int | None:
        return None if self.cross else self.part.window

    @property
    def chunk(self) -> int | None:
        return None if self.cross else self.part.chunk

    @property
    def key_dim(self) -> int:
        return self.part.head_dim

    @property
    def value_dim(self) -> int:
        return self.part.head_dim


@declared(frozen=True, kw_only=True)
class AttendContext(Operation):
    """y = attention of the queries in q to keys and values that the caller gives for the rows of a frame: their columns
    from `first` on. Without `part.source`, q also has keys and values of the queries, which they read too."""

    q: Value
    y: Value
    part: Attention
    first: int

    @property
    def own(self) -> bool:
        return self.q.width > self.part.heads * self.part.head_dim

    @property
    def scale(self) -> float:
        return float(self.part.head_dim**-0.5 if self.part.scale is None else self.part.scale)


@declared(frozen=True, kw_only=True)
class AttendLocal(Operation):
    """y = attention of the queries in qkv to the keys and values of positions nearby."""

    qkv: Value
    y: Value
    weight: LocalWeights
