"""How many requests may wait, and when a refused one should come back: after what the measured drain rate says."""

import math
from collections import deque

WINDOW_S = 30.0
UNKNOWN_S = 2
LONGEST_S = 60


class Admission:
    """Counts starts of requests over a sliding window. The clock is the caller's.

    A limit of 0 still admits one request while nobody waits: whether it would wait is known only afterwards."""

    def __init__(self, max_waiting: int) -> None:
        self.limit = max(1, max_waiting)
        self._starts: deque[float] = deque()

    def started(self, now_s: float) -> None:
        """A request that waited was given its first token."""
        self._starts.append(now_s)
        self._forget(now_s)

    def is_full(self, waiting: int) -> bool:
        return waiting >= self.limit

    def retry_after_s(self, waiting: int, now_s: float) -> int:
        """Whole seconds until the queue is expected to be below its limit, 1 to LONGEST_S."""
        self._forget(now_s)
        if not self._starts:
            return UNKNOWN_S
        # At least a second, so that a burst of starts a moment ago is no rate of thousands.
        span_s = max(1.0, now_s - self._starts[0])
        too_many = waiting - self.limit + 1
        return min(LONGEST_S, max(1, math.ceil(too_many * span_s / len(self._starts))))

    def _forget(self, now_s: float) -> None:
        while self._starts and self._starts[0] < now_s - WINDOW_S:
            self._starts.popleft()


def loading_retry_after_s(elapsed_s: float, fraction: float) -> int:
    """Whole seconds that a load which took `elapsed_s` to come to `fraction` still needs, 1 to LONGEST_S."""
    if fraction <= 0.01:
        return UNKNOWN_S
    return min(LONGEST_S, max(1, math.ceil(elapsed_s * (1 - fraction) / fraction)))
