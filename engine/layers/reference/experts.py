"""Mixtures of experts, with torch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from engine.layers.loaded import routing
from engine.layers.reference.run import Run
from engine.lowering.operations import Combine, ExpertLinear, Route, ScaleRoutes
from kernels.experts.routes import route


def _route(op: Route, run: Run) -> None:
    logits = run[op.logits][:, : op.part.routed]
    run[op.chosen], run[op.weights] = route(logits, routing(op.part), run.weights.correction(op.correction))


def _scale_routes(op: ScaleRoutes, run: Run) -> None:
    scales = run.weights.correction(op.scales)
    assert scales is not None, "a program that scales routes has numbers of the experts"
    run[op.weights].mul_(scales[run[op.chosen]])


def _expert_linear(op: ExpertLinear, run: Run) -> None:
    """Multiply the pairs of each expert together."""
    x, chosen = run[op.x], run[op.chosen].flatten()
    lora = None if run.adapters is None else run.loaded.layer(op.stack)
    y: Tensor | None = None
    for number, matrix in enumerate(op.matrices):
        pairs = (chosen == number).nonzero().flatten()
        if len(pairs):
            rows = x[pairs // op.top_k if op.gathered else pairs]
            if op.weights is not None:
                rows = (rows * run[op.weights].flatten()[pairs, None]).to(x.dtype)
            product = run.weights.matrix(matrix).partial_sum(rows)
            if lora is not None and run.adapters is not None:
                product = product + lora.of_expert(number).delta(rows, run.adapters[pairs // op.top_k])
            y = product.new_empty(len(chosen), product.shape[1]) if y is None else y
            y[pairs] = product
    # No pair is computed if all have zero-computation experts.
    run[op.y] = x.new_empty(len(chosen), op.y.width) if y is None else y


def _combine(op: Combine, run: Run) -> None:
    """Add a token's experts in the order of their numbers, in float32."""
    chosen, x = run[op.chosen], run[op.x].unflatten(0, (-1, op.part.top_k))
    dtype = x.dtype
    order = chosen.argsort(dim=1)
    if op.inputs is not None:
        inputs = run[op.inputs] if run.world.rank == 0 else torch.zeros_like(run[op.inputs])
        x = torch.where((chosen < op.part.num_experts).unsqueeze(2), x, inputs.unsqueeze(1))
    scaled = x.float() if op.weights is None else x.float() * run[op.weights].unsqueeze(2)
    y = torch.zeros_like(scaled[:, 0])
    for pairs in order.unbind(1):
        y += scaled[torch.arange(len(x), device=x.device), pairs]
    if op.shared is not None:
        gate = 1.0 if op.part.shared_gate is None else run[op.logits][:, op.part.routed :].sigmoid()
        y += run[op.shared].float() * gate
    run[op.y] = (run.world.all_reduce(y) if op.reduce else y).to(dtype)


FUNCTIONS: dict[type, Callable[[Any, Run], None]] = {
    Route: _route,
    ScaleRoutes: _scale_routes,
    ExpertLinear: _expert_linear,
    Combine: _combine,
}
