"""LoRA adapters of a program: which projections they change, and the memory of their matrices on one rank.

The matrices of all adapters of a projection are stacked, so that a step may have rows of several adapters:
A: [adapters, inputs, columns] and B: [adapters, rank, outputs]. A fused projection has A of each source side by side,
`rank` columns each; a column of B has the outputs of the fused matrix. The projections of routed experts have one
stack, A: [adapters, experts, inputs, columns] and B: [adapters, experts, rank, outputs]. Independent of torch.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from engine.api.config import Dtype
from engine.api.errors import CheckpointError, ConfigError
from engine.lowering.footprint import DTYPE_BYTES, Holding
from engine.lowering.lower import lower
from engine.lowering.operations import (
    ExpertLinear,
    HeadMatrices,
    Linear,
    Matrix,
)
from engine.lowering.program import Program
from engine.models.adapters import Adapter, ExpertSlice, LowRank
from engine.models.parts import Model
from engine.models.ranks import share_of
from engine.models.sources import expert_parameters, join, sources

COLUMNS = 16  # columns of A are padded to a multiple, the widest vector of the compiled kernels
PART_INPUTS = 1024  # inputs of a part of the sums x A in Triton kernels (kernels/lora_shrink.py)
MOST_GROUPS = 2048  # adapters, or pairs of an adapter and an expert, that Triton kernels support
NESTED_ROOTS = ("", "model", "transformer", "model.language_model", "language_model.model", "language_model")


@dataclass(frozen=True)
class FittedAdapter:
    """An adapter with the modules by their paths in the checkpoint."""

    adapter: Adapter
    modules: Mapping[str, LowRank]  # by the projection's path in the checkpoint


@dataclass(frozen=True)
class Projection:
    """A projection that adapters may change, or a projection of every routed expert of a layer."""

    name: str
    matrices: tuple[Matrix, ...]  # of each expert, or one
    routed: bool
    pairs: int = 1  # rows of a token: the experts that it takes

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the tensors, the same for all matrices."""
        return tuple(dict.fromkeys(row.source for row in self.matrices[0].linear.rows))

    def paths(self, source: str) -> tuple[str, ...]:
        """Return the paths in the checkpoint of a source of each matrix."""
        return tuple(join(matrix.path, source) for matrix in self.matrices)


