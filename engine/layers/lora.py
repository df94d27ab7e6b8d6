"""Loaded LoRA adapters: stacked matrices of each projection, and the reference of their product.

A row with adapter i gets y += (x A[i]) B[i]; the scale of the adapter is part of B.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.distributed.world import World
from engine.lowering.adapters import AdapterStack, FittedAdapter, widest_columns
from engine.lowering.operations import Matrix
from engine.models.adapters import LowRank
from engine.models.headers import TensorInfo
from engine.models.parts import Model
from engine.models.sources import join
from engine.weights.files import Weights
from engine.weights.slot import Slots, slots
from kernels.experts.schedule import EXPERT_SCHEDULE
from kernels.lora_expand import LORA_EXPAND, spans_of
from kernels.lora_shrink import LORA_SHRINK, lora_tile_rows

Piece = tuple[int, int, int]  # first output, number of outputs, index of the source in `AdapterStack.sources`


Read = Callable[[str], Tensor]


@dataclass(frozen=True)
class AdapterRows:
    """Rows of a step, grouped by adapter for Triton kernels (kernels/lora_shrink.py)."""

    pairs: Tensor
    tiles: Tensor
    tile_rows: int

    @classmethod
    def of(cls, groups: Tensor, num_groups: int) -> "AdapterRows":
        """groups: [rows, 1] int32, adapter of each row, `num_groups` for none."""
        tile_rows = lora_tile_rows(groups.numel(), num_groups)
        return cls(*EXPERT_SCHEDULE(groups, num_groups, tile_rows), tile_rows)


@dataclass(frozen=True)
class LoraEntry:
    """The matrices of one adapter and one projection on one rank."""

    a: Tensor  # [inputs, columns], of routed experts [experts, inputs, columns]
    b: Tensor  # [rank, outputs], of routed experts [experts, rank, outputs]
    ranks: Tensor  # [sources] int32, of routed experts [experts, sources]

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + self.b.nbytes

    def write(self, stack: AdapterStack, adapter: FittedAdapter, read: Read, world: World) -> None:
        """Write the matrices of an adapter; the entry is zero before."""
        matrices = stack.projection.matrices
        if not stack.routed:
            self._write(stack, matrices[0], adapter, read, world)
            return
        for number, matrix in enumerate(matrices):
            own = LoraEntry(self.a[number], self.b[number], self.ranks[number])
            own._write(stack, matrix, adapter, read, world)

    def _write(self, stack: AdapterStack, matrix: Matrix, adapter: FittedAdapter, read: Read, world: World) -> None:
        own = slots(matrix.linear, world)
        for number, source in enumerate(stack.sources):
            path = join(matrix.path, source)
            if path not in adapter.modules:
                continue
            low_rank, first = adapter.modules[path], number * stack.rank
            a, b = _read_matrices(low_rank, path, read)
            self.ranks[number] = low_rank.rank
            whole = a.narrow(1, own.first_input, own.inputs)
            self.a[:, first : first + low_rank.rank] = whole.T.to(self.a.device, self.a.dtype)
            scaled = b.to(torch.float32) * low_rank.scale
            for slot in own.pieces:
                if slot.source == source:
                    taken = scaled[slot.taken].T.to(self.b.device, self.b.dtype)
                    self.b[: low_rank.rank, slot.at : slot.at + slot.rows] = taken


@dataclass(frozen=True)
class LoraLayer:
    """The adapters of one projection on one rank."""

    a: Tensor  # [adapters, inputs, columns], of routed experts [adapters, experts, inputs, columns]
    b: Tensor  # [adapters, rank, outputs], of routed experts [adapters, experts, rank, outputs]
    ranks: Tensor  # [adapters, sources] int32, of routed experts [adapters, experts, sources]; 0: no change
    pieces: tuple[Piece, ...]
    spans: Tensor  # [spans, 3] int32, the pieces as kernels/lora_expand.py takes them

    # `ranks` and `spans` are on the host, except for Triton kernels.

    def delta(self, x: Tensor, adapters: Tensor) -> Tensor:
        """Return (x A) B of each row's adapter, [rows, outputs]; 0 for rows without one. x: [rows, inputs]; adapters:
        [rows] integers, -1 for none."""
        y = x.new_zeros(len(x), self.b.shape[2])
        rank = self.b.shape[1]
        for adapter in adapters.unique().tolist():
            if adapter < 0 or not self.ranks[adapter].any():
                continue
            rows = (adapters == adapter).nonzero().flatten()
            u = x[rows].to(self.a.dtype) @ self.a[adapter]
            for at, count, source in self.pieces:
                b = self.b[adapter, :, at : at + count]
                y[rows, at : at + count] = (u[:, source * rank : (source + 1) * rank] @ b).to(y.dtype)
        return y

    def of_expert(self, number: int) -> "LoraLayer":
        """Return the adapters of one routed expert."""
        return replace(self, a=self.a[:, number], b=self.b[:, number], ranks=self.ranks[:, number])

    @property
    def num_experts(self) -> int:
        return self.a.shape[1]

    def add(self, x: Tensor, y: Tensor, rows: AdapterRows) -> None:
        """Add (x A) B of each row's adapter to y, [rows, outputs], with Triton kernels."""
        u = LORA_SHRINK(x, self.a, rows.pairs, rows.tiles, 1, rows.tile_rows)
        LORA_EXPAND(u, self.b, self.ranks, self.spans, rows.pairs, rows.tiles, rows.tile_rows, y)

    def add_routed(self, x: Tensor, y: Tensor, rows: AdapterRows, top_k: int, scales: Tensor | None) -> None:
        """Add (x A) B of the adapter and the expert of each pair to y, [pairs, outputs], with Triton kernels. top_k:
        pairs of a row of x. scales: of the pairs, which multiply their rows of x."""
        a, b, ranks = (one.flatten(0, 1) for one in (self.a, self.b, self.ranks))
        u = LORA_SHRINK(x, a, rows.pairs, rows.tiles, top_k, rows.tile_rows)
        if scales is not None:
            u *= scales.flatten()[:, None]
        LORA_EXPAND(u, b, ranks, self.spans, rows.pairs, rows.tiles, rows.tile_rows, y)

    def entry(self, adapter: int) -> LoraEntry:
        return LoraEntry(self.a[adapter], self.b[adapter], self.ranks[adapter])

    def fill(self, adapter: int, entry: LoraEntry | None) -> None:
        """Replace an adapter, in place: compiled programs refer to the stacks. None: it changes nothing."""
        if entry is None:
            self.ranks[adapter] = 0
            return
        self.a[adapter] = entry.a
        self.b[adapter] = entry.b
        self.ranks[adapter] = entry.ranks

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """The memory that is planned."""
        return self.a, self.b


