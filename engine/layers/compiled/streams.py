"""Several streams of hidden states, by compiled kernels."""

from engine.layers.compiled.build import CompiledOps, Functions, Structures, TorchOp
from engine.layers.streams import computed
from engine.lowering.operations import Collect, Correct, Predict, Sparsify, Spread, StreamOp, Tanh


def _stream(op: StreamOp, ops: CompiledOps) -> Structures:
    assert ops.vocabulary is not None, "a tower has no streams"
    world = ops.vocabulary.world

    def compute(tokens: int) -> None:
        for value, tensor in computed(op, lambda one: ops.buffers[one][:tokens], world):
            ops.buffers[value][:tokens] = tensor

    yield TorchOp(compute)


FUNCTIONS: Functions = dict.fromkeys((Spread, Predict, Correct, Collect, Tanh, Sparsify), _stream)
