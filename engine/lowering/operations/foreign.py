"""Decoders that transformers computes."""

from engine.lowering.operations.operation import Operation
from engine.lowering.operations.values import Value
from engine.lowering.operations.weights import ForeignWeights
from engine.models.declared import declared


@declared(frozen=True, kw_only=True)
class ForeignDecoder(Operation):
    """y = hidden states of a decoder that transformers computes. The attention of its layers follows in the list, for
    plans; engine/layers/foreign.py executes both."""

    y: Value
    weight: ForeignWeights
