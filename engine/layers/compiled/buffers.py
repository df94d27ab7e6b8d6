"""Buffers of a step, which all layers share."""

import torch
from torch import Tensor

from engine.lowering.operations import Value
from kernels.cpu.memory import HUGE, region

ALIGNED = 16  # numbers of a cache line
LOW_RANK = "low_rank_of_adapters"  # buffer of x A


def allocated(count: int) -> Tensor:
    """Return `count` float32 numbers, uninitialized: in large pages unless they would not fill one."""
    size = 4 * count
    return torch.empty(count) if size < HUGE else region(size)[:size].view(torch.float32)


class Buffers:
    """Buffers of a step: float32, by name, with room for the widest value. Reallocated when a step has more tokens.
    They are in large pages: a piece of a product writes a few numbers to each of many rows, which lie pages apart."""

    def __init__(self, widths: dict[str, int]) -> None:
        self.widths = widths  # elements per token
        self.tensors: dict[str, Tensor] = {}

    def make(self, tokens: int) -> None:
        self.tensors = {}  # freed first
        sizes = {name: -(-tokens * width // ALIGNED) * ALIGNED for name, width in self.widths.items()}
        room = allocated(sum(sizes.values()))
        self.tensors = {
            name: part[: tokens * self.widths[name]]
            for name, part in zip(sizes, room.split(list(sizes.values())), strict=True)
        }
        self.tokens = tokens

    def __getitem__(self, value: Value) -> Tensor:
        """Return the value's rows, [tokens · rows, width], contiguous."""
        return self.tensors[value.name][: self.tokens * value.elements].view(-1, value.width)


def heads(x: Tensor, heads: int) -> Tensor:
    """[tokens, heads · dim] → [tokens, heads, dim]."""
    return x.unflatten(1, (heads, -1))
