"""Operations on several streams of hidden states (Gemma 3n)."""

from typing import ClassVar

from engine.lowering.operations.operation import Operation
from engine.lowering.operations.values import Columns, Value
from engine.models.declared import declared


@declared(frozen=True, kw_only=True)
class Spread(Operation):
    """y = the streams of x and of its projections to the other streams (kernels/streams.py)."""

    x: Value
    projected: Value
    y: Value


@declared(frozen=True, kw_only=True)
class Predict(Operation):
    """y = predictions of the streams, of which x is the first."""

    written: ClassVar[tuple[str, ...]] = ("y", "x")

    streams: Value
    coefficients: Value
    y: Value
    x: Value
    count: int


@declared(frozen=True, kw_only=True)
class Correct(Operation):
    """y = streams corrected by the change of the first prediction to x, which becomes the first stream."""

    in_place: ClassVar[tuple[str, ...]] = ("x",)

    predictions: Value
    x: Value
    coefficients: Value
    y: Value


@declared(frozen=True, kw_only=True)
class Collect(Operation):
    """x = mean of x, the first stream, and of the projections of the others, scaled to its size."""

    written: ClassVar[tuple[str, ...]] = ()
    in_place: ClassVar[tuple[str, ...]] = ("x",)

    x: Value
    others: tuple[Value, ...]


@declared(frozen=True, kw_only=True)
class Tanh(Operation):
    """x = tanh(factor · x)."""

    written: ClassVar[tuple[str, ...]] = ()
    in_place: ClassVar[tuple[str, ...]] = ("x",)

    x: Value
    factor: float


@declared(frozen=True, kw_only=True)
class Sparsify(Operation):
    """x = max(x - mean - multiplier · standard deviation, 0), over the `size` columns of all ranks."""

    written: ClassVar[tuple[str, ...]] = ()
    in_place: ClassVar[tuple[str, ...]] = ("x",)

    x: Columns
    multiplier: float
    size: int


StreamOp = Spread | Predict | Correct | Collect | Tanh | Sparsify
