"""Mixtures of experts, by Triton kernels."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.layers.fused.run import Run
from engine.layers.loaded import routing
from engine.lowering.operations import Combine, ExpertLinear, Route, ScaleRoutes
from kernels.experts.matmul import EXPERT_MATMUL
from kernels.experts.routes import EXPERT_ROUTES
from kernels.experts.schedule import EXPERT_SCHEDULE, tile_rows
from kernels.experts.sum import EXPERT_SUM
from kernels.integers import multiply_experts


@dataclass(frozen=True)
class _Routes:
    """Routes of a step's tokens, and the tiles of rows by expert."""

    expert_ids: Tensor
    order: Tensor
    pairs: Tensor
    tiles: Tensor
    rows: int


def _route(op: Route, run: Run) -> None:
    part, logits = op.part, run[op.logits]
    correction = run.weights.correction(op.correction)
    expert_ids, weights, order = EXPERT_ROUTES(logits, part.routed, routing(part), correction)
    rows = tile_rows(len(logits), part.top_k, part.num_experts)
    run[op.chosen] = _Routes(expert_ids, order, *EXPERT_SCHEDULE(expert_ids, part.num_experts, rows), rows)
    run[op.weights] = weights


def _scale_routes(op: ScaleRoutes, run: Run) -> None:
    scales = run.weights.correction(op.scales)
    assert scales is not None, "a program that scales routes has numbers of the experts"
    run[op.weights].mul_(scales[run[op.chosen].expert_ids])


def _expert_linear(op: ExpertLinear, run: Run) -> None:
    routes, stack = run[op.chosen], run.weights.stacks[op.stack]
    k = op.top_k if op.gathered else 1
    bias = None if run.weights.matrix(op.matrices[0]).own_bias is None else stack.biases
    scales = None if op.weights is None else run[op.weights]
    rest = routes.pairs, routes.tiles, k, routes.rows, bias, scales
    if (one := stack.integers) is not None:
        y = multiply_experts(one, run[op.x], *rest)
    elif stack.blocks is not None:
        y = stack.blocks.multiply_experts(run[op.x], *rest)
    elif stack.fp8 is not None:
        products = run.model.fp8
        assert products is not None, "fp8 weights need kernels that multiply by them"
        y = stack.fp8.multiply(products, run[op.x], *rest)
    else:
        assert stack.whole is not None, "experts for fused kernels are loaded stacked"
        y = EXPERT_MATMUL(run[op.x], stack.whole, *rest)
    if (lora := run.adapters.layer(op.stack)) is not None:
        lora.add_routed(run[op.x], y, run.adapter_pairs(op.chosen, lora.num_experts), k, scales)
    run[op.y] = y


def _combine(op: Combine, run: Run) -> None:
    """The sum is in fp32 until all ranks have added to it."""
    part, dtype = op.part, run[op.x].dtype
    shared = None if op.shared is None else run[op.shared]
    opening = None if part.shared_gate is None else run[op.logits]
    summed = torch.float32 if op.reduce else dtype
    order = run[op.chosen].order
    weights = torch.ones_like(order, dtype=torch.float32) if op.weights is None else run[op.weights]
    skipped = None
    if op.inputs is not None:
        inputs = run[op.inputs] if run.model.vocabulary.world.rank == 0 else torch.zeros_like(run[op.inputs])
        skipped = run[op.chosen].expert_ids, part.num_experts, inputs
    y = EXPERT_SUM(run[op.x], weights, order, shared, opening, part.routed, summed, skipped)
    run[op.y] = run.model.vocabulary.world.all_reduce(y).to(dtype) if op.reduce else y


FUNCTIONS: dict[type, Callable[[Any, Run], None]] = {
    Route: _route,
    ScaleRoutes: _scale_routes,
    ExpertLinear: _expert_linear,
    Combine: _combine,
}
