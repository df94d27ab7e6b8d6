"""Fused operations, which rewrites make."""

from typing import ClassVar

from engine.lowering.operations.operation import Operation
from engine.lowering.operations.rows import Activation, Normalize
from engine.lowering.operations.values import Value
from engine.lowering.operations.weights import Matrix, NormVector
from engine.models.declared import declared


@declared(frozen=True, kw_only=True)
class AddNormalize(Operation):
    """x += scale · added; y = norm(x)."""

    in_place: ClassVar[tuple[str, ...]] = ("x",)

    x: Value
    added: Value
    scale: float
    y: Value
    weight: NormVector


@declared(frozen=True, kw_only=True)
class Quantized(Operation):
    """`op`, with its output quantized for the matrices that read it."""

    op: Normalize | AddNormalize | Activation
    matrices: tuple[Matrix, ...]
