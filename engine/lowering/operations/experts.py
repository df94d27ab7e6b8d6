"""Operations of mixtures of experts."""

from typing import ClassVar

from engine.lowering.operations.operation import Operation
from engine.lowering.operations.values import Value
from engine.lowering.operations.weights import Correction, ExpertScales, Matrix
from engine.models.declared import declared
from engine.models.parts import Experts


@declared(frozen=True, kw_only=True)
class Route(Operation):
    """Select the experts of each token from router logits: numbers and weights, [tokens, top_k]."""

    written: ClassVar[tuple[str, ...]] = ("chosen", "weights")

    logits: Value
    chosen: Value
    weights: Value
    part: Experts
    correction: Correction | None = None


@declared(frozen=True, kw_only=True)
class ScaleRoutes(Operation):
    """Multiply the weight of each pair by the number of its expert, in place."""

    written: ClassVar[tuple[str, ...]] = ()
    in_place: ClassVar[tuple[str, ...]] = ("weights",)

    chosen: Value
    weights: Value
    scales: ExpertScales


@declared(frozen=True, kw_only=True)
class ExpertLinear(Operation):
    """y[pair] = x[pair] W^T (+ b) of the pair's expert. gathered: x has one row per token, which its pairs share.
    weights: of the pairs, which multiply their rows of x. Only rank 0 adds the biases of products that a later
    operation sums."""

    x: Value
    y: Value
    chosen: Value
    matrices: tuple[Matrix, ...]
    top_k: int
    gathered: bool
    weights: Value | None = None

    @property
    def stack(self) -> str:
        """Name of the matrices together."""
        return f"{self.matrices[0].name} × {len(self.matrices)}"


@declared(frozen=True, kw_only=True)
class Combine(Operation):
    """y = Σ weight · x of a token's pairs, in the order of their experts (+ shared, or sigmoid(gate) · shared), in
    float32. weights: None if all are 1. reduce: the sums of the ranks are added. inputs: read in place of x for
    pairs with zero-computation experts; only rank 0 adds them."""

    x: Value
    chosen: Value
    weights: Value | None
    logits: Value  # the last one is the gate of the shared expert
    shared: Value | None
    y: Value
    part: Experts
    inputs: Value | None = None
    reduce: bool = False
