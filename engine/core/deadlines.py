"""Deadlines of requests for the first token or the end, earliest first."""

import heapq
from collections.abc import Iterator, Mapping
from typing import Literal

from engine.core.sequence import Sequence

Wanted = Literal["first token", "end"]
SPARE = 64  # entries of ended requests that are kept before they are removed


class Deadlines:
    def __init__(self) -> None:
        self._entries: list[tuple[float, int, Wanted, str]] = []  # heap of (deadline, arrival, event, id)

    def add(self, sequence: Sequence, open: Mapping[str, Sequence]) -> None:
        submit = sequence.submit
        if submit.deadline is not None:
            heapq.heappush(self._entries, (submit.deadline, sequence.arrival, "end", sequence.id))
        if submit.ttft_deadline is not None and not submit.emitted:
            heapq.heappush(self._entries, (submit.ttft_deadline, sequence.arrival, "first token", sequence.id))
        if len(self._entries) > 2 * len(open) + SPARE:  # an open request has up to two entries
            self._entries = [entry for entry in self._entries if _found(entry, open) is not None]
            heapq.heapify(self._entries)

    def passed(self, now: float, open: Mapping[str, Sequence]) -> Iterator[tuple[Sequence, Wanted]]:
        """Remove and yield open requests whose deadline passed at `now`. The caller ends each before the next one."""
        while self._entries and self._entries[0][0] <= now:
            entry = heapq.heappop(self._entries)
            sequence = _found(entry, open)
            if sequence is not None and (entry[2] == "end" or sequence.first_token is None):
                yield sequence, entry[2]

    def due(self, now: float) -> bool:
        return bool(self._entries) and self._entries[0][0] <= now


def _found(entry: tuple[float, int, Wanted, str], open: Mapping[str, Sequence]) -> Sequence | None:
    """Return the open request of an entry, or None. A request id may be reused, an arrival number is not."""
    sequence = open.get(entry[3])
    return sequence if sequence is not None and sequence.arrival == entry[1] else None
