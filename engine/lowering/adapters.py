"""LoRA adapters of a program: which projections they change, and the memory of their matrices on one rank.

The matrices of all adapters of a projection are stacked, so that a step may have rows of several adapters:
A: [adapters, inputs, columns] and B: [adapters, rank, outputs]. A fused projection has A of each source side by side,
`rank` columns each; a column of B has the outputs of the fused matrix. Independent of torch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from engine.api.config import Dtype
from engine.api.errors import CheckpointError, ConfigError
from engine.lowering.footprint import DTYPE_BYTES, Holding
from engine.lowering.lower import lower
from engine.lowering.program import ExpertLinear, HeadMatrices, Linear, Matrix, Program
from engine.models.adapters import Adapter, LowRank
from engine.models.parts import Model
from engine.models.ranks import share_of
from engine.models.sources import join, sources

COLUMNS = 16  # columns of A are padded to a multiple, the widest vector of the compiled kernels
NESTED_ROOTS = ("", "model", "transformer", "model.language_model", "language_model.model", "language_model")


@dataclass(frozen=True)
class FittedAdapter:
    """An adapter with the modules by their paths in the checkpoint."""

    adapter: Adapter
    modules: Mapping[str, LowRank]  # by the projection's path in the checkpoint


@dataclass(frozen=True)
class AdapterStack:
    """The stacked matrices of a projection on one rank."""

    matrix: Matrix
    sources: tuple[str, ...]  # checkpoint paths of the sources that some adapter changes
    adapters: int
    rank: int  # the largest of an adapter
    inputs: int  # of this rank
    outputs: int  # of this rank, of all sources

    @property
    def columns(self) -> int:
        return -(-self.rank * len(self.sources) // COLUMNS) * COLUMNS

    @property
    def shapes(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Shapes of A and B."""
        return (self.adapters, self.inputs, self.columns), (self.adapters, self.rank, self.outputs)


def fitted_adapters(model: Model, adapters: Sequence[Adapter]) -> tuple[FittedAdapter, ...]:
    """Check the adapters against the model. Raises CheckpointError for a module that the model does not have or that
    cannot be adapted, for wrong shapes, and for missing modules."""
    if not adapters:
        return ()
    problem = adapters_problem(model)
    if problem is not None:
        raise ConfigError(f"adapters: {problem}")
    allowed, refused = adapted_shapes(model), dict(_refused(lower(model)))
    return tuple(_fitted(model, adapter, allowed, refused) for adapter in adapters)


