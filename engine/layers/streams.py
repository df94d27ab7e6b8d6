"""Operations on streams of hidden states, which torch computes for all executors."""

from collections.abc import Callable, Iterator

from torch import Tensor

from engine.distributed.world import World
from engine.lowering.operations import (
    Collect,
    Correct,
    Predict,
    Sparsify,
    Spread,
    StreamOp,
    Tanh,
    Value,
)
from kernels.streams import collect, correct, predict, sparsify, spread, tanh


def computed(op: StreamOp, get: Callable[[Value], Tensor], world: World) -> Iterator[tuple[Value, Tensor]]:
    """Yield each buffer that an operation writes, and its new rows. get: function that returns the rows of a buffer."""
    match op:
        case Spread():
            yield op.y, spread(get(op.x), get(op.projected))
        case Predict():
            found = predict(get(op.streams), get(op.coefficients), op.count)
            yield op.y, found
            yield op.x, found[:, : op.x.width].clone()
        case Correct():
            found = correct(get(op.predictions), get(op.x), get(op.coefficients))
            yield op.y, found
            yield op.x, found[:, : op.x.width].clone()
        case Collect():
            yield op.x, collect(get(op.x), [get(one) for one in op.others])
        case Tanh():
            yield op.x, tanh(get(op.x), op.factor)
        case Sparsify(x=columns):
            whole = get(columns.value)
            x = whole[:, columns.first : columns.first + columns.width]
            x.copy_(sparsify(x, op.multiplier, op.size, world.all_reduce))
            yield columns.value, whole
