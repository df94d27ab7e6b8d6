"""Mixtures of experts, by compiled kernels."""

from collections.abc import Sequence

import torch

from engine.api.errors import CheckpointError
from engine.layers.compiled.buffers import Buffers
from engine.layers.compiled.build import CompiledOps, Functions, Structures, TorchOp
from engine.layers.compiled.rows import packed
from engine.layers.linear import LinearLayer
from engine.lowering.operations import Combine, ExpertLinear, Route, ScaleRoutes
from kernels.cpu import program as cpu
from kernels.cpu.packing import Packed
from kernels.experts.routes import sparsemixer_weights


def _combine(op: Combine, ops: CompiledOps) -> Structures:
    values, rank = ops.buffers, 0 if ops.vocabulary is None else ops.vocabulary.world.rank
    y, logits = values[op.y], values[op.logits]
    shared = None if op.shared is None else values[op.shared]
    gate = None if op.part.shared_gate is None else logits[:, op.part.routed :]
    inputs = None if op.inputs is None or rank > 0 else values[op.inputs]
    yield cpu.Combine(
        x=values[op.x].data_ptr(),
        weights=None if op.weights is None else values[op.weights].data_ptr(),
        gate=None if gate is None else gate.data_ptr(),
        shared=None if shared is None else shared.data_ptr(),
        input=None if inputs is None else inputs.data_ptr(),
        y=y.data_ptr(),
        x_stride=op.x.width,
        gate_stride=0 if gate is None else gate.stride(0),
        shared_stride=0 if shared is None else shared.stride(0),
        input_stride=0 if inputs is None else inputs.stride(0),
        y_stride=y.stride(0),
        size=op.y.width,
        k=op.part.top_k,
        count=op.part.num_experts,
    )


def _alike(layers: Sequence[LinearLayer]) -> list[Packed]:
    """Return the weights of a layer's experts. Raises CheckpointError if they have different types."""
    weights = [packed(layer) for layer in layers]
    other = next((i for i, weight in enumerate(weights) if weight.form != weights[0].form), None)
    if other is not None:
        raise CheckpointError(
            f"{layers[other].path} is stored in another type than {layers[0].path}, and compiled kernels support only "
            "experts of one type; convert the checkpoint, or set hardware.kernels to torch"
        )
    return weights


def _route(op: Route, ops: CompiledOps) -> Structures:
    """Select experts and weigh them; the weights of sparsemixer follow."""
    values = ops.buffers
    scores = "softmax_chosen" if op.part.scores == "sparsemixer" else op.part.scores
    part, logits, correction = op.part, values[op.logits], ops.weights.correction(op.correction)
    yield cpu.Route(
        logits=logits.data_ptr(),
        chosen=values[op.chosen].data_ptr(),  # int32
        weights=values[op.weights].data_ptr(),
        correction=None if correction is None else correction.data_ptr(),
        logits_stride=logits.stride(0),
        count=part.routed,
        k=part.top_k,
        groups=part.groups,
        groups_kept=part.groups_kept,
        scale=part.weight_scale,
        scores=cpu.SCORES[scores],
        top_two=part.group_score == "top_two",
        normalized=part.normalized,
    )
    if part.scores == "sparsemixer":
        yield _sparsemixer(op, values)


def _sparsemixer(op: Route, values: Buffers) -> TorchOp:
    """Weigh the experts that a Route selected by logits."""
    logits, chosen, weights = values[op.logits], values[op.chosen].view(torch.int32), values[op.weights]

    def compute(tokens: int) -> None:
        own = logits[:tokens, : op.part.routed]
        weights[:tokens] = sparsemixer_weights(own, chosen[:tokens].long(), op.part.jitter)

    return TorchOp(compute)


def _expert_linear(op: ExpertLinear, ops: CompiledOps) -> Structures:
    values, layers = ops.buffers, [ops.weights.matrix(matrix) for matrix in op.matrices]
    biases = [layer.own_bias for layer in layers]
    scales = None if op.weights is None else values[op.weights]
    x, y, k = values[op.x], values[op.y], op.top_k
    yield cpu.experts(_alike(layers), biases, x, y, k, gathered=op.gathered, scales=scales)
    if (lora := ops.adapters.layer(op.stack)) is not None:
        own = lora.a, lora.b, lora.ranks, lora.pieces
        yield cpu.lora_experts(*own, x, y, k, gathered=op.gathered, scales=scales)


def _scale_routes(op: ScaleRoutes, ops: CompiledOps) -> Structures:
    chosen, weights = ops.buffers[op.chosen].view(torch.int32), ops.buffers[op.weights]
    scales = ops.weights.correction(op.scales)
    assert scales is not None, "a program that scales routes has numbers of the experts"

    def compute(tokens: int) -> None:
        weights[:tokens].mul_(scales[chosen[:tokens].long()])

    yield TorchOp(compute)


FUNCTIONS: Functions = {
    Route: _route,
    ScaleRoutes: _scale_routes,
    ExpertLinear: _expert_linear,
    Combine: _combine,
}