@dataclass(frozen=True)
class AdapterStack:
    """The stacked matrices of a projection on one rank."""

    projection: Projection
    sources: tuple[str, ...]  # those that some adapter changes
    adapters: int
    rank: int  # the largest of an adapter
    inputs: int  # of this rank
    outputs: int  # of this rank, of all sources

    @property
    def name(self) -> str:
        return self.projection.name

    @property
    def routed(self) -> bool:
        return self.projection.routed

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """Paths in the checkpoint of all sources of all matrices."""
        return tuple(path for source in self.sources for path in self.projection.paths(source))

    @property
    def columns(self) -> int:
        return -(-self.rank * len(self.sources) // COLUMNS) * COLUMNS

    @property
    def groups(self) -> tuple[int, ...]:
        """The adapters, and the experts if there are."""
        return (self.adapters, len(self.projection.matrices)) if self.routed else (self.adapters,)

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of A and B."""
        return (*self.groups, self.inputs, self.columns), (*self.groups, self.rank, self.outputs)


def fitted_adapters(model: Model, adapters: Sequence[Adapter]) -> tuple[FittedAdapter, ...]:
    """Check the adapters against the model. Raises CheckpointError for a module that the model does not have or that
    cannot be adapted, for wrong shapes, and for missing modules."""
    if not adapters:
        return ()
    problem = adapters_problem(model)
    if problem is not None:
        raise ConfigError(f"adapters: {problem}")
    fit = _Fit(model)
    return tuple(fit.fitted(adapter) for adapter in adapters)


def adapted_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Return the projections that adapters can change, by their paths in the checkpoint: [outputs, inputs]."""
    shapes = sources(model)
    paths = (path for one in _projections(lower(model)) for source in one.sources for path in one.paths(source))
    return {path: shapes[f"{path}.weight"] for path in paths}


def adapters_problem(model: Model) -> str | None:
    """Return why this kind of model cannot have adapters, or None."""
    if model.foreign is not None:
        return f"{model.foreign.architecture} is computed by transformers' code, which is served without adapters"
    if model.encoder is not None:
        return "encoder-decoder models are served without adapters"
    return None


def adapter_stacks(program: Program, adapters: Sequence[FittedAdapter], ranks: int) -> tuple[AdapterStack, ...]:
    """Return the stacks of one of `ranks` tensor-parallel ranks, in the order of the program."""
    found: dict[str, AdapterStack] = {}
    for projection in _projections(program):
        used = {
            source: [
                one.modules[path].rank for one in adapters for path in projection.paths(source) if path in one.modules
            ]
            for source in projection.sources
        }
        own = tuple(source for source, ranks_of in used.items() if ranks_of)
        if own:
            rank = max(rank for ranks_of in used.values() for rank in ranks_of)
            found[projection.name] = _stack(projection, own, len(adapters), rank, ranks)
    return tuple(found.values())


def _stack(projection: Projection, sources: tuple[str, ...], adapters: int, rank: int, ranks: int) -> AdapterStack:
    linear = projection.matrices[0].linear
    outputs = sum((_share(row.units, ranks) if linear.split == "rows" else row.units) * row.width
                  for row in linear.rows)  # fmt: skip
    inputs = _share(linear.inputs, ranks) if linear.split == "inputs" else linear.inputs
    return AdapterStack(projection, sources, adapters, rank, inputs, outputs)


def slot_stacks(program: Program, num_slots: int, max_rank: int, ranks: int) -> tuple[AdapterStack, ...]:
    """Return the stacks of one rank for any `num_slots` adapters of up to this rank, in the order of the program."""
    projections = {one.name: one for one in _projections(program)}
    return tuple(_stack(one, one.sources, num_slots, max_rank, ranks) for one in projections.values())


def adapter_groups(model: Model, adapters: Sequence[Adapter], slots: tuple[int, int] | None) -> int:
    """Return the largest number of matrices of a stack. slots: number and largest rank of slots, if adapters move."""
    if not adapters and slots is None:
        return 0
    program = lower(model)
    found = adapter_stacks(program, fitted_adapters(model, adapters), 1) if slots is None else ()
    stacks = found if slots is None else slot_stacks(program, *slots, 1)
    return max((math.prod(stack.groups) for stack in stacks), default=0)


def check_groups(stacks: Sequence[AdapterStack]) -> None:
    """Raise ConfigError for stacks of more matrices than Triton kernels support."""
    most = max((math.prod(stack.groups) for stack in stacks), default=0)
    if most > MOST_GROUPS:
        raise ConfigError(
            f"adapters: {most:,} pairs of an adapter and an expert, and Triton kernels support up to {MOST_GROUPS:,}; "
            "use fewer adapters or slots, or set hardware.kernels to torch"
        )


def check_ranks(adapter: Adapter, max_rank: int) -> None:
    """Raise CheckpointError for an adapter whose rank is too large for the slots."""
    if adapter.rank > max_rank:
        raise CheckpointError(
            f"adapter {adapter.name} ({adapter.path}): has rank {adapter.rank}, and slots hold up to {max_rank}: raise "
            "adapter_loading.max_rank"
        )


def slot_holdings(model: Model, num_slots: int, max_rank: int, ranks: int, dtype: Dtype) -> tuple[Holding, ...]:
    """Return the memory of the slots on one rank."""
    size, found = DTYPE_BYTES[dtype], []
    for stack in slot_stacks(lower(model, ranks), num_slots, max_rank, ranks):
        for side, shape in zip("AB", stack.shapes, strict=True):
            found.append(Holding("adapters", f"{stack.name} (lora_{side})", dtype, (*shape, size)))
    return tuple(found)


def adapter_holdings(model: Model, adapters: Sequence[FittedAdapter], ranks: int, dtype: Dtype) -> tuple[Holding, ...]:
    """Return the memory of the adapters on one rank, in loading order."""
    size, found = DTYPE_BYTES[dtype], []
    for stack in adapter_stacks(lower(model, ranks), adapters, ranks) if adapters else ():
        modules = [one.modules[path] for one in adapters for path in stack.paths if path in one.modules]
        # A and B of one module are converted and scaled in float32.
        temporary = max(8 * one.rank * (one.inputs + one.outputs) for one in modules)
        tensors = {(info.file, info.offset): info.bytes for one in modules for info in (one.a, one.b)}
        read = sum(tensors.values())
        for side, shape in zip("AB", stack.shapes, strict=True):
            name = f"{stack.name} (lora_{side})"
            found.append(Holding("adapters", name, dtype, (*shape, size), temporary=temporary, read=read))
    return tuple(found)


def widest_columns(stacks: Sequence[AdapterStack]) -> int:
    """Return the largest number of columns of A: elements per token of the buffer for x A; 0 without adapters. Products
    of routed experts need no buffer."""
    return max((stack.columns for stack in stacks if not stack.routed), default=0)


def widest_parts(stacks: Sequence[AdapterStack]) -> int:
    """Return the most float32 numbers per token of x A in Triton kernels, which keep the parts of a sum."""
    sizes = (stack.projection.pairs * -(-stack.inputs // PART_INPUTS) * stack.columns for stack in stacks)
    return max(sizes, default=0)


def _share(units: int, ranks: int) -> int:
    found = share_of(units, 0, ranks)
    assert found is not None, "the ranks of a program divide its rows"
    return found[1]


def _projections(program: Program) -> Iterator[Projection]:
    for op in program.ops:
        match op:
            case Linear(fp32=False, weight=weight):
                yield Projection(weight.name, (weight,), routed=False)
            case ExpertLinear(matrices=matrices, top_k=top_k):
                yield Projection(op.stack, matrices, routed=True, pairs=top_k)


def _refused(program: Program) -> Iterator[tuple[str, str]]:
    """Yield the projections that cannot be adapted, each with the reason."""
    for op in program.ops:
        match op:
            case Linear(fp32=True, weight=weight):
                yield from ((join(weight.path, row.source), "it is a router of experts") for row in weight.linear.rows)
        for parts in (value for value in vars(op).values() if isinstance(value, HeadMatrices)):
            yield parts.name, "it is multiplied in parts that cannot be adapted"


class _Fit:
    """The projections of a model, which adapters are compared with."""

    def __init__(self, model: Model) -> None:
        self.model, program = model, lower(model)
        self.allowed, self.refused = adapted_shapes(model), dict(_refused(program))
        routed = (one for one in _projections(program) if one.routed)
        self.routed = frozenset(path for one in routed for source in one.sources for path in one.paths(source))
        self.parameters = expert_parameters(model)
        names = (*self.allowed, *self.refused, *self.parameters)
        self.tails = {name.removeprefix(f"{model.root}."): name for name in names}

    def fitted(self, adapter: Adapter) -> FittedAdapter:
        found: dict[str, LowRank] = {}
        where = f"adapter {adapter.name} ({adapter.path})"
        for module, low_rank in adapter.modules.items():
            name = self._name(module)
            if name in self.refused:
                why = f"{self.refused[name]}, merge the adapter into the checkpoint"
                raise CheckpointError(f"{where}: changes {module}; {why}")
            if name is None or (name in self.parameters) != (low_rank.experts is not None):
                raise CheckpointError(f"{where}: changes {module}; {_unknown(self.model, module)}")
            own = self._of_each_expert(name, low_rank) if name in self.parameters else {name: low_rank}
            for path, one in own.items():
                self._check_shape(f"{where}: {module}", path, one)
            found |= own
        for path in self._targets(adapter, found):
            raise CheckpointError(
                f"{where}: lacks the tensors of {path}, which target_modules names; save the adapter again"
            )
        return FittedAdapter(adapter, found)

    def _name(self, module: str) -> str | None:
        """Return the name in the model of a module of an adapter."""
        own = {self.model.root, *NESTED_ROOTS}
        return next((self.tails[tail] for root, tail in _cuts(module) if root in own and tail in self.tails), None)

    def _of_each_expert(self, parameter: str, low_rank: LowRank) -> dict[str, LowRank]:
        """Return the matrices of each projection of each expert, by their paths."""
        pieces = self.parameters[parameter]
        outputs, inputs = max(first + size for _, first, size in pieces), self.allowed[pieces[0][0]][1]
        swapped = (low_rank.b.shape[0], low_rank.a.shape[1]) == (inputs, outputs) and inputs != outputs
        each = len(pieces) // len({first for _, first, _ in pieces})
        if low_rank.experts != each:
            return {path: low_rank for path, *_ in pieces[:1]}  # of another shape, which is refused
        names = list(dict.fromkeys(path.rpartition(".")[0] for path, *_ in pieces))
        return {
            path: replace(low_rank, own=ExpertSlice(names.index(path.rpartition(".")[0]), first, size, swapped))
            for path, first, size in pieces
        }

    def _check_shape(self, what: str, path: str, low_rank: LowRank) -> None:
        outputs, inputs = self.allowed[path]
        whole = low_rank.a.shape[1] if low_rank.own is not None and low_rank.own.swapped else low_rank.b.shape[0]
        fits = low_rank.own is None or low_rank.own.first + low_rank.own.outputs <= whole
        if low_rank.experts is not None and low_rank.own is None:
            fits = False
        if (low_rank.outputs, low_rank.inputs) != (outputs, inputs) or not fits:
            raise CheckpointError(
                f"{what} has lora_A {list(low_rank.a.shape)} and lora_B {list(low_rank.b.shape)}, but the "
                f"model's matrix is [{outputs}, {inputs}]; is the adapter of another model?"
            )

    def _targets(self, adapter: Adapter, found: Mapping[str, LowRank]) -> Iterator[str]:
        """Yield the projections that lack tensors. An adapter that PEFT has trained for experts as parameters has none
        for the projections of experts."""
        experts = any(path in self.routed for path in found)
        for path in self.allowed:
            if path not in found and (experts or path not in self.routed) and adapter.targets_module(path):
                yield path


def _cuts(module: str) -> Iterator[tuple[str, str]]:
    """Yield a module's name, cut at each dot and before the first part: (before, after)."""
    names = module.split(".")
    return ((".".join(names[:at]), ".".join(names[at:])) for at in range(len(names)))


def _unknown(model: Model, module: str) -> str:
    last = module.rpartition(".")[2]
    if model.head is not None and last == model.head.name.rpartition(".")[2]:
        return "adapters of the head are not supported, merge the adapter into the checkpoint"
    if last == model.embed.name.rpartition(".")[2]:
        return "adapters of embeddings are not supported, merge the adapter into the checkpoint"
    if any(part in module for part in ("vision", "visual", "audio", "projector")):
        return "only the text decoder is served, and this module is outside of it"
    return "the model has no such projection; is the adapter of another model?"
