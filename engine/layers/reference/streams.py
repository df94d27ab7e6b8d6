"""Several streams of hidden states, with torch."""

from collections.abc import Callable
from typing import Any

from engine.layers.reference.run import Run
from engine.layers.streams import computed
from engine.lowering.operations import Collect, Correct, Predict, Sparsify, Spread, StreamOp, Tanh


def _stream(op: StreamOp, run: Run) -> None:
    for value, tensor in computed(op, run.__getitem__, run.world):
        run[value] = tensor


FUNCTIONS: dict[type, Callable[[Any, Run], None]] = {
    **dict.fromkeys((Spread, Predict, Correct, Collect, Tanh, Sparsify), _stream),
}
