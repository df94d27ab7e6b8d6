"""Loaded LoRA adapters: stacked matrices of each projection, and the reference of their product.

A row with adapter i gets y += (x A[i]) B[i]; the scale of the adapter is part of B.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.distributed.world import World
from engine.lowering.adapters import AdapterStack, FittedAdapter
from engine.models.sources import join
from engine.weights.files import Weights
from engine.weights.slot import Slots, slots

Piece = tuple[int, int, int]  # first output, number of outputs, index of the source in `AdapterStack.sources`


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


NO_ADAPTERS = LoadedAdapters({}, 0)


def load_adapters(
    adapters: Sequence[FittedAdapter],
    stacks: Sequence[AdapterStack],
    world: World,
    dtype: torch.dtype,
    device: torch.device,
) -> LoadedAdapters:
    """Read the matrices of the adapters. Raises CheckpointError if a file cannot be read."""
    files = [_weights(one) for one in adapters]
    layers = {stack.matrix.name: _loaded(stack, adapters, files, world, dtype, device) for stack in stacks}
    for file in files:
        file.close()
    return LoadedAdapters(layers, max((stack.columns for stack in stacks), default=0))


def _weights(adapter: FittedAdapter) -> Weights:
    infos = {
        f"{path}.{side}": info for path, one in adapter.modules.items() for side, info in (("a", one.a), ("b", one.b))
    }
    return Weights(infos, lambda fraction: None)


def _loaded(
    stack: AdapterStack,
    adapters: Sequence[FittedAdapter],
    files: Sequence[Weights],
    world: World,
    dtype: torch.dtype,
    device: torch.device,
) -> LoraLayer:
    own = slots(stack.matrix.linear, world)
    assert (own.rows, own.inputs) == (stack.outputs, stack.inputs), "a rank's share of a stack is that of its matrix"
    a, b = (torch.zeros(shape, dtype=dtype, device=device) for shape in stack.shapes)
    ranks = torch.zeros(len(adapters), len(stack.sources), dtype=torch.int32)
    pieces = _pieces(stack, own)
    for number, (adapter, file) in enumerate(zip(adapters, files, strict=True)):
        for source, path in enumerate(stack.sources):
            if path not in adapter.modules:
                continue
            low_rank = adapter.modules[path]
            ranks[number, source] = low_rank.rank
            first = source * stack.rank
            whole = file.read(f"{path}.a").narrow(1, own.first_input, own.inputs)
            a[number, :, first : first + low_rank.rank] = whole.T.to(device, dtype)
            scaled = file.read(f"{path}.b").to(torch.float32) * low_rank.scale
            for slot in own.pieces:
                if join(stack.matrix.path, slot.source) == path:
                    b[number, : low_rank.rank, slot.at : slot.at + slot.rows] = scaled[slot.taken].T.to(device, dtype)
        file.release()
    return LoraLayer(a, b, ranks, pieces)


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
