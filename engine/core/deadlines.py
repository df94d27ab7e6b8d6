"""Deadlines of requests for the first token or the end, earliest first."""

import heapq
from collections.abc import Iterator, Mapping
from typing import Literal

from engine.core.sequence import Sequence

DeadlineKind = Literal["first token", "end"]
SPARE = 64  # entries of ended requests that are kept before they are removed


class Deadlines:
    def __init__(self) -> None:
        self._entries: list[tuple[float, int, DeadlineKind, str]] = []  # heap of (deadline, arrival, event, id)

    def add(self, sequence: Sequence, open: Mapping[str, Sequence]) -> None:
        submit = sequence.submit
        if submit.deadline is not None:
            heapq.heappush(self._entries, (submit.deadline, sequence.arrival, "end", sequence.id))
        if submit.ttft_deadline is not None and not submit.emitted:
            heapq.heappush(self._entries, (submit.ttft_deadline, sequence.arrival, "first token", sequence.id))
        if len(self._entries) > 2 * len(open) + SPARE:  # an open request has up to two entries
            self._entries = [entry for entry in self._entries if _open_sequence(entry, open) is not None]
            heapq.heapify(self._entries)

    def passed(self, now: float, open: Mapping[str, Sequence]) -> Iterator[tuple[Sequence, DeadlineKind]]:
        """Remove and yield open requests whose deadline passed at `now`. The caller ends each before the next one."""
        while self._entries and self._entries[0][0] <= now:
            entry = heapq.heappop(self._entries)
            sequence = _open_sequence(entry, open)
            if sequence is not None and (entry[2] == "end" or sequence.first_token is None):
                yield sequence, entry[2]

    def due(self, now: float) -> bool:
        return bool(self._entries) and self._entries[0][0] <= now


def _open_sequence(entry: tuple[float, int, DeadlineKind, str], open: Mapping[str, Sequence]) -> Sequence | None:
    """Return the open request of an entry, or None. A request id may be reused, an arrival number is not."""
    sequence = open.get(entry[3])
    return sequence if sequence is not None and sequence.arrival == entry[1] else None
