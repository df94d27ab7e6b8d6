"""Loaded LoRA adapters: stacked matrices of each projection, and the reference of their product.

A row with adapter i gets y += (x A[i]) B[i]; the scale of the adapter is part of B.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.distributed.world import World
from engine.lowering.adapters import AdapterStack, FittedAdapter
from engine.models.headers import TensorInfo
from engine.models.parts import Model
from engine.models.sources import join
from engine.weights.files import Weights
from engine.weights.slot import Slots, slots

Piece = tuple[int, int, int]  # first output, number of outputs, index of the source in `AdapterStack.sources`


@dataclass(frozen=True)
class LoraEntry:
    """The matrices of one adapter and one projection on one rank."""

    a: Tensor  # [inputs, columns]
    b: Tensor  # [rank, outputs]
    ranks: Tensor  # [sources] int32, on the CPU

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + self.b.nbytes

    def write(self, stack: AdapterStack, adapter: FittedAdapter, read: Callable[[str], Tensor], world: World) -> None:
        """Write the matrices of an adapter; the entry is zero before."""
        own = slots(stack.matrix.linear, world)
        for source, path in enumerate(stack.sources):
            if path not in adapter.modules:
                continue
            low_rank = adapter.modules[path]
            self.ranks[source] = low_rank.rank
            first = source * stack.rank
            whole = read(f"{path}.a").narrow(1, own.first_input, own.inputs)
            self.a[:, first : first + low_rank.rank] = whole.T.to(self.a.device, self.a.dtype)
            scaled = read(f"{path}.b").to(torch.float32) * low_rank.scale
            for slot in own.pieces:
                if join(stack.matrix.path, slot.source) == path:
                    taken = scaled[slot.taken].T.to(self.b.device, self.b.dtype)
                    self.b[: low_rank.rank, slot.at : slot.at + slot.rows] = taken


@dataclass(frozen=True)
class LoraLayer:
    """The adapters of one projection on one rank."""

    a: Tensor  # [adapters, inputs, columns]
    b: Tensor  # [adapters, rank, outputs]
    ranks: Tensor  # [adapters, sources] int32, on the CPU; 0: the adapter does not change the source
    pieces: tuple[Piece, ...]

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
    columns: int  # of the widest A

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
) -> LoadedAdapters:
    """Read the matrices of the adapters. Raises CheckpointError if a file cannot be read."""
    loaded = empty_adapters(stacks, world, dtype, device)
    files = [_weights(one) for one in adapters]
    for stack in stacks:
        layer = loaded.layers[stack.matrix.name]
        for number, (adapter, file) in enumerate(zip(adapters, files, strict=True)):
            layer.entry(number).write(stack, adapter, file.read, world)
            file.release()
    for file in files:
        file.close()
    return loaded


def empty_adapters(
    stacks: Sequence[AdapterStack], world: World, dtype: torch.dtype, device: torch.device
) -> LoadedAdapters:
    """Allocate the stacks, whose entries change nothing."""
    layers = {}
    for stack in stacks:
        own = slots(stack.matrix.linear, world)
        assert (own.rows, own.inputs) == (stack.outputs, stack.inputs), (
            "a rank's share of a stack is that of its matrix"
        )
        a, b = (torch.zeros(shape, dtype=dtype, device=device) for shape in stack.shapes)
        ranks = torch.zeros(stack.adapters, len(stack.sources), dtype=torch.int32)
        layers[stack.matrix.name] = LoraLayer(a, b, ranks, _pieces(stack, own))
    return LoadedAdapters(layers, max((stack.columns for stack in stacks), default=0))


def prepare_entries(
    adapter: FittedAdapter,
    stacks: Sequence[AdapterStack],
    read: Callable[[str], Tensor],
    world: World,
    dtype: torch.dtype,
) -> Mapping[str, LoraEntry]:
    """Return the entries of an adapter on the CPU, by the name of the projection's `Matrix`; none for a projection
    that it does not change."""
    entries = {}
    for stack in stacks:
        if any(path in adapter.modules for path in stack.sources):
            (_, *a), (_, *b) = stack.shapes
            ranks = torch.zeros(len(stack.sources), dtype=torch.int32)
            entry = LoraEntry(torch.zeros(a, dtype=dtype), torch.zeros(b, dtype=dtype), ranks)
            entry.write(stack, adapter, read, world)
            entries[stack.matrix.name] = entry
    return entries


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
        path = join(stack.matrix.path, slot.source)
        if path not in stack.sources:
            continue
        source = stack.sources.index(path)
        last = found[-1] if found else None
        if last is not None and last[2] == source and last[0] + last[1] == slot.at:
            found[-1] = (last[0], last[1] + slot.rows, source)
        else:
            found.append((slot.at, slot.rows, source))
    return tuple(found)
