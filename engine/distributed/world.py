"""The ranks that share one model, as a value that is passed explicitly. There is no global process group."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.models.ranks import shared_units


class World(Protocol):
    """A group of `size` ranks, each of which has a share of every matrix; this is rank `rank`."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of x over all ranks; x may be overwritten."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """Return [size, ...]: x of every rank. Shapes must be equal."""
        ...


@dataclass(frozen=True)
class Single:
    """A single rank that has the entire model."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x.unsqueeze(0)


SINGLE = Single()


def least(world: World, number: int, device: torch.device) -> int:
    """Return the minimum over all ranks. All ranks must call this."""
    return int(world.all_gather(torch.tensor([number], device=device)).min())


def share(units: int, world: World, what: str) -> tuple[int, int]:
    """Return the first unit and the number of units of this rank. If there are fewer units than ranks, they are
    replicated. Raises ConfigError if the units cannot be divided evenly."""
    return shared_units(units, world.rank, world.size, what)
