"""Fair scheduling: the owner with the least service is scheduled first.

Virtual token counters (Sheng et al., Fairness in Serving Large Language Models, OSDI 2024, algorithm 2). The counter of
an owner is the number of prompt and reply tokens computed for it, divided by its share. Tokens from the prefix cache
and
tokens recomputed after a preemption are free. For owners that always have queued requests, the counters differ by at
most the size of a batch. The policy is work-conserving: while one owner is idle, the others get the entire engine. An
idle owner does not accumulate credit: when a request arrives and its owner has no other queued request, its counter is
raised to the minimum of the owners with queued requests, or, if there are none, to that of the last one that had any.

Counters change only when tokens are computed for the first time and when requests arrive, and no token is computed for
the first time twice. Between such events keys are constant and the sequence with the smallest key is never preempted,
so every request eventually ends.
"""

from collections.abc import Iterable

from engine.core.policies import SortedQueue
from engine.core.sequence import Sequence


class OwnerQueues:
    """Queued sequences, one queue per owner, each in order of arrival. `served`: tokens by owner."""

    def __init__(self, served: dict[str, float]) -> None:
        self._served = served
        self._queues: dict[str, SortedQueue] = {}
        self._count = 0
        self.left: str | None = None  # owner of the sequence that was removed last

    def __len__(self) -> int:
        return self._count

    def __contains__(self, owner: str) -> bool:
        return owner in self._queues

    @property
    def first(self) -> Sequence:
        return min((queue.first for queue in self._queues.values()), key=self._place)

    def least(self) -> float:
        """Return the smallest counter of the owners with queued sequences, else that of the last such owner."""
        if self._queues:
            return min(self._served[owner] for owner in self._queues)
        return 0 if self.left is None else self._served[self.left]

    def add(self, sequence: Sequence) -> None:
        sequence.scheduling_key = (0, sequence.arrival)
        self._queues.setdefault(sequence.owner, SortedQueue()).add(sequence)
        self._count += 1

    def before(self, sequence: Sequence) -> int:
        """Return a lower bound of the sequences before this one: earlier ones of its owner, and one of each owner with
        less service."""
        own = self._queues.get(sequence.owner)
        place = self._place(sequence)
        better = [queue for owner, queue in self._queues.items() if owner != sequence.owner]
        ahead = sum(self._place(queue.first) < place for queue in better)
        return ahead + (0 if own is None else own.before(sequence))

    def remove(self, sequence: Sequence) -> None:
        queue = self._queues[sequence.owner]
        queue.remove(sequence)
        self._count -= 1
        self.left = sequence.owner
        if not len(queue):
            del self._queues[sequence.owner]

    def _place(self, sequence: Sequence) -> tuple[float, int]:
        return self._served[sequence.owner], sequence.arrival


class FairPolicy:
    """Fair shares by owner. `served` keeps an entry for every owner, because there are few API keys."""

    def __init__(self) -> None:
        self.served: dict[str, float] = {}
        self.running, self.waiting = SortedQueue(), OwnerQueues(self.served)

    def arrive(self, sequence: Sequence) -> None:
        sequence.scheduling_key = (0, sequence.arrival)
        owner = sequence.owner
        if owner not in self.waiting:
            self.served[owner] = max(self.served.get(owner, 0), self.waiting.least())

    def begin(self) -> None:
        for sequence in self.running.items:
            sequence.scheduling_key = (self.served[sequence.owner], sequence.arrival)
        self.running.sort()

    def charge(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            first_time = sequence.computed - sequence.charged
            if first_time > 0:
                self.served[sequence.owner] += first_time / sequence.share
                sequence.charged = sequence.computed
