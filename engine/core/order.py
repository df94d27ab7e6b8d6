"""Sequences in the order of their ranks."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from engine.core.sequence import Sequence

_rank = attrgetter("rank")


class Ranked:
    """A list kept sorted by rank; ranks are unique. Removing the last one while iterating is allowed."""

    __slots__ = ("items",)

    def __init__(self) -> None:
        self.items: list[Sequence] = []

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.items)

    @property
    def first(self) -> Sequence:
        return self.items[0]

    @property
    def last(self) -> Sequence:
        return self.items[-1]

    def add(self, sequence: Sequence) -> None:
        insort(self.items, sequence, key=_rank)

    def before(self, rank: tuple[int, int]) -> int:
        """How many have a better one."""
        return bisect_left(self.items, rank, key=_rank)

    def remove(self, sequence: Sequence) -> None:
        index = bisect_left(self.items, sequence.rank, key=_rank)
        assert self.items[index] is sequence, f"{sequence.id} is not where its rank says"
        del self.items[index]
