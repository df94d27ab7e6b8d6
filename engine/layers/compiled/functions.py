"""Functions that make the structures of each kind of operation."""

from engine.layers.compiled import attention, embeddings, experts, latent, recurrent, rows, streams
from engine.layers.compiled.build import CompiledOps, Functions, Structures
from engine.lowering.program import Op

FUNCTIONS: Functions = {
    **attention.FUNCTIONS,
    **embeddings.FUNCTIONS,
    **experts.FUNCTIONS,
    **latent.FUNCTIONS,
    **recurrent.FUNCTIONS,
    **rows.FUNCTIONS,
    **streams.FUNCTIONS,
}


def structures(op: Op, ops: CompiledOps) -> Structures:
    """Return the structures of an operation. Raises NotImplementedError if compiled kernels lack it."""
    function = FUNCTIONS.get(type(op))
    if function is None:
        raise NotImplementedError(f"compiled kernels have no {type(op).__name__}")
    return function(op, ops)
