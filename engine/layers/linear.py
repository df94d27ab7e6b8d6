"""The one projection layer: fused, divided among ranks by rows or inputs, packed for what multiplies by it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.distributed.world import World
from engine.models.parts import Linear
from engine.weights.slot import fused, slots, stored_dtype
from kernels.cpu.packing import Packed, form_for
from kernels.cpu.packing import pack as pack_for
from kernels.cpu.program import Team
from kernels.linear import linear, pack

Read = Callable[[str], Tensor]


@dataclass(frozen=True)
class Target:
    """What weights are loaded for: the type of the activations, the device, and the team of compiled kernels that will
    multiply by them (None: torch does)."""

    dtype: torch.dtype
    device: torch.device
    team: Team | None = None

    def pack(self, weight: Tensor) -> Tensor | Packed:
        """weight: [outputs, inputs], of `stored` type."""
        if self.team is None:
            return pack(weight)
        return pack_for(weight, form_for(weight.dtype, self.team.variant), self.team.width)

    def stored(self, dtype: torch.dtype) -> torch.dtype:
        """The type in which a weight that the checkpoint holds in `dtype` is kept: compiled kernels widen bf16 as they
        read it, which halves the bytes and changes no number."""
        return torch.bfloat16 if self.team is not None and dtype == torch.bfloat16 else self.dtype


class LinearLayer:
    """y = x W^T (+ b) of one rank; split "inputs" sums the ranks' products before the bias is added."""

    weight: Tensor | Packed  # [rows, inputs] of this rank, packed
    bias: Tensor | None = None

    def __init__(self, part: Linear, path: str, world: World) -> None:
        self.part, self.path, self.world = part, path, world
        self.slots = slots(part, world)
        self._reduce = part.split == "inputs" and world.size > 1

    def load(self, read: Read, target: Target) -> int:
        """Takes its share of the sources; returns the bytes it holds."""
        kept = target.stored(stored_dtype(read, self.path, self.slots))
        # Bound to no name here: the plain weight is freed as soon as the packed one exists.
        self.weight = target.pack(fused(read, self.path, "weight", self.slots, kept, target.device))
        if self.part.bias:
            self.bias = fused(read, self.path, "bias", self.slots, target.dtype, target.device)
        return held_bytes(self.weight) + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        assert isinstance(self.weight, Tensor), "a compiled model multiplies by packed weights itself"
        if not self._reduce:
            return linear(x, self.weight, self.bias)
        y = self.world.all_reduce(linear(x, self.weight))
        return y if self.bias is None else y + self.bias


def held_bytes(weight: Tensor | Packed) -> int:
    return weight.data.nbytes if isinstance(weight, Packed) else weight.nbytes
