"""A step on its way through the operations."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.distributed.world import World
from engine.layers.batch import MediaRows
from engine.layers.kv import KVLayer
from engine.layers.loaded import LoadedWeights
from engine.layers.lora import NO_ADAPTERS, LoadedAdapters
from engine.layers.step import Step
from engine.lowering.operations import Columns, Value


@dataclass
class Run:
    """Values of a step so far, by name."""

    weights: LoadedWeights
    world: World
    kv_layers: Sequence[KVLayer]
    dtype: torch.dtype
    step: Step
    ids: Tensor  # [tokens] integers, as are positions and segments
    positions: Tensor
    segments: Tensor | None = None
    adapters: Tensor | None = None  # [tokens] int32
    spectrograms: Tensor | None = None  # [windows, mels, frames] of encoder inputs that are audio
    loaded: LoadedAdapters = NO_ADAPTERS
    media: MediaRows | None = None
    states: Tensor | None = None  # [tokens, hidden]
    values: dict[str, Tensor] = field(default_factory=dict)
    read_again: frozenset[int] = frozenset()  # layers whose keys and values later layers share
    written: dict[int, Tensor] = field(default_factory=dict)  # keys and values of this step in these layers

    def __getitem__(self, value: Value) -> Tensor:
        return self.values[value.name]

    def __setitem__(self, value: Value, tensor: Tensor) -> None:
        self.values[value.name] = tensor

    def columns(self, columns: Columns) -> Tensor:
        return self[columns.value][:, columns.first : columns.first + columns.width]


def heads(x: Tensor, head_dim: int) -> Tensor:
    """[tokens, heads · head_dim] → [tokens, heads, head_dim]."""
    return x.unflatten(-1, (-1, head_dim))
