"""Scheduling policies: they order sequences by a key. A smaller key is scheduled earlier and preempted later.

The key is (policy value, arrival). `FairPolicy` is in engine/core/fair.py.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Protocol

from engine.core.sequence import Sequence

_scheduling_key = attrgetter("scheduling_key")


class SortedQueue:
    """A list sorted by scheduling key, which is unique. The last item may be removed during iteration."""

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
        insort(self.items, sequence, key=_scheduling_key)

    def before(self, sequence: Sequence) -> int:
        """Return the number of sequences with a smaller key."""
        return bisect_left(self.items, sequence.scheduling_key, key=_scheduling_key)

    def remove(self, sequence: Sequence) -> None:
        index = bisect_left(self.items, sequence.scheduling_key, key=_scheduling_key)
        assert self.items[index] is sequence, f"{sequence.id} is not at the position of its scheduling key"
        del self.items[index]

    def sort(self) -> None:
        """Sort again after keys changed."""
        self.items.sort(key=_scheduling_key)


class Waiting(Protocol):
    def __len__(self) -> int: ...
    @property
    def first(self) -> Sequence: ...
    def add(self, sequence: Sequence) -> None: ...
    def before(self, sequence: Sequence) -> int: ...
    def remove(self, sequence: Sequence) -> None: ...


class SchedulingPolicy(Protocol):
    """Interface of a scheduling policy. Ranks of running sequences change only in `begin`, so they are constant while
    a step is planned."""

    @property
    def running(self) -> SortedQueue: ...

    @property
    def waiting(self) -> Waiting: ...

    def arrive(self, sequence: Sequence) -> None:
        """Set the key of a new sequence that is about to be queued."""

    def begin(self) -> None:
        """Start a plan: update keys."""

    def charge(self, sequences: Iterable[Sequence]) -> None:
        """Account for the rows that these sequences got."""


class FirstComeFirstServed:
    def __init__(self) -> None:
        self.running, self.waiting = SortedQueue(), SortedQueue()

    def arrive(self, sequence: Sequence) -> None:
        sequence.scheduling_key = (0, sequence.arrival)

    def begin(self) -> None:
        """Do nothing: keys never change."""

    def charge(self, sequences: Iterable[Sequence]) -> None:
        """Do nothing: service is not counted."""


class PriorityPolicy(FirstComeFirstServed):
    def arrive(self, sequence: Sequence) -> None:
        sequence.scheduling_key = (sequence.submit.priority, sequence.arrival)
