"""Rewrites of a list of operations. Each returns a list that computes the same with fewer or other operations; an
executor applies those that it has kernels for."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from engine.lowering.operations import (
    Activation,
    Add,
    AddNormalize,
    AllReduce,
    Attend,
    Combine,
    ExpertLinear,
    Linear,
    Matrix,
    Normalize,
    PrepareKV,
    QKNorm,
    Quantized,
    Rotate,
    Route,
    ScaleQueries,
    ScaleRoutes,
    Value,
    WriteKV,
)
from engine.lowering.program import SHORTCUT, Op, Program, values_read, values_written
from engine.models.parts import RMSNorm

Ops = tuple[Op, ...]


def compiled_ops(program: Program) -> Ops:
    """Return the operations that the compiled kernels run."""
    return reduce_sums(fuse_prepare_kv(program.ops, norms=False))


def compiled_encoder(program: Program) -> tuple[Ops, Ops]:
    """Return the operations that the compiled kernels run on encoder inputs: the encoder, and then those that write the
    keys and values of cross-attention. Both are empty for a model without an encoder."""
    ops = reduce_sums(fuse_prepare_kv(program.encoder, norms=False))
    writes = [at for at, op in enumerate(ops) if isinstance(op, WriteKV)]
    begin = writes[0] - 1 if writes else len(ops)  # the first projection to keys and values
    return ops[:begin], ops[begin:]


def fuse_prepare_kv(ops: Sequence[Op], *, norms: bool) -> Ops:
    """Join the operations between a projection and its attention: rotation and writing of keys and values, and with
    `norms` also the norms of separate heads. Norms precede the rotation there, so a rotation that precedes a norm stays
    separate. Factors of queries follow."""
    made: list[Op] = []
    for op in ops:
        if isinstance(op, Attend) and not op.cross:
            prepared = PrepareKV(
                qkv=op.qkv,
                norm=None,
                rope=None,
                layer=None if op.queries_only else op.layer,
                heads=op.heads,
                kv_heads=0 if op.queries_only else op.kv_heads,
                head_dim=op.part.head_dim,
            )
            scaled = [made.pop()] if made and isinstance(made[-1], ScaleQueries) else []
            while made:
                match made[-1]:
                    case WriteKV(cross=False):
                        pass
                    case Rotate(rope=rope) if prepared.norm is None:
                        prepared = replace(prepared, rope=rope)
                    case QKNorm(separate=True) as norm if norms:
                        prepared = replace(prepared, norm=norm)
                    case _:
                        break
                made.pop()
            made += [prepared, *scaled]
        made.append(op)
    return tuple(made)


def fuse_add_normalize(ops: Sequence[Op]) -> Ops:
    """Join the addition to the residual stream with the norm that follows."""
    made: list[Op] = []
    for op in ops:
        last = made[-1] if made else None
        if isinstance(op, Normalize) and isinstance(last, Add) and last.x == op.x:
            made[-1] = AddNormalize(x=op.x, added=last.y, scale=last.scale, y=op.y, weight=op.weight)
        else:
            made.append(op)
    return tuple(made)


def reduce_sums(ops: Sequence[Op]) -> Ops:
    """Add the products of the ranks once per residual block, after the outputs of its bodies are added: between the
    bodies and the operations on their sum."""
    made: list[Op] = []
    pending: Value | None = None
    for op in ops:
        if isinstance(op, Linear | Combine) and op.reduce:
            made.append(replace(op, reduce=False))
            if op.y.name == SHORTCUT:
                made.append(AllReduce(x=op.y))
            else:
                pending = pending or op.y
            continue
        if pending is not None and _uses(op, pending) and not (isinstance(op, Add) and op.x == pending):
            made.append(AllReduce(x=pending))
            pending = None
        made.append(op)
    return tuple(made)


def quantize_outputs(
    ops: Sequence[Op], possible: Callable[[Normalize | AddNormalize | Activation, Sequence[Matrix]], bool]
) -> Ops:
    """Quantize the output of a norm or an activation if all of its readers are matrices, and it is `possible` for
    them."""
    made: list[Op] = []
    for at, op in enumerate(ops):
        if isinstance(op, Normalize | AddNormalize | Activation):
            readers = _readers(ops, at, op.y)
            matrices = [one.weight for one in readers if isinstance(one, Linear)]
            if readers and len(matrices) == len(readers) and possible(op, matrices):
                made.append(Quantized(op=op, matrices=tuple(matrices)))
                continue
        made.append(op)
    return tuple(made)


def keep_routes(program: Program) -> Program:
    """Let every layer write its selected experts to a buffer of its own, so that they can be read after the step."""
    made: list[Op] = []
    routes: list[Value] = []
    for op in program.ops:
        if isinstance(op, Route):
            routes.append(replace(op.chosen, name=f"{op.chosen.name}_{len(routes)}"))
        if isinstance(op, Route | ScaleRoutes | ExpertLinear | Combine):
            op = replace(op, chosen=routes[-1])
        made.append(op)
    return replace(program, ops=tuple(made), routes=tuple(routes))


def sums_for_norms(ops: Sequence[Op]) -> set[int]:
    """Return the ids of the projections whose sum over the ranks is read by an RMS norm after a residual add alone, so
    that the norm may complete it."""
    found: set[int] = set()
    for at, op in enumerate(ops):
        if isinstance(op, Linear) and op.reduce and not (op.partial or op.fp32):
            readers = _readers(ops, at, op.y)
            if len(readers) == 1 and isinstance(readers[0], AddNormalize) and readers[0].added == op.y:
                norm = readers[0].weight.norm
                if isinstance(norm, RMSNorm) and readers[0].x != op.y:
                    found.add(id(op))
    return found


def last_uses(ops: Sequence[Op], *kept: Value | None) -> tuple[tuple[str, ...], ...]:
    """Return for each operation the names of the buffers that nothing reads afterwards. Values in `kept` are read."""
    found: list[tuple[str, ...]] = []
    later = {value.name for value in kept if value is not None}
    for op in reversed(ops):
        read, written = ({value.name for value in of(op)} for of in (values_read, values_written))
        found.append(tuple(sorted((read | written) - later)))
        later = (later - (written - read)) | read
    return tuple(reversed(found))


def _uses(op: Op, value: Value) -> bool:
    return any(one.name == value.name for one in (*values_read(op), *values_written(op)))


def _readers(ops: Sequence[Op], at: int, value: Value) -> list[Op]:
    """Return the operations that read what operation `at` writes to `value`."""
    found: list[Op] = []
    for op in ops[at + 1 :]:
        if any(one.name == value.name for one in values_read(op)):
            found.append(op)
        if any(one.name == value.name for one in values_written(op)):
            return found
    return found
