"""Norms, projections, activations and sums, by compiled kernels."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from engine.layers.compiled.buffers import LOW_RANK, heads
from engine.layers.compiled.build import CompiledOps, Functions, Structures, TorchOp
from engine.layers.linear import LinearLayer
from engine.lowering.operations import (
    Activation,
    Add,
    AllReduce,
    BlockLinear,
    Bound,
    Clamp,
    Columns,
    Gate,
    Keep,
    Linear,
    Multiply,
    Normalize,
    NormalizeGroups,
    NormalizeParts,
    Repeat,
    Scale,
    Value,
)
from engine.models.parts import LayerNorm, Norm
from kernels.activation import function, gated
from kernels.cpu import program as cpu
from kernels.cpu.packing import Packed, Segments

VECTOR = 64  # floats; more than the widest registers of torch's loops


def packed(layer: LinearLayer) -> Packed:
    assert isinstance(layer.weight, Packed)
    return layer.weight


def norm(
    norm: Norm,
    weight: Tensor,
    bias: Tensor | None,
    x: Tensor,
    y: Tensor,
    *,
    groups: int = 1,
    size: int = 0,
    shared: bool = False,
) -> cpu.Norm:
    """size: of each group; the norm's own if 0. shared: all groups have the same weights."""
    return cpu.Norm(
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        y=y.data_ptr(),
        x_stride=x.stride(0),
        y_stride=y.stride(0),
        groups=groups,
        size=size or norm.size,
        weight_stride=0 if shared else size or norm.size,
        norm=cpu.LAYER if isinstance(norm, LayerNorm) else cpu.RMS,
        eps=norm.eps,
    )


def _normalize(op: Normalize, ops: CompiledOps) -> Structures:
    layer = ops.weights.norm(op.weight)
    yield norm(layer.norm, layer.weight, layer.bias, ops.buffers[op.x], ops.buffers[op.y])


def _normalize_parts(op: NormalizeParts, ops: CompiledOps) -> Structures:
    at = 0
    for weight in op.weights:
        layer, piece = ops.weights.norm(weight), ops.buffers[op.x][:, at:]
        yield norm(layer.norm, layer.weight, layer.bias, piece, piece)
        at += weight.norm.size


