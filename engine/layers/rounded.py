"""Quantization of rows to fp8 in the kernel that produces them, if all consumers multiply by fp8."""

from collections.abc import Sequence

from torch import Tensor

from engine.layers.block import AttentionLayer, CrossAttentionLayer
from engine.layers.linear import LinearLayer
from engine.layers.mlp import ExpertsLayer, MLPLayer
from kernels.activation import ACTIVATION
from kernels.activation_quantized import ACTIVATION_QUANTIZED
from kernels.e4m3 import Rounded, Rounding


def rounding_of(bodies: Sequence[AttentionLayer | CrossAttentionLayer | MLPLayer | ExpertsLayer]) -> Rounding | None:
    """Return how the input rows of these bodies can be quantized, or None if some body needs them unquantized or
    quantized differently."""
    wanted = [_first(body).rounding if not isinstance(body, ExpertsLayer) else None for body in bodies]
    first = wanted[0]
    if first is None or any(one is None or one.group != first.group for one in wanted):
        return None
    # A static scale belongs to one matrix.
    return first if len(wanted) == 1 or all(one is not None and one.static_scale is None for one in wanted) else None


def _first(body: AttentionLayer | CrossAttentionLayer | MLPLayer) -> LinearLayer:
    match body:
        case AttentionLayer():
            return body.qkv
        case CrossAttentionLayer():
            return body.q
        case MLPLayer():
            return body.up


def activated(body: MLPLayer, y: Tensor) -> Tensor | Rounded:
    """Return act(gate) · up of the projection y, quantized if the next projection allows it."""
    wanted = body.down.rounding
    if wanted is None:
        return ACTIVATION(y, body.part.act, body.has_gate)
    return Rounded(*ACTIVATION_QUANTIZED(y, body.part.act, body.has_gate, wanted.group, wanted.static_scale))
