"""The ranks that share one model, as a value that is passed to whatever needs it. No process group is global here."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.api.errors import ConfigError
from engine.models.ranks import share_of


class World(Protocol):
    """`size` ranks hold shares of each matrix; this is number `rank`."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of x over all ranks; x may be overwritten."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """[size, ...]: x of every rank, which must have equal shapes."""
        ...


@dataclass(frozen=True)
class Single:
    """One rank that holds everything."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x.unsqueeze(0)


SINGLE = Single()


def least(world: World, number: int, device: torch.device) -> int:
    """The smallest of what the ranks have; all of them ask together."""
    return int(world.all_gather(torch.tensor([number], device=device)).min())


def share(units: int, world: World, what: str) -> tuple[int, int]:
    """First unit and number of units of this rank. Fewer units than ranks are replicated. Raises ConfigError where the
    ranks cannot share evenly."""
    found = share_of(units, world.rank, world.size)
    if found is None:
        raise ConfigError(
            f"{world.size} ranks cannot share {units} {what}; use one of {', '.join(map(str, divisors(units)))} ranks"
        )
    return found


def divisors(units: int) -> list[int]:
    return [size for size in range(1, units + 1) if units % size == 0]