def adapted_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Return the projections that adapters can change, by their paths in the checkpoint: [outputs, inputs]."""
    shapes = sources(model)
    return {path: shapes[f"{path}.weight"] for path in _paths(lower(model))}


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
    for matrix in _matrices(program):
        paths = dict.fromkeys(join(matrix.path, row.source) for row in matrix.linear.rows)
        own = tuple(path for path in paths if any(path in one.modules for one in adapters))
        if not own:
            continue
        rank = max(one.modules[path].rank for one in adapters for path in own if path in one.modules)
        found[matrix.name] = _stack(matrix, own, len(adapters), rank, ranks)
    return tuple(found.values())


def _stack(matrix: Matrix, sources: tuple[str, ...], adapters: int, rank: int, ranks: int) -> AdapterStack:
    linear = matrix.linear
    outputs = sum((_share(row.units, ranks) if linear.split == "rows" else row.units) * row.width
                  for row in linear.rows)  # fmt: skip
    inputs = _share(linear.inputs, ranks) if linear.split == "inputs" else linear.inputs
    return AdapterStack(matrix, sources, adapters, rank, inputs, outputs)


def slot_stacks(program: Program, num_slots: int, max_rank: int, ranks: int) -> tuple[AdapterStack, ...]:
    """Return the stacks of one rank for any `num_slots` adapters of up to this rank, in the order of the program."""
    found: dict[str, AdapterStack] = {}
    for matrix in _matrices(program):
        sources = tuple(dict.fromkeys(join(matrix.path, row.source) for row in matrix.linear.rows))
        found[matrix.name] = _stack(matrix, sources, num_slots, max_rank, ranks)
    return tuple(found.values())


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
            found.append(Holding("adapters", f"{stack.matrix.name} (lora_{side})", dtype, (*shape, size)))
    return tuple(found)


def adapter_holdings(model: Model, adapters: Sequence[FittedAdapter], ranks: int, dtype: Dtype) -> tuple[Holding, ...]:
    """Return the memory of the adapters on one rank, in loading order."""
    size, found = DTYPE_BYTES[dtype], []
    for stack in adapter_stacks(lower(model, ranks), adapters, ranks) if adapters else ():
        modules = [one.modules[path] for one in adapters for path in stack.sources if path in one.modules]
        # A and B of one module are converted and scaled in float32.
        temporary = max(8 * one.rank * (one.a.shape[1] + one.b.shape[0]) for one in modules)
        read = sum(one.a.bytes + one.b.bytes for one in modules)
        for side, shape in zip("AB", stack.shapes, strict=True):
            name = f"{stack.matrix.name} (lora_{side})"
            found.append(Holding("adapters", name, dtype, (*shape, size), temporary=temporary, read=read))
    return tuple(found)


def widest_columns(stacks: Sequence[AdapterStack]) -> int:
    """Return the largest number of columns of A: elements per token of the buffer for x A; 0 without adapters."""
    return max((stack.columns for stack in stacks), default=0)


def _share(units: int, ranks: int) -> int:
    found = share_of(units, 0, ranks)
    assert found is not None, "the ranks of a program divide its rows"
    return found[1]


def _matrices(program: Program) -> Iterator[Matrix]:
    return (op.weight for op in program.ops if isinstance(op, Linear) and not op.fp32)


def _paths(program: Program) -> Iterator[str]:
    for matrix in _matrices(program):
        yield from (join(matrix.path, row.source) for row in matrix.linear.rows)


def _refused(program: Program) -> Iterator[tuple[str, str]]:
    """Yield the projections that cannot be adapted, each with the reason."""
    for op in program.ops:
        match op:
            case Linear(fp32=True, weight=weight):
                yield from ((join(weight.path, row.source), "it is a router of experts") for row in weight.linear.rows)
            case ExpertLinear(matrices=matrices):
                for matrix in matrices:
                    for row in matrix.linear.rows:
                        yield join(matrix.path, row.source), "adapters of routed experts are not supported"
        for parts in (value for value in vars(op).values() if isinstance(value, HeadMatrices)):
            yield parts.name, "it is multiplied in parts that cannot be adapted"


def _fitted(
    model: Model, adapter: Adapter, allowed: Mapping[str, tuple[int, ...]], refused: Mapping[str, str]
) -> FittedAdapter:
    own = {model.root, *NESTED_ROOTS}
    tails = {path.removeprefix(f"{model.root}."): path for path in (*allowed, *refused)}
    found: dict[str, LowRank] = {}
    for module, low_rank in adapter.modules.items():
        path = next((tails[tail] for root, tail in _cuts(module) if root in own and tail in tails), None)
        where = f"adapter {adapter.name} ({adapter.path})"
        if path is None:
            raise CheckpointError(f"{where}: changes {module}; {_unknown(model, module)}")
        if path in refused:
            raise CheckpointError(f"{where}: changes {module}; {refused[path]}, merge the adapter into the checkpoint")
        outputs, inputs = allowed[path]
        if low_rank.a.shape[1] != inputs or low_rank.b.shape[0] != outputs:
            raise CheckpointError(
                f"{where}: {module} has lora_A {list(low_rank.a.shape)} and lora_B {list(low_rank.b.shape)}, but the "
                f"model's matrix is [{outputs}, {inputs}]; is the adapter of another model?"
            )
        found[path] = low_rank
    for path in allowed:
        if path not in found and adapter.targets_module(path):
            raise CheckpointError(
                f"adapter {adapter.name} ({adapter.path}): lacks the tensors of {path}, which target_modules names; "
                "save the adapter again"
            )
    return FittedAdapter(adapter, found)


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
