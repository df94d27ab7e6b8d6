"""Queue limits, deadline admission and Retry-After estimates.

All estimates use the measured drain rate: the requests, and their prompt tokens, that get a first token per second
while the queue is not empty.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.api.events import counted
from engine.api.messages import Submit, Timing

WINDOW_S = 30.0
UNKNOWN_S = 2
LONGEST_S = 60
RECENT = 64  # number of recent sequences whose speed is remembered


class DrainRate:
    """Starts over a sliding window of the time during which requests wait.

    Idle time does not count, so a quiet hour does not lower the rate, but a queue that does not move does. The caller
    provides the clock.
    """

    def __init__(self) -> None:
        self._inside = 0
        self._at_s = self._busy_s = self._moved_s = 0.0
        self._starts: deque[tuple[float, int]] = deque()

    def enter(self, now_s: float) -> None:
        """Record that a request joins the queue."""
        self._advance(now_s)
        if not self._inside:
            self._moved_s = self._busy_s
        self._inside += 1

    def start(self, now_s: float, tokens: int) -> None:
        """Record the first token of a queued request whose prompt has `tokens` tokens."""
        self.leave(now_s)
        self._moved_s = self._busy_s
        self._starts.append((self._busy_s, tokens))

    def leave(self, now_s: float) -> None:
        """Record that a queued request has ended without a first token."""
        self._advance(now_s)
        self._inside -= 1

    def requests_s(self, requests: int, now_s: float) -> float | None:
        """Return the estimated seconds until `requests` requests have started, or None before the first measurement."""
        return self._seconds(requests, len(self._starts), now_s)

    def tokens_s(self, tokens: int, now_s: float) -> float | None:
        """Return the estimated seconds until prompts of `tokens` tokens in total have started, or None as above."""
        return self._seconds(tokens, sum(count for _, count in self._starts), now_s)

    def idle_s(self, now_s: float) -> float:
        """Return how long requests have been waiting since the last start."""
        self._advance(now_s)
        return self._busy_s - self._moved_s

    def _seconds(self, amount: int, started: int, now_s: float) -> float | None:
        self._advance(now_s)
        # At least one second, so that a burst of starts a moment ago does not count as a rate of thousands.
        span_s = max(1.0, min(WINDOW_S, self._busy_s))
        if not self._starts:
            return span_s if span_s > 1 else None  # no start in the window: the next one may take as long again
        return span_s * amount / max(1, started)

    def _advance(self, now_s: float) -> None:
        if self._inside:
            self._busy_s += now_s - self._at_s
        self._at_s = now_s
        while self._starts and self._starts[0][0] < self._busy_s - WINDOW_S:
            self._starts.popleft()


class QueueAhead(NamedTuple):
    """Requests and prompt tokens that are queued before a request."""

    requests: int
    tokens: int


class Admission:
    """Limit on the number of queued requests or tokens. None admits everything.

    A limit of 0 still admits one request while the queue is empty, because it is not known in advance if that request
    would wait.
    """

    def __init__(self, limit: int | None) -> None:
        self.allow(limit)

    def allow(self, limit: int | None) -> None:
        """Set a new limit. Requests that are already queued stay queued."""
        self.limit = None if limit is None else max(1, limit)

    def is_full(self, waiting: int) -> bool:
        return self.limit is not None and waiting >= self.limit

    def excess(self, waiting: int) -> int:
        """Return how much has to start before one more request may be queued."""
        return 0 if self.limit is None else max(0, waiting - self.limit + 1)


def retry_after_s(seconds: float | None) -> int:
    """Return the whole seconds of a Retry-After header, 1 to LONGEST_S, or UNKNOWN_S without an estimate."""
    return UNKNOWN_S if seconds is None else min(LONGEST_S, max(1, math.ceil(seconds)))


@dataclass(frozen=True)
class MissedDeadline:
    """A request that cannot meet the deadline `field`: it would take `expected_s` and only `given_s` are left."""

    field: str
    given_s: float
    expected_s: float
    ahead: QueueAhead

    @property
    def excess_s(self) -> float:
        """How long the queue has to drain before the same request would meet its deadline."""
        return self.expected_s - self.given_s

    def __str__(self) -> str:
        return (
            f"This request cannot meet its {self.field}: about {1000 * self.expected_s:,.0f} ms are expected and "
            f"{1000 * max(0.0, self.given_s):,.0f} ms are left; {counted(self.ahead.requests, 'request')} with "
            f"{counted(self.ahead.tokens, 'prompt token')} are queued before it. Retry later or increase the deadline."
        )


class LatencyEstimate:
    """Deadline check by the drain rate and the fastest of the recent sequences.

    The estimate is optimistic: the queue by requests or by tokens, whichever is faster; the prompt at the fastest rate
    of the recent prompts of at least half its length; the shortest reply that the request allows, at the highest speed.
    While the queue is empty no request is rejected: an idle engine may be faster than any measurement, and it ends late
    requests by itself.
    """

    def __init__(self, drain: DrainRate) -> None:
        self._drain = drain
        self._prompts: deque[tuple[int, float]] = deque(maxlen=RECENT)  # tokens, seconds
        self._replies: deque[float] = deque(maxlen=RECENT)  # seconds a token

    def record(self, prompt: int, timing: Timing, emitted: int) -> None:
        """Record the times of a finished sequence."""
        if timing.first_token > timing.scheduled > 0:
            self._prompts.append((prompt, timing.first_token - timing.scheduled))
        if emitted > 1 and timing.last_token > timing.first_token:
            self._replies.append((timing.last_token - timing.first_token) / (emitted - 1))

    def missed_deadline(self, submits: Sequence[Submit], ahead: QueueAhead, now_s: float) -> MissedDeadline | None:
        """Return why one of a request's sequences, queued after `ahead`, would miss a deadline, or None."""
        wait_s = self._wait_s(ahead, now_s) if ahead.requests else None
        if wait_s is None:
            return None
        for submit in submits:
            first_s = wait_s + self._prompt_s(len(submit.prompt))
            end_s = first_s + (max(1, submit.sampling.min_tokens) - 1) * min(self._replies, default=0.0)
            for field, at_s, expected_s in (
                ("ttft_deadline_ms", submit.ttft_deadline, first_s),
                ("deadline_ms", submit.deadline, end_s),
            ):
                if at_s is not None and expected_s > at_s - now_s:
                    return MissedDeadline(field, at_s - now_s, expected_s, ahead)
        return None

    def _wait_s(self, ahead: QueueAhead, now_s: float) -> float | None:
        """Return the remaining wait. Work since the last start has already computed part of what is queued."""
        by_requests = self._drain.requests_s(ahead.requests, now_s)
        by_tokens = self._drain.tokens_s(ahead.tokens, now_s)
        if by_requests is None or by_tokens is None:
            return None
        return max(0.0, min(by_requests, by_tokens) - self._drain.idle_s(now_s))

    def _prompt_s(self, tokens: int) -> float:
        alike = [seconds / known for known, seconds in self._prompts if 2 * known >= tokens]
        return tokens * min(alike, default=0.0)


def loading_retry_after_s(elapsed_s: float, fraction: float) -> int:
    """Return how many seconds a load still needs that reached `fraction` in `elapsed_s`, 1 to LONGEST_S."""
    if fraction <= 0.01:
        return UNKNOWN_S
    return min(LONGEST_S, max(1, math.ceil(elapsed_s * (1 - fraction) / fraction)))