@dataclass(frozen=True)
class LoadedAdapters:
    """The adapters of a model on one rank, by the name of the projection's `Matrix`."""

    layers: Mapping[str, LoraLayer]
    columns: int  # of the widest A, except those of routed experts
    num_adapters: int = 0  # adapters, or slots for them

    def layer(self, name: str) -> LoraLayer | None:
        return self.layers.get(name)


@dataclass(frozen=True)
class AdapterSlots:
    """Slots for LoRA adapters, and what is needed to fill them."""

    model: Model
    stacks: Sequence[AdapterStack]
    loaded: LoadedAdapters
    world: World
    dtype: torch.dtype
    first: Sequence[FittedAdapter]  # adapters of the configuration


NO_ADAPTERS = LoadedAdapters({}, 0)


def load_adapters(
    adapters: Sequence[FittedAdapter],
    stacks: Sequence[AdapterStack],
    world: World,
    dtype: torch.dtype,
    device: torch.device,
    *,
    fused: bool = False,
) -> LoadedAdapters:
    """Read the matrices of the adapters. fused: for Triton kernels. Raises CheckpointError if a file cannot be read."""
    loaded = empty_adapters(stacks, world, dtype, device, fused=fused)
    files = [_weights(one) for one in adapters]
    for stack in stacks:
        layer = loaded.layers[stack.name]
        for number, (adapter, file) in enumerate(zip(adapters, files, strict=True)):
            layer.entry(number).write(stack, adapter, file.read, world)
            file.release()
    for file in files:
        file.close()
    return loaded


