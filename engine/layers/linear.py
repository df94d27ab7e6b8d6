"""The one projection layer: fused, divided among ranks by rows or inputs, packed for the device."""

from collections.abc import Callable

import torch
from torch import Tensor

from engine.distributed.world import World
from engine.models.parts import Linear
from engine.weights.slot import fused, slots
from kernels.linear import linear, pack

Read = Callable[[str], Tensor]


class LinearLayer:
    """y = x W^T (+ b) of one rank; split "inputs" sums the ranks' products before the bias is added."""

    weight: Tensor  # [rows, inputs] of this rank, packed
    bias: Tensor | None = None

    def __init__(self, part: Linear, path: str, world: World) -> None:
        self.part, self.path, self.world = part, path, world
        self.slots = slots(part, world)
        self._reduce = part.split == "inputs" and world.size > 1

    def load(self, read: Read, dtype: torch.dtype, device: torch.device) -> int:
        """Takes its share of the sources; returns the bytes it holds."""
        # Bound to no name here: the plain weight is freed as soon as the packed one exists.
        self.weight = pack(fused(read, self.path, "weight", self.slots, dtype, device))
        if self.part.bias:
            self.bias = fused(read, self.path, "bias", self.slots, dtype, device)
        return (self.slots.inputs + self.part.bias) * self.slots.rows * dtype.itemsize

    def __call__(self, x: Tensor) -> Tensor:
        if not self._reduce:
            return linear(x, self.weight, self.bias)
        y = self.world.all_reduce(linear(x, self.weight))
        return y if self.bias is None else y + self.bias
