"""Into how many ranks a declared model can be cut, and how much of it one of them holds. Free of torch.

Cut are heads, the inner size of MLPs and of every expert, and the vocabulary (whose shares may differ by a row). KV
heads may be fewer than the ranks: then several ranks hold the same one. engine.distributed.world.share cuts by the same
rule when the model is loaded.
"""

from collections.abc import Iterator
from fractions import Fraction

from engine.models.parts import MLP, Attention, Experts, Linear, Model, all_bodies
from engine.models.schemes import Quantization, alike
from engine.models.sources import projections

MOST_RANKS = 64


def tensor_problem(model: Model, quantization: Quantization | None, size: int, *, compiled: bool) -> str | None:
    """Why this many ranks cannot share the model, or None. `compiled`: kernels multiply by the checkpoint's whole
    numbers, whose groups of inputs cannot be cut."""
    if size == 1:
        return None
    for units, what in dict.fromkeys(_units(model)):
        if units % size and not (what == "KV heads" and size % units == 0):
            return f"{size} ranks cannot share {units} {what}"
    if model.embed.vocab < size:
        return f"{size} ranks cannot share a vocabulary of {model.embed.vocab}"
    if compiled and quantization is not None:
        return next(_cut_groups(model, quantization, size), None)
    return None


def tensor_sizes(model: Model, quantization: Quantization | None, *, compiled: bool) -> tuple[int, ...]:
    """Every number of ranks that can share the model, 1 among them."""
    return tuple(
        size
        for size in range(1, MOST_RANKS + 1)
        if tensor_problem(model, quantization, size, compiled=compiled) is None
    )


def rank_share(model: Model, size: int) -> Fraction:
    """Of the numbers of all weights: what one of so many ranks holds, at most. Norms, routers, sinks and biases behind
    a sum over ranks are held whole by each; KV heads that are fewer than the ranks, by several."""
    return Fraction(_held(model, size), _held(model, 1))


def _units(model: Model) -> Iterator[tuple[int, str]]:
    for body in all_bodies(model):
        match body:
            case Attention():
                yield body.heads, "heads"
                yield body.kv_heads, "KV heads"
            case MLP():
                yield body.inner, "inner values of an MLP"
            case Experts():
                yield body.inner, "inner values of an expert"
                if body.shared is not None:
                    yield body.shared.inner, "inner values of a shared expert"


def _cut_groups(model: Model, quantization: Quantization, size: int) -> Iterator[str]:
    for path, linear in projections(model):
        schemes = [quantization.schemes.get(f"{path}.{piece.source}") for piece in linear.rows]
        scheme = schemes[0]
        if linear.split != "inputs" or scheme is None or not alike(schemes):
            continue
        name, inputs = f"{path}.{linear.rows[0].source}", linear.inputs // size
        if scheme.ordered:
            yield f"{name} groups its inputs in an order of its own (act order), which {size} ranks would cut"
        elif scheme.group is not None and inputs % scheme.group:
            yield f"{size} ranks would each get {inputs} inputs of {name}, no multiple of its groups of {scheme.group}"


def _held(model: Model, size: int) -> int:
    """Numbers that the first of so many ranks holds."""
    vocabularies = 1 if model.head.tied else 2
    total = vocabularies * -(-model.embed.vocab // size) * model.embed.hidden
    for _, linear in projections(model):
        total += _linear_held(linear, size)
    hidden = model.embed.hidden
    norms = sum((branch.before is not None) + (branch.after is not None) for block in model.blocks for branch in block)
    return total + (norms + (model.norm is not None)) * hidden


def _linear_held(linear: Linear, size: int) -> int:
    rows = sum(piece.units * piece.width for piece in linear.rows)
    if linear.split == "rows":
        rows = sum(-(-piece.units // size) * piece.width for piece in linear.rows)
    inputs = linear.inputs // size if linear.split == "inputs" else linear.inputs
    return rows * (inputs + linear.bias)
