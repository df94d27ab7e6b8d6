"""Norms, projections, activations and sums, by Triton kernels."""

from collections.abc import Callable
from typing import Any

import torch

from engine.layers.fused.run import Run, Unreduced
from engine.layers.fused_rows import activation, add, add_norm, keep, normalize
from engine.layers.rounded import rounding_of
from engine.lowering.operations import (
    Activation,
    Add,
    AddNormalize,
    BlockLinear,
    Clamp,
    Columns,
    Gate,
    Keep,
    Linear,
    Multiply,
    Normalize,
    NormalizeGroups,
    NormalizeParts,
    Quantized,
    Scale,
)
from engine.models.parts import RMSNorm
from kernels.activation_quantized import ACTIVATION_QUANTIZED
from kernels.e4m3 import Rounded
from kernels.head_matmul import HEAD_MATMUL
from kernels.rms_norm import RMS_NORM
from kernels.rms_norm_quantized import RMS_NORM_QUANTIZED


def _normalize_parts(op: NormalizeParts, run: Run) -> None:
    sizes = [weight.norm.size for weight in op.weights]
    for piece, weight in zip(run[op.x].split(sizes, 1), op.weights, strict=True):
        layer = run.weights.norm(weight)
        assert isinstance(layer.norm, RMSNorm), "parts have RMS norms"
        RMS_NORM(piece, layer.weight, layer.norm.eps, None, 1.0, piece)


def _normalize_groups(op: NormalizeGroups, run: Run) -> None:
    layer, x, size = run.weights.norm(op.weight), run.columns(op.x), op.weight.norm.size
    assert isinstance(layer.norm, RMSNorm), "groups have RMS norms"
    pieces = [x.view(-1, size)] if x.is_contiguous() else x.split(size, 1)
    for piece in pieces:
        RMS_NORM(piece, layer.weight, layer.norm.eps, None, 1.0, piece)


def _add_normalize(op: AddNormalize, run: Run) -> None:
    layer, x, added = run.weights.norm(op.weight), run[op.x], run[op.added]
    if isinstance(added, Unreduced):
        assert run.model.fused_reduce is not None, "only fused sums are left to norms"
        y, run[op.x] = run.model.fused_reduce.reduce_norm(added.y, layer.weight, layer.norm.eps, x, op.scale)
        run[op.y] = y
        return
    run[op.x], run[op.y] = add_norm(layer, added, x, op.scale)  # y may be x: its norm remains


def _quantized(op: Quantized, run: Run) -> None:
    wanted, inner = rounding_of([run.weights.matrix(matrix) for matrix in op.matrices]), op.op
    assert wanted is not None, "the readers of a quantized output multiply by fp8 weights"
    if isinstance(inner, Activation):
        made = ACTIVATION_QUANTIZED(run[inner.x], inner.act, inner.gated, wanted.group, wanted.static_scale)
        run[inner.y] = Rounded(*made)
        return
    layer = run.weights.norm(inner.weight)
    residual, x, scale = None, run[inner.x], 1.0
    if isinstance(inner, AddNormalize):
        residual, x, scale = x, run[inner.added], inner.scale  # the residual is updated in place
    made = RMS_NORM_QUANTIZED(x, layer.weight, layer.norm.eps, residual, scale, wanted.group, wanted.static_scale)
    run[inner.y] = Rounded(*made[:2])


def _linear(op: Linear, run: Run) -> None:
    layer = run.weights.matrix(op.weight)
    x = run.columns(op.x) if isinstance(op.x, Columns) else run[op.x]
    if op.fp32:
        run[op.y] = layer.in_fp32(x)
        return
    y, lora = layer.partial_sum(x) if op.partial else layer.unreduced(x), run.adapters.layer(op.weight.name)
    if lora is not None:
        lora.add(x, y, run.adapter_rows)
    fused = run.model.fused_reduce
    if id(op) in run.model.reduced_by_norm and fused is not None and layer.bias is None and fused.takes(y):
        run[op.y] = Unreduced(y)
        return
    run[op.y] = y if op.partial else layer.reduced(y)


def _multiply(op: Multiply, run: Run) -> None:
    run[op.y] = run[op.x] * run.weights.multiplier(op.weight).to(run.model.dtype)


def _scale(op: Scale, run: Run) -> None:
    run.columns(op.x).mul_(op.factor)


def _clamp(op: Clamp, run: Run) -> None:
    run.columns(op.x).clamp_(op.low, op.high)


def _block_linear(op: BlockLinear, run: Run) -> None:
    x = run[op.x].unflatten(-1, (op.heads, -1))
    run[op.y] = HEAD_MATMUL(x, run.weights.blocks(op.weight).blocks, torch.empty_like(x)).flatten(1)


def _gate(op: Gate, run: Run) -> None:
    gate = run.columns(op.gate)
    factor = gate.sigmoid() if op.act == "sigmoid" else gate
    run[op.y] = (run.columns(op.x).unflatten(1, (op.gate.width, -1)) * factor.unsqueeze(2)).flatten(1)


FUNCTIONS: dict[type, Callable[[Any, Run], None]] = {
    Keep: keep,
    Normalize: normalize,
    NormalizeParts: _normalize_parts,
    NormalizeGroups: _normalize_groups,
    AddNormalize: _add_normalize,
    Quantized: _quantized,
    Linear: _linear,
    Activation: activation,
    Add: add,
    Multiply: _multiply,
    Scale: _scale,
    Clamp: _clamp,
    BlockLinear: _block_linear,
    Gate: _gate,
}
