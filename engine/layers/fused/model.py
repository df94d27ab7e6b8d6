"""Executor of a program with Triton: one launch of a fused kernel per operation.

The kernels have other boundaries than the functions of torch. The norm after a residual block adds the output of the
block. One kernel moves queries, keys and values from the projection to the pages; bidirectional attention reads them in
the same buffer. The encoder computes encoder inputs first; then their keys and values for each decoder layer are
written to the pages. Nothing waits for the device, and no shape depends on its data. Therefore a step can be captured
as a CUDA graph.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.layers.fused import attention, embeddings, experts, latent, recurrent, rows, streams
from engine.layers.fused.run import ModelParts, Run
from engine.layers.fused.step import DeviceStep
from engine.layers.model import TextModel
from engine.layers.rounded import rounding_of
from engine.layers.torch_compile import Executor, SegmentCompiler
from engine.lowering.operations import Activation, AddNormalize, Matrix, Normalize, Value
from engine.lowering.program import Op
from engine.lowering.rewrites import fuse_add_normalize, fuse_prepare_kv, last_uses, quantize_outputs, sums_for_norms
from engine.lowering.segments import Segment, segments
from engine.models.kv_scales import KVScales
from engine.models.parts import RMSNorm
from kernels.sampling.cap_logits import CAP_LOGITS

FUNCTIONS: dict[type, Callable[[Any, Run], None]] = {
    **attention.FUNCTIONS,
    **embeddings.FUNCTIONS,
    **experts.FUNCTIONS,
    **latent.FUNCTIONS,
    **recurrent.FUNCTIONS,
    **rows.FUNCTIONS,
    **streams.FUNCTIONS,
}


class Forwarded(NamedTuple):
    """Results of a step: the hidden states after the final norm, [tokens, hidden]; the inputs of the layers
    `Model.kept_layers`, [tokens, layers · hidden], and the selected experts of all layers, [tokens, experts], if the
    program keeps them."""

    hidden: Tensor
    kept: Tensor | None
    routes: Tensor | None


class FusedModel:
    """Immutable; its only state is the KV pages."""

    def __init__(self, text_model: TextModel, scales: KVScales | None = None) -> None:
        self.parts, self.program = ModelParts(text_model, scales), text_model.program
        self.layout, self.vocabulary, self.adapters = text_model.layout, text_model.vocabulary, text_model.adapters
        self.towers = text_model.towers
        # Launches on `meta` tensors are recorded to compile Triton's kernels, and torch.compile takes part in none.
        compiles = text_model.torch_compile and text_model.device.type != "meta"
        self.compiler: SegmentCompiler[Run] | None = SegmentCompiler(_EXECUTOR) if compiles else None
        self._ops = self._fused(self.program.ops, self.program.out, self.program.kept, *self.program.routes)
        self._encoder_ops = None
        if self.program.encoder_out is not None:
            self._encoder_ops = self._fused(self.program.encoder, self.program.encoder_out)

    def _fused(self, ops: Sequence[Op], *out: Value | None) -> tuple[Segment, ...]:
        """Return the operations that are launched, each with the buffers that nothing reads afterwards."""
        fused = quantize_outputs(fuse_add_normalize(fuse_prepare_kv(ops, norms=True)), self._quantizes)
        self.parts.reduced_by_norm |= sums_for_norms(fused)
        return segments(fused, last_uses(fused, *out), "triton")

    def _quantizes(self, op: Normalize | AddNormalize | Activation, matrices: Sequence[Matrix]) -> bool:
        if not isinstance(op, Activation) and not isinstance(op.weight.norm, RMSNorm):
            return False
        if isinstance(op, Activation) and op.numbers is not None:
            return False
        if any(self.adapters.layer(matrix.name) is not None for matrix in matrices):
            return False  # adapters multiply the rows before quantization
        return rounding_of([self.parts.weights.matrix(matrix) for matrix in matrices]) is not None

    def forward(self, step: DeviceStep) -> Tensor:
        """Return the hidden states after the final norm, [tokens, hidden], and write the tokens' keys and values to the
        pages. Encoder inputs of the step must have been read before."""
        return self.forward_all(step).hidden

    def forward_all(self, step: DeviceStep) -> Forwarded:
        """Return the hidden states and the other values that the program keeps."""
        run, kept, routes = self._execute(self._ops, step), self.program.kept, self.program.routes
        return Forwarded(
            run[self.program.out],
            None if kept is None else run[kept],
            torch.cat([run[value].expert_ids for value in routes], 1) if routes else None,
        )

    def encode_inputs(self, encoder_inputs: DeviceStep) -> Tensor:
        """Return the encoder output, [tokens, hidden], and write the keys and values for cross-attention to the
        pages."""
        assert self._encoder_ops is not None and self.program.encoder_out is not None, "the model has no encoder"
        return self._execute(self._encoder_ops, encoder_inputs)[self.program.encoder_out]

    def _execute(self, divided: Sequence[Segment], step: DeviceStep) -> Run:
        run = Run(self.parts, step)
        if self.compiler is not None:
            self.compiler.execute(divided, run)
        else:
            execute(divided, run)
        return run

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] → [rows, vocab] fp32."""
        return self.vocabulary.joined(self.own_logits(hidden))

    def own_logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] → [rows, columns of this rank] fp32."""
        y, out = self.vocabulary.own_products(hidden), self.vocabulary.out
        return y if out.scale == 1.0 and out.softcap is None else CAP_LOGITS(y, out.scale, out.softcap or 0.0)


def execute(divided: Sequence[Segment], run: Run) -> None:
    """Execute operations in order, and free the buffers that nothing reads afterwards."""
    for segment in divided:
        for op, unused in zip(segment.ops, segment.unused, strict=True):
            FUNCTIONS[type(op)](op, run)
            for name in unused:
                run.values.pop(name, None)


def _step_inputs(run: Run) -> dict[str, Tensor]:
    """Return the positions, which compiled segments read in addition to buffers and weights."""
    return {"positions": run.step.positions}


def _bind(run: Run, values: dict[str, Any], inputs: dict[str, Tensor]) -> Run:
    bound = copy.copy(run)
    bound.values, bound.step = values, replace(run.step, positions=inputs["positions"])
    return bound


_EXECUTOR: Executor[Run] = Executor(FUNCTIONS, _step_inputs, _bind)