def empty_adapters(
    stacks: Sequence[AdapterStack], world: World, dtype: torch.dtype, device: torch.device, *, fused: bool = False
) -> LoadedAdapters:
    """Allocate the stacks, whose entries change nothing. fused: for Triton kernels."""
    layers, tables = {}, device if fused else torch.device("cpu")
    for stack in stacks:
        own = slots(stack.projection.matrices[0].linear, world)
        assert (own.rows, own.inputs) == (stack.outputs, stack.inputs), (
            "a rank's share of a stack is that of its matrix"
        )
        a, b = (torch.zeros(shape, dtype=dtype, device=device) for shape in stack.shapes)
        ranks = torch.zeros(*stack.groups, len(stack.sources), dtype=torch.int32, device=tables)
        pieces = _pieces(stack, own)
        spans = torch.tensor(spans_of(pieces), dtype=torch.int32, device=tables)
        layers[stack.name] = LoraLayer(a, b, ranks, pieces, spans)
    return LoadedAdapters(layers, widest_columns(stacks), max((stack.adapters for stack in stacks), default=0))


def prepare_entries(
    adapter: FittedAdapter,
    stacks: Sequence[AdapterStack],
    read: Read,
    world: World,
    dtype: torch.dtype,
) -> Mapping[str, LoraEntry]:
    """Return the entries of an adapter on the CPU, by the name of the projection's `Matrix`; none for a projection
    that it does not change."""
    entries = {}
    for stack in stacks:
        if any(path in adapter.modules for path in stack.paths):
            (_, *a), (_, *b) = stack.shapes
            ranks = torch.zeros(*stack.groups[1:], len(stack.sources), dtype=torch.int32)
            entry = LoraEntry(torch.zeros(a, dtype=dtype), torch.zeros(b, dtype=dtype), ranks)
            entry.write(stack, adapter, read, world)
            entries[stack.name] = entry
    return entries


def _read_matrices(low_rank: LowRank, path: str, read: Read) -> tuple[Tensor, Tensor]:
    """Return A, [rank, inputs], and B, [outputs, rank], of one projection."""
    a, b, own = read(f"{path}.a"), read(f"{path}.b"), low_rank.own
    if own is None:
        return a, b
    assert low_rank.experts is not None, "a slice is one of several experts"
    a, b = a.unflatten(0, (low_rank.experts, -1))[own.expert], b.unflatten(1, (-1, low_rank.experts))[..., own.expert]
    if own.swapped:
        a, b = b.T, a.T
    return a, b[own.first : own.first + own.outputs]


def _weights(adapter: FittedAdapter) -> Weights:
    return Weights(tensors_of(adapter), lambda fraction: None)


def tensors_of(adapter: FittedAdapter) -> dict[str, TensorInfo]:
    """Return the tensors A and B of each module, as `path.a` and `path.b`."""
    return {
        f"{path}.{side}": info for path, one in adapter.modules.items() for side, info in (("a", one.a), ("b", one.b))
    }


def _pieces(stack: AdapterStack, own: Slots) -> tuple[Piece, ...]:
    """Return the runs of outputs whose source some adapter changes; adjacent ones of a source are joined."""
    found: list[Piece] = []
    for slot in own.pieces:
        if slot.source not in stack.sources:
            continue
        source = stack.sources.index(slot.source)
        last = found[-1] if found else None
        if last is not None and last[2] == source and last[0] + last[1] == slot.at:
            found[-1] = (last[0], last[1] + slot.rows, source)
        else:
            found.append((slot.at, slot.rows, source))
    return tuple(found)
