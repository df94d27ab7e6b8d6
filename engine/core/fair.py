"""Fair shares of the engine by owner: the one that was served least goes first.

Virtual token counters: Sheng et al., Fairness in Serving Large Language Models, OSDI 2024, algorithm 2. An owner's
counter is the number of tokens computed for it, of prompts and replies alike, over its share; those found in the prefix
cache, and those computed again after a preemption, are free. Among owners that wait all the time the counters differ by
no more than a batch holds, whoever asks for more. Nothing is held back for anybody: while one owner is idle, the others
have all. It saves up no credit by that: when a request comes and no other one of its owner waits, the counter is lifted
to the least of those who wait, or if nobody does, to that of the last one who did.

Counters change when tokens are computed for the first time, and at arrivals, and nothing is computed for the first
time twice. Between two such moments ranks stand still, and the best sequence is never preempted: so there is always a
next one, until every request has ended.
"""

from collections.abc import Iterable

from engine.core.policies import SortedQueue
from engine.core.sequence import Sequence


class Queues:
    """Waiting sequences, one queue an owner, each in order of arrival. `served`: tokens by owner."""

    def __init__(self, served: dict[str, float]) -> None:
        self._served = served
        self._queues: dict[str, SortedQueue] = {}
        self._count = 0
        self.left: str | None = None  # the owner of the one that left last

    def __len__(self) -> int:
        return self._count

    def __contains__(self, owner: str) -> bool:
        return owner in self._queues

    @property
    def first(self) -> Sequence:
        return min((queue.first for queue in self._queues.values()), key=self._place)

    def least(self) -> float:
        """The least counter of an owner who waits; else that of the one who did last."""
        if self._queues:
            return min(self._served[owner] for owner in self._queues)
        return 0 if self.left is None else self._served[self.left]

    def add(self, sequence: Sequence) -> None:
        sequence.rank = (0, sequence.arrival)
        self._queues.setdefault(sequence.owner, SortedQueue()).add(sequence)
        self._count += 1

    def before(self, sequence: Sequence) -> int:
        """How many go before it at least: the earlier ones of its owner, and one of each owner that had less."""
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
    """`served` has an entry for each owner that ever came: API keys are few."""

    def __init__(self) -> None:
        self.served: dict[str, float] = {}
        self.running, self.waiting = SortedQueue(), Queues(self.served)

    def arrive(self, sequence: Sequence) -> None:
        sequence.rank = (0, sequence.arrival)
        owner = sequence.owner
        if owner not in self.waiting:
            self.served[owner] = max(self.served.get(owner, 0), self.waiting.least())

    def begin(self) -> None:
        for sequence in self.running.items:
            sequence.rank = (self.served[sequence.owner], sequence.arrival)
        self.running.sort()

    def charge(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            first_time = sequence.computed - sequence.charged
            if first_time > 0:
                self.served[sequence.owner] += first_time / sequence.share
                sequence.charged = sequence.computed