def _normalize_groups(op: NormalizeGroups, ops: CompiledOps) -> Structures:
    layer, x, size = ops.weights.norm(op.weight), ops.columns(op.x), op.weight.norm.size
    yield norm(layer.norm, layer.weight, None, x, x, groups=op.x.width // size, size=size, shared=True)


def _linear(op: Linear, ops: CompiledOps) -> Structures:
    """Yield the product, between the two operations of its adapters."""
    x, y = ops.columns(op.x) if isinstance(op.x, Columns) else ops.buffers[op.x], ops.buffers[op.y]
    products, lora = _products(ops.weights.matrix(op.weight), x, y), ops.adapters.layer(op.weight.name)
    if lora is None:
        yield from products
        return
    u = ops.buffers[Value(name=LOW_RANK, width=ops.adapters.columns)]
    before, after = cpu.lora(lora.a, lora.b, lora.ranks, lora.pieces, x, y, u)
    yield from (before, *products, after)


def _products(layer: LinearLayer, x: Tensor, y: Tensor) -> Iterator[cpu.Linear]:
    """Yield the products of a matrix, one for each of its segments."""
    bias, at = layer.own_bias, 0
    for weight in layer.weight.pieces if isinstance(layer.weight, Segments) else (packed(layer),):
        outputs = slice(at, at + weight.outputs)
        yield cpu.linear(weight, None if bias is None else bias[outputs], x, y[:, outputs])
        at += weight.outputs


def _block_linear(op: BlockLinear, ops: CompiledOps) -> Structures:
    x, y = heads(ops.buffers[op.x], op.heads), heads(ops.buffers[op.y], op.heads)
    yield cpu.heads(ops.weights.blocks(op.weight).packed, x, y)


def _activation(op: Activation, ops: CompiledOps) -> Structures:
    x, y, rows = ops.buffers[op.x], ops.buffers[op.y], op.y.rows
    if op.act in cpu.ACTS:
        yield cpu.Activate(
            x=x.data_ptr(),
            y=y.data_ptr(),
            x_stride=op.x.elements,
            y_stride=op.y.elements,
            inner=op.y.width,
            groups=rows,
            act=cpu.ACTS[op.act],
            gated=op.gated,
            limit=math.inf if op.limit is None else op.limit,
            up_offset=op.up_offset,
        )
        return
    act = function(op.act, ops.weights.activation(op.numbers))

    def compute(tokens: int) -> None:
        read = x[: tokens * rows]
        y[: tokens * rows] = gated(act, read, op.limit, op.up_offset) if op.gated else act(read)

    yield TorchOp(compute)


def _add(op: Add, ops: CompiledOps) -> Structures:
    x, y = ops.columns(op.x) if isinstance(op.x, Columns) else ops.buffers[op.x], ops.buffers[op.y]
    yield cpu.Add(
        x=x.data_ptr(),
        y=y.data_ptr(),
        x_stride=x.stride(0),
        y_stride=y.stride(0),
        size=op.x.width,
        alpha=op.scale,
    )


def _multiply(op: Multiply, ops: CompiledOps) -> Structures:
    x, y, factor = ops.buffers[op.x], ops.buffers[op.y], ops.weights.multiplier(op.weight)
    if op.weight.size == 1 and op.x == op.y:
        yield cpu.Cap(x=x.data_ptr(), stride=x.stride(0), size=x.shape[1], scale=factor.item(), cap=0.0)
        return

    def compute(tokens: int) -> None:
        torch.mul(x[:tokens], factor, out=y[:tokens])

    yield TorchOp(compute)


def _scale(op: Scale, ops: CompiledOps) -> Structures:
    x = ops.columns(op.x)
    yield cpu.Cap(x=x.data_ptr(), stride=x.stride(0), size=x.shape[1], scale=op.factor, cap=0.0)


def _keep(op: Keep, ops: CompiledOps) -> Structures:
    x, y = ops.buffers[op.x], ops.columns(op.y)

    def compute(tokens: int) -> None:
        y[:tokens] = x[:tokens]

    yield TorchOp(compute)


def _bound(op: Bound, ops: CompiledOps) -> Structures:
    x, y, (low, high) = ops.buffers[op.x], ops.columns(op.y), ops.weights.bounds(op.weight)

    def compute(tokens: int) -> None:
        torch.clamp(x[:tokens], low, high, out=y[:tokens])

    yield TorchOp(compute)


def _clamp(op: Clamp, ops: CompiledOps) -> Structures:
    x, rows = ops.columns(op.x), op.x.value.rows

    def compute(tokens: int) -> None:
        x[: tokens * rows].clamp_(op.low, op.high)

    yield TorchOp(compute)


def _repeat(op: Repeat, ops: CompiledOps) -> Structures:
    x, y = ops.buffers[op.x], ops.buffers[op.y]

    def compute(tokens: int) -> None:
        y[:tokens].unflatten(1, (-1, op.count)).copy_(x[:tokens].unsqueeze(2))

    yield TorchOp(compute)


def _gate(op: Gate, ops: CompiledOps) -> Structures:
    """Multiply by a gate. torch rounds the sigmoid of the last elements of a tensor differently if they do not fill its
    vectors. Rows of other widths are then computed one by one, so that a row does not depend on others."""
    x, gate, y = ops.columns(op.x), ops.columns(op.gate), ops.buffers[op.y]
    together = op.act == "none" or gate.shape[1] % VECTOR == 0

    def compute(tokens: int) -> None:
        for rows in (slice(tokens),) if together else (slice(row, row + 1) for row in range(tokens)):
            factor = gate[rows].sigmoid() if op.act == "sigmoid" else gate[rows]
            if gate.shape[1] < x.shape[1]:
                factor = factor.repeat_interleave(x.shape[1] // gate.shape[1], 1)
            torch.mul(x[rows], factor, out=y[rows])

    yield TorchOp(compute)


def _all_reduce(op: AllReduce, ops: CompiledOps) -> Structures:
    assert ops.collective is not None, "several ranks have shared memory"
    yield cpu.all_reduce(ops.collective, ops.buffers[op.x], ops.buffers[op.x], gathers=False)


FUNCTIONS: Functions = {
    Keep: _keep,
    Bound: _bound,
    Normalize: _normalize,
    NormalizeParts: _normalize_parts,
    NormalizeGroups: _normalize_groups,
    Linear: _linear,
    BlockLinear: _block_linear,
    Activation: _activation,
    Add: _add,
    Multiply: _multiply,
    Repeat: _repeat,
    Scale: _scale,
    Clamp: _clamp,
    Gate: _gate,
    AllReduce: _all_reduce,
}
