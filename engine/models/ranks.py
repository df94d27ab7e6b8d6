"""Division of a declared model among tensor-parallel ranks, and the possible numbers of ranks. Independent of torch.

Divided are heads, the intermediate size of MLPs and experts, and the vocabulary (whose shares may differ by one row).
There may be fewer KV heads, or groups of a Mamba-2 mixer, than ranks; then several ranks have copies of one. Layers
load the same shares (engine/distributed/world.py) that plans count (engine/lowering/footprint.py).
"""

from collections.abc import Iterator

from engine.api.errors import ConfigError
from engine.formats.native import Executor
from engine.models.parts import (
    MLP,
    Attention,
    Experts,
    LatentAttention,
    Model,
    Recurrent,
    Rows,
    all_bodies,
    encoder_bodies,
)
from engine.models.quantized import Quantization
from engine.models.sources import join, projections
from engine.models.stored import matrix_roles

MAX_RANKS = 64
COPIED = (
    "KV heads",
    "key heads",
    "groups of a mixer's heads",
)  # if they are fewer than ranks, several ranks have the same one


def share_of(units: int, rank: int, ranks: int) -> tuple[int, int] | None:
    """Return the first unit and the number of units of a rank, or None if they cannot be divided evenly. If there are
    fewer units than ranks, several ranks have copies of a unit."""
    if units >= ranks and units % ranks == 0:
        return rank * (units // ranks), units // ranks
    if units < ranks and ranks % units == 0:
        return rank * units // ranks, 1
    return None


def shared_units(units: int, rank: int, ranks: int, what: str) -> tuple[int, int]:
    """Return `share_of`. Raises ConfigError if the units cannot be divided; what: their name in the message."""
    found = share_of(units, rank, ranks)
    if found is None:
        possible = ", ".join(str(size) for size in range(1, units + 1) if units % size == 0)
        raise ConfigError(f"{ranks} ranks cannot share {units} {what}; use one of {possible} ranks")
    return found


def row_runs(piece: Rows, first: int, units: int) -> Iterator[tuple[int, int]]:
    """Yield the runs of rows, `step` rows apart, that contain these units of a piece: first row in the tensor, and
    number of rows."""
    each = piece.stored // piece.groups
    while units > 0:
        group, within = divmod(first % piece.stored, each)
        count = min(units, each - within)
        yield piece.at + group * piece.stride + within * piece.width * piece.step, count * piece.width
        first, units = first + count, units - count


def rows_of(vocab: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return the first row and the number of rows of embedding and head; shares differ by at most one row."""
    first = rank * vocab // ranks
    return first, (rank + 1) * vocab // ranks - first


def tensor_problem(
    model: Model, quantization: Quantization | None, size: int, executor: Executor = "torch"
) -> str | None:
    """Return why this many ranks cannot share the model, or None. executor: may multiply by the checkpoint's numbers,
    whose groups or blocks of inputs cannot be divided."""
    if size == 1:
        return None
    for units, what in dict.fromkeys(_units(model)):
        if not shares(units, what, size):
            return f"{size} ranks cannot share {units} {what}"
    if model.embed.vocab < size:
        return f"{size} ranks cannot share a vocabulary of {model.embed.vocab}"
    return None if quantization is None else next(_split_problems(model, quantization, size, executor), None)


def tensor_sizes(model: Model, quantization: Quantization | None, executor: Executor = "torch") -> tuple[int, ...]:
    """Return every number of ranks that can share the model, including 1."""
    sizes = range(1, MAX_RANKS + 1)
    return tuple(size for size in sizes if tensor_problem(model, quantization, size, executor) is None)


def _units(model: Model) -> Iterator[tuple[int, str]]:
    for body in (*encoder_bodies(model), *all_bodies(model)):
        match body:
            case Attention():
                yield body.heads, "heads"
                yield body.kv_heads, "KV heads"
            case Recurrent():
                yield from body.units()
            case LatentAttention():
                yield body.heads, "heads"
            case MLP():
                yield body.intermediate_size, "inner values of an MLP"
            case Experts():
                yield body.intermediate_size, "inner values of an expert"
                if body.shared is not None:
                    yield body.shared.intermediate_size, "inner values of a shared expert"


def shares(units: int, what: str, size: int) -> bool:
    """Return whether this many ranks can share the units of this name."""
    return units % size == 0 or (what in COPIED and share_of(units, 0, size) is not None)


def _split_problems(model: Model, quantization: Quantization, size: int, executor: Executor) -> Iterator[str]:
    roles = matrix_roles(model)
    for path, linear in projections(model):
        if linear.split != "inputs":
            continue
        paths = tuple(join(path, piece.source) for piece in linear.rows)
        native = quantization.native(paths, executor)
        if native is None or any(roles.get(one, "projection") not in native.roles(executor) for one in paths):
            continue  # dequantized before it is divided
        problem = native.split_problem(linear.inputs, size)
        if problem is not None:
            yield f"{paths[0]} {problem}"
