"""Norms, projections, activations and sums, with torch."""

from collections.abc import Callable
from typing import Any

import torch

from engine.layers.norm import normed
from engine.layers.reference.run import Run, heads
from engine.lowering.operations import (
    Activation,
    Add,
    AddNormalize,
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
)
from kernels.activation import function, gated


def _keep(op: Keep, run: Run) -> None:
    if op.y.value.name not in run.values:
        x = run[op.x]
        run[op.y.value] = x.new_empty(x.shape[0], op.y.value.width)
    run.columns(op.y).copy_(run[op.x])


def _bound(op: Bound, run: Run) -> None:
    if op.y.value.name not in run.values:
        x = run[op.x]
        run[op.y.value] = x.new_empty(x.shape[0], op.y.value.width)
    low, high = run.weights.bounds(op.weight)
    torch.clamp(run[op.x], low, high, out=run.columns(op.y))


def _normalize(op: Normalize, run: Run) -> None:
    run[op.y] = run.weights.norm(op.weight)(run[op.x])


def _normalize_parts(op: NormalizeParts, run: Run) -> None:
    sizes = [weight.norm.size for weight in op.weights]
    for piece, weight in zip(run[op.x].split(sizes, 1), op.weights, strict=True):
        piece.copy_(run.weights.norm(weight)(piece))


def _normalize_groups(op: NormalizeGroups, run: Run) -> None:
    groups = heads(run.columns(op.x), op.weight.norm.size)
    groups.copy_(run.weights.norm(op.weight)(groups))


def _linear(op: Linear, run: Run) -> None:
    layer = run.weights.matrix(op.weight)
    x = run.columns(op.x) if isinstance(op.x, Columns) else run[op.x]
    if op.fp32:
        run[op.y] = layer.in_fp32(x)
        return
    lora = None if run.adapters is None else run.loaded.layer(op.weight.name)
    added = None if lora is None or run.adapters is None else lora.delta(x, run.adapters)
    if op.partial:
        y = layer.partial_sum(x)
        run[op.y] = y if added is None else y + added
    else:
        run[op.y] = layer(x, added)


def _activation(op: Activation, run: Run) -> None:
    act, x = function(op.act, run.weights.activation(op.numbers)), run[op.x]
    run[op.y] = gated(act, x, op.limit, op.up_offset) if op.gated else act(x)


def _add(op: Add, run: Run) -> None:
    x = run.columns(op.x) if isinstance(op.x, Columns) else run[op.x]
    x.add_(run[op.y], alpha=op.scale)


def _multiply(op: Multiply, run: Run) -> None:
    run[op.y] = run[op.x] * run.weights.multiplier(op.weight).to(run.dtype)


def _scale(op: Scale, run: Run) -> None:
    run.columns(op.x).mul_(op.factor)


def _clamp(op: Clamp, run: Run) -> None:
    x = run.columns(op.x)
    most = torch.finfo(x.dtype).max
    x.clamp_(max(op.low, -most), min(op.high, most))


def _repeat(op: Repeat, run: Run) -> None:
    run[op.y] = run[op.x].repeat_interleave(op.count, 1)


def _all_reduce(op: AllReduce, run: Run) -> None:
    run[op.x] = run.world.all_reduce(run[op.x])


def _block_linear(op: BlockLinear, run: Run) -> None:
    blocks = run.weights.blocks(op.weight).blocks
    x = heads(run[op.x], op.weight.size)
    run[op.y] = torch.bmm(x.transpose(0, 1), blocks.transpose(1, 2)).transpose(0, 1).flatten(1)


def _add_normalize(op: AddNormalize, run: Run) -> None:
    x = run[op.x].add_(run[op.added], alpha=op.scale)
    layer = run.weights.norm(op.weight)
    run[op.x], run[op.y] = x, normed(layer.norm, x, layer.weight, layer.bias)


def _gate(op: Gate, run: Run) -> None:
    gate = run.columns(op.gate)
    factor = gate.sigmoid() if op.act == "sigmoid" else gate
    run[op.y] = (run.columns(op.x).unflatten(1, (op.gate.width, -1)) * factor.unsqueeze(2)).flatten(1)


FUNCTIONS: dict[type, Callable[[Any, Run], None]] = {
    Keep: _keep,
    Repeat: _repeat,
    Bound: _bound,
    Normalize: _normalize,
    NormalizeParts: _normalize_parts,
    NormalizeGroups: _normalize_groups,
    Linear: _linear,
    Activation: _activation,
    Add: _add,
    Multiply: _multiply,
    Scale: _scale,
    Clamp: _clamp,
    AllReduce: _all_reduce,
    BlockLinear: _block_linear,
    Gate: _gate,
    AddNormalize: _add_normalize,
}
