"""Sizes and costs of a program, as sums over its operations."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from engine.lowering.operations import (
    AbsorbQueries,
    Activation,
    Attend,
    AttendLatent,
    AttendLocal,
    BlockLinear,
    Clamp,
    Combine,
    ExpandValues,
    ExpertLinear,
    ForeignDecoder,
    Gate,
    GatedNorm,
    Keep,
    Linear,
    Matrix,
    PadValues,
    Route,
    ScaleRoutes,
    SelectKeys,
    Sparsify,
    StreamOp,
)
from engine.lowering.program import Op, Program, values_read, values_written, weights_of

WHOLE_BLOCK = 16
"""Rows of a block of keys and values of bidirectional attention: a multiple of the vector width of every variant of the
compiled kernels. Rows that attend to one another begin in a new block."""


def buffer_widths(ops: Sequence[Op]) -> dict[str, int]:
    """Return the elements per token of each buffer: the largest value of that name."""
    widths: dict[str, int] = {}
    for op in ops:
        for value in (*values_written(op), *values_read(op)):
            widths[value.name] = max(value.elements, widths.get(value.name, 0))
    return widths


def torch_parts(program: Program, activations: Collection[str]) -> tuple[str, ...]:
    """Return descriptions of the operations that torch computes for the compiled kernels, most frequent first.
    activations: supported by the compiled kernels. The routed experts of a layer count as one MLP."""
    ops = (*program.encoder, *program.ops)
    acts = Counter(op.act for op in ops if isinstance(op, Activation) and op.act not in activations)
    found = tuple(f"activation {act} of {count} MLPs" for act, count in acts.most_common())
    gates = sum(isinstance(op, Gate) for op in ops)
    routes = sum(isinstance(op, Route) and op.part.scores == "sparsemixer" for op in ops)
    scaled = sum(isinstance(op, ScaleRoutes) for op in ops)
    more = {
        "gates of attention, convolutions or layer inputs": gates,
        "weightings of experts by SparseMixer": routes,
        "weightings of experts by their own numbers": scaled,
        "attention layers with small values": sum(isinstance(op, PadValues) for op in ops),
        "copies of hidden states": sum(isinstance(op, Keep) for op in ops),
        "gated norms over ranks": sum(isinstance(op, GatedNorm) and op.all_groups is not None for op in ops),
        "clamped inputs of activations": sum(isinstance(op, Clamp) for op in ops) // 2,
        "sparse activations": sum(isinstance(op, Sparsify) for op in ops),
        "operations on streams of hidden states": sum(
            isinstance(op, StreamOp) and not isinstance(op, Sparsify) for op in ops
        ),
    }
    return *found, *(f"{count} {what}" for what, count in more.items() if count)


def elements(matrix: Matrix) -> int:
    """Return the number of weights of a matrix, of all ranks."""
    return matrix.linear.inputs * sum(row.units * row.width for row in matrix.linear.rows)


def multiplied(ops: Iterable[Op]) -> int:
    """Return the number of weights that a token is multiplied by; `ops` of a program for one rank."""
    total = 0
    for op in ops:
        match op:
            case Linear(weight=weight):
                total += elements(weight)
            case ExpertLinear(matrices=matrices, top_k=top_k):
                total += top_k * elements(matrices[0])
            case AbsorbQueries(weight=weight):
                total += weight.attention.heads * weight.attention.qk_nope_head_dim * weight.attention.kv_lora_rank
            case ExpandValues(weight=weight):
                total += weight.attention.heads * weight.attention.v_head_dim * weight.attention.kv_lora_rank
            case BlockLinear(weight=weight):
                total += weight.heads * weight.size**2
            case ForeignDecoder(weight=weight):
                total += weight.foreign.parameters
    return total


def attention_operations(ops: Iterable[Op], length: int) -> int:
    """Return the operations of a token's attention at this context length: a product for each key and each value in
    reach, in latent attention of the latents, and for each key of an indexer. Self-attention and cross-attention are
    both counted with this length."""
    total = 0
    for op in ops:
        if isinstance(op, Attend | AttendLatent):
            total += 2 * reached(op, length) * op.heads * (op.key_dim + op.value_dim)
        if isinstance(op, AttendLocal):
            part = op.weight.part
            total += 2 * min(length, part.window) * 3 * part.hidden  # also of the distances
        if isinstance(op, SelectKeys):
            total += 2 * length * op.part.heads * op.part.head_dim
    return total


def attention_costs(ops: Iterable[Op]) -> tuple[tuple[int, int], ...]:
    """Return (reach, operations for each key in reach) of a token's attention, as sums over operations with the same
    reach. A reach of 0 is no limit; the sum over them is `attention_operations`."""
    costs: Counter[int] = Counter()
    for op in ops:
        if isinstance(op, Attend | AttendLatent):
            limits = [limit for limit in (op.window, op.chunk) if limit]
            if isinstance(op, AttendLatent) and op.selected is not None:
                limits.append(op.selected.width)
            costs[min(limits, default=0)] += 2 * op.heads * (op.key_dim + op.value_dim)
        if isinstance(op, SelectKeys):
            costs[0] += 2 * op.part.heads * op.part.head_dim
    return tuple(sorted(costs.items()))


def routes(program: Program) -> tuple[tuple[float, int], ...]:
    """Return (share of the experts that a token selects, number of layers)."""
    found = Counter(op.part.top_k / op.part.routed for op in program.ops if isinstance(op, Route))
    return tuple(sorted(found.items()))


def reached(op: Attend | AttendLatent, length: int) -> int:
    """Return the number of keys that a token reads at this context length."""
    selected = op.selected.width if isinstance(op, AttendLatent) and op.selected is not None else length
    return min(length, op.window or length, op.chunk or length, selected)


def touched_experts(program: Program, rows: int) -> float:
    """Return the expected share of experts selected by at least one row, for uniform routing: 1 - (1 - k/n)^rows, where
    n includes zero-computation experts."""
    parts = [op.part for op in program.ops if isinstance(op, Route)]
    shares = [1 - (1 - part.top_k / part.routed) ** rows for part in parts]
    return sum(shares) / len(shares) if shares else 0.0


def encoder_weights(program: Program) -> frozenset[str]:
    """Return the names of the weights that only encoder inputs are multiplied by."""
    named = [{weight.name for op in ops for weight in weights_of(op)} for ops in (program.encoder, program.ops)]
    return frozenset(named[0] - named[1])


def widest_input(ops: Iterable[Op]) -> tuple[int, int]:
    """Return the largest number of inputs of a matrix, or of the matrices of all heads, and the largest number of rows
    per token that are multiplied."""
    products = [op for op in ops if isinstance(op, Linear | ExpertLinear | ExpandValues | BlockLinear)]
    rows = max((op.top_k for op in products if isinstance(op, ExpertLinear)), default=1)
    return max((op.x.width for op in products), default=0), rows


def widest_sum(program: Program) -> int:
    """Return the largest number of columns that the ranks add, 0 for a single rank."""
    ops = (*program.encoder, *program.ops)
    return max((op.y.width for op in ops if isinstance(op, Linear | Combine) and op.reduce), default=0)


def largest_product(ops: Iterable[Op]) -> int:
    """Return the number of elements of the largest matrix on a rank."""
    return max((op.x.width * op.y.width for op in ops if isinstance(op, Linear | ExpertLinear)), default=0)


def attends(ops: Iterable[Op]) -> list[Attend | AttendLatent]:
    return [op for op in ops if isinstance(op, Attend | AttendLatent)]
