"""Operations on the rows of tokens: norms, projections, activations and sums."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from engine.lowering.operations.operation import Operation
from engine.lowering.operations.values import Columns, Value
from engine.lowering.operations.weights import ActivationNumbers, BlockMatrices, Bounds, Matrix, Multiplier, NormVector
from engine.models.declared import declared


@declared(frozen=True, kw_only=True)
class Normalize(Operation):
    """y = norm(x)."""

    x: Value
    y: Value
    weight: NormVector


@declared(frozen=True, kw_only=True)
class NormalizeParts(Operation):
    """Normalise consecutive columns of x in place, each part with its own norm."""

    written: ClassVar[tuple[str, ...]] = ()
    in_place: ClassVar[tuple[str, ...]] = ("x",)

    x: Value
    weights: tuple[NormVector, ...]


@declared(frozen=True, kw_only=True)
class NormalizeGroups(Operation):
    """Normalise groups of consecutive columns in place, each of the norm's size, with the same weights."""

    written: ClassVar[tuple[str, ...]] = ()
    in_place: ClassVar[tuple[str, ...]] = ("x",)

    x: Columns
    weight: NormVector


@declared(frozen=True, kw_only=True)
class Linear(Operation):
    """y = x W^T (+ b). x: a buffer, or some of its columns.

    reduce: the products of the ranks are added. partial: this rank's share of a sum that a later operation completes;
    rank 0 adds the bias. fp32: y is float32 in any case."""

    x: Value | Columns
    y: Value
    weight: Matrix
    reduce: bool = False
    partial: bool = False
    fp32: bool = False


@declared(frozen=True, kw_only=True)
class Activation(Operation):
    """y = act(gate) · up of x = [gate, up], or act(x). With a limit and an offset:
    act(min(gate, limit)) · (clamp(up, -limit, limit) + up_offset)."""

    x: Value
    y: Value
    act: str
    gated: bool
    limit: float | None = None
    up_offset: float = 0.0
    numbers: ActivationNumbers | None = None


@declared(frozen=True, kw_only=True)
class Add(Operation):
    """x += scale · y, which is the output of a block, or that of another body of the same block. x: a buffer, or some
    of its columns."""

    written: ClassVar[tuple[str, ...]] = ()
    in_place: ClassVar[tuple[str, ...]] = ("x",)

    x: Value | Columns
    y: Value
    scale: float = 1.0


@declared(frozen=True, kw_only=True)
class Multiply(Operation):
    """y = x times a number of the checkpoint, or a vector, element by element. y may be x."""

    x: Value
    y: Value
    weight: Multiplier


@declared(frozen=True, kw_only=True)
class AllReduce(Operation):
    """x = sum of the x of all ranks."""

    written: ClassVar[tuple[str, ...]] = ()
    in_place: ClassVar[tuple[str, ...]] = ("x",)

    x: Value


@declared(frozen=True, kw_only=True)
class BlockLinear(Operation):
    """y[h] = W[h]ᵀ x[h]."""

    x: Value
    y: Value
    weight: BlockMatrices
    heads: int


@declared(frozen=True, kw_only=True)
class Keep(Operation):
    """y = x: a copy in some columns of a buffer, which later operations on x do not change."""

    written: ClassVar[tuple[str, ...]] = ()
    in_place: ClassVar[tuple[str, ...]] = ("y",)

    x: Value
    y: Columns


@declared(frozen=True, kw_only=True)
class Scale(Operation):
    """x *= factor."""

    written: ClassVar[tuple[str, ...]] = ()
    in_place: ClassVar[tuple[str, ...]] = ("x",)

    x: Columns
    factor: float


@declared(frozen=True, kw_only=True)
class Bound(Operation):
    """y = x, clipped to the bounds."""

    written: ClassVar[tuple[str, ...]] = ()
    in_place: ClassVar[tuple[str, ...]] = ("y",)

    x: Value
    y: Columns
    weight: Bounds


@declared(frozen=True, kw_only=True)
class Clamp(Operation):
    """x = min(max(x, low), high)."""

    written: ClassVar[tuple[str, ...]] = ()
    in_place: ClassVar[tuple[str, ...]] = ("x",)

    x: Columns
    low: float
    high: float


@declared(frozen=True, kw_only=True)
class Gate(Operation):
    """y = x · act(gate), element by element. act: sigmoid or none. If the gate has fewer columns than x, each of them
    multiplies several consecutive columns of x."""

    x: Columns
    gate: Columns
    y: Value
    act: Literal["sigmoid", "none"]


@declared(frozen=True, kw_only=True)
class Repeat(Operation):
    """y = each column of x, `count` times."""

    x: Value
    y: Value
    count: int


def scaled(columns: Columns, factor: float) -> Iterator[Scale]:
    """Yield the operation that multiplies columns by a factor, unless it is 1."""
    if factor != 1.0:
        yield Scale(x=columns, factor=factor)
