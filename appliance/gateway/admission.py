"""How much may wait, and when a refused request should come back: after what the measured drain rate says."""

import math
from collections import deque

WINDOW_S = 30.0
UNKNOWN_S = 2
LONGEST_S = 60


class Admission:
    """A limit on what waits, in requests or in tokens, and the starts over a sliding window. The clock is the caller's.

    A limit of 0 still admits one request while nobody waits: whether it would wait is known only afterwards. None
    admits everything."""

    def __init__(self, most: int | None) -> None:
        self.allow(most)
        self._starts: deque[tuple[float, int]] = deque()

    def allow(self, most: int | None) -> None:
        """Another limit from now on; who waits already goes on waiting."""
        self.limit = None if most is None else max(1, most)

    def started(self, now_s: float, amount: int = 1) -> None:
        """So much of what waited was given its first token."""
        self._starts.append((now_s, amount))
        self._forget(now_s)

    def is_full(self, waiting: int) -> bool:
        return self.limit is not None and waiting >= self.limit

    def retry_after_s(self, waiting: int, now_s: float) -> int:
        """Whole seconds until what waits is expected to be below the limit, 1 to LONGEST_S."""
        self._forget(now_s)
        if not self._starts or self.limit is None:
            return UNKNOWN_S
        # At least a second, so that a burst of starts a moment ago is no rate of thousands.
        span_s = max(1.0, now_s - self._starts[0][0])
        too_many = waiting - self.limit + 1
        return min(LONGEST_S, max(1, math.ceil(too_many * span_s / sum(amount for _, amount in self._starts))))

    def _forget(self, now_s: float) -> None:
        while self._starts and self._starts[0][0] < now_s - WINDOW_S:
            self._starts.popleft()


def loading_retry_after_s(elapsed_s: float, fraction: float) -> int:
    """Whole seconds that a load which took `elapsed_s` to come to `fraction` still needs, 1 to LONGEST_S."""
    if fraction <= 0.01:
        return UNKNOWN_S
    return min(LONGEST_S, max(1, math.ceil(elapsed_s * (1 - fraction) / fraction)))
