"""Who goes first, and who is preempted last: sequences in the order of their ranks, by policy.

A rank is (what the policy goes by, arrival); smaller is better. `Fair` is in engine/core/fair.py.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Protocol

from engine.core.sequence import Sequence

_rank = attrgetter("rank")


class SortedQueue:
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

    def before(self, sequence: Sequence) -> int:
        """How many have a better rank."""
        return bisect_left(self.items, sequence.rank, key=_rank)

    def remove(self, sequence: Sequence) -> None:
        index = bisect_left(self.items, sequence.rank, key=_rank)
        assert self.items[index] is sequence, f"{sequence.id} is not where its rank says"
        del self.items[index]

    def sort(self) -> None:
        """After ranks changed."""
        self.items.sort(key=_rank)


class Waiting(Protocol):
    def __len__(self) -> int: ...
    @property
    def first(self) -> Sequence: ...
    def add(self, sequence: Sequence) -> None: ...
    def before(self, sequence: Sequence) -> int: ...
    def remove(self, sequence: Sequence) -> None: ...


class SchedulingPolicy(Protocol):
    """What a scheduler asks of a policy. Ranks of running sequences change in `begin` alone, so within a plan they
    stand still."""

    @property
    def running(self) -> SortedQueue: ...

    @property
    def waiting(self) -> Waiting: ...

    def arrive(self, sequence: Sequence) -> None:
        """Gives a new one its rank, before it waits."""

    def begin(self) -> None:
        """A plan begins."""

    def charge(self, sequences: Iterable[Sequence]) -> None:
        """These were given rows."""


class FirstComeFirstServed:
    def __init__(self) -> None:
        self.running, self.waiting = SortedQueue(), SortedQueue()

    def arrive(self, sequence: Sequence) -> None:
        sequence.rank = (0, sequence.arrival)

    def begin(self) -> None:
        """Ranks are for ever."""

    def charge(self, sequences: Iterable[Sequence]) -> None:
        """Nobody counts."""


class PriorityPolicy(FirstComeFirstServed):
    def arrive(self, sequence: Sequence) -> None:
        sequence.rank = (sequence.submit.priority, sequence.arrival)
