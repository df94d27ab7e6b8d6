"""How much may wait, what a request's deadlines leave of hope, and when a refused one should come back.

All follow the measured drain rate: requests, and their prompt tokens, that get a first token while some have none.
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
RECENT = 64  # sequences whose own speed is remembered


class Drain:
    """Starts over a sliding window of the time in which something waits: a quiet hour makes no slow server, a queue
    that does not move does. The clock is the caller's."""

    def __init__(self) -> None:
        self._inside = 0
        self._at_s = self._busy_s = self._moved_s = 0.0
        self._starts: deque[tuple[float, int]] = deque()

    def enter(self, now_s: float) -> None:
        """A request begins to wait."""
        self._advance(now_s)
        if not self._inside:
            self._moved_s = self._busy_s
        self._inside += 1

    def start(self, now_s: float, tokens: int) -> None:
        """One that waited, with a prompt of so many tokens, has its first token."""
        self.leave(now_s)
        self._moved_s = self._busy_s
        self._starts.append((self._busy_s, tokens))

    def leave(self, now_s: float) -> None:
        """One waits no longer, since it is over."""
        self._advance(now_s)
        self._inside -= 1

    def requests_s(self, requests: int, now_s: float) -> float | None:
        """How long so many requests take to start. None: nothing was measured yet."""
        return self._seconds(requests, len(self._starts), now_s)

    def tokens_s(self, tokens: int, now_s: float) -> float | None:
        """The same for prompts of so many tokens together."""
        return self._seconds(tokens, sum(count for _, count in self._starts), now_s)

    def idle_s(self, now_s: float) -> float:
        """How long something waits since anything started."""
        self._advance(now_s)
        return self._busy_s - self._moved_s

    def _seconds(self, amount: int, started: int, now_s: float) -> float | None:
        self._advance(now_s)
        # At least a second, so that a burst of starts a moment ago is no rate of thousands.
        span_s = max(1.0, min(WINDOW_S, self._busy_s))
        if not self._starts:
            return span_s if span_s > 1 else None  # nothing moves: the next one may take as long again
        return span_s * amount / max(1, started)

    def _advance(self, now_s: float) -> None:
        if self._inside:
            self._busy_s += now_s - self._at_s
        self._at_s = now_s
        while self._starts and self._starts[0][0] < self._busy_s - WINDOW_S:
            self._starts.popleft()


class Ahead(NamedTuple):
    """What waits before a request."""

    requests: int
    tokens: int


class Admission:
    """A limit on what waits, in requests or in tokens.

    A limit of 0 still admits one request while nobody waits: whether it would wait is known only afterwards. None
    admits everything."""

    def __init__(self, most: int | None) -> None:
        self.allow(most)

    def allow(self, most: int | None) -> None:
        """Another limit from now on; who waits already goes on waiting."""
        self.limit = None if most is None else max(1, most)

    def is_full(self, waiting: int) -> bool:
        return self.limit is not None and waiting >= self.limit

    def excess(self, waiting: int) -> int:
        """How much has to start before one more may wait."""
        return 0 if self.limit is None else max(0, waiting - self.limit + 1)


def retry_after_s(seconds: float | None) -> int:
    """Whole seconds of a Retry-After, 1 to LONGEST_S; UNKNOWN_S where nothing is known."""
    return UNKNOWN_S if seconds is None else min(LONGEST_S, max(1, math.ceil(seconds)))


@dataclass(frozen=True)
class Late:
    """A request that cannot meet `field`: it would take `expected_s`, and `given_s` are left."""

    field: str
    given_s: float
    expected_s: float
    ahead: Ahead

    @property
    def excess_s(self) -> float:
        """How long the queue has to drain before the same request is in time."""
        return self.expected_s - self.given_s

    def __str__(self) -> str:
        return (
            f"This request cannot meet its {self.field}: about {1000 * self.expected_s:,.0f} ms are expected and "
            f"{1000 * max(0.0, self.given_s):,.0f} ms are left; {counted(self.ahead.requests, 'request')} with "
            f"{counted(self.ahead.tokens, 'prompt token')} wait before it. Retry later, or give it more time."
        )


class Pace:
    """Whether deadlines can be met, by the drain rate and the fastest of the last sequences.

    What is expected is the least that is likely: the queue by requests or by tokens, whichever is faster; a prompt as
    fast as the fastest of at least half its length; a reply of as few tokens as it may have, at the highest speed.
    While nothing waits nothing is late: what an idle engine can do is known when it has tried, and it ends a request
    that is late by itself."""

    def __init__(self, drain: Drain) -> None:
        self._drain = drain
        self._prompts: deque[tuple[int, float]] = deque(maxlen=RECENT)  # tokens, seconds
        self._replies: deque[float] = deque(maxlen=RECENT)  # seconds a token

    def measured(self, prompt: int, timing: Timing, emitted: int) -> None:
        """What a sequence took that is over."""
        if timing.first_token > timing.scheduled > 0:
            self._prompts.append((prompt, timing.first_token - timing.scheduled))
        if emitted > 1 and timing.last_token > timing.first_token:
            self._replies.append((timing.last_token - timing.first_token) / (emitted - 1))

    def late(self, submits: Sequence[Submit], ahead: Ahead, now_s: float) -> Late | None:
        """Why one of a request's sequences, behind what is ahead, will be late."""
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
                    return Late(field, at_s - now_s, expected_s, ahead)
        return None

    def _wait_s(self, ahead: Ahead, now_s: float) -> float | None:
        """What is left of the wait: part of what is ahead was computed since anything started."""
        by_requests = self._drain.requests_s(ahead.requests, now_s)
        by_tokens = self._drain.tokens_s(ahead.tokens, now_s)
        if by_requests is None or by_tokens is None:
            return None
        return max(0.0, min(by_requests, by_tokens) - self._drain.idle_s(now_s))

    def _prompt_s(self, tokens: int) -> float:
        alike = [seconds / known for known, seconds in self._prompts if 2 * known >= tokens]
        return tokens * min(alike, default=0.0)


def loading_retry_after_s(elapsed_s: float, fraction: float) -> int:
    """Whole seconds that a load which took `elapsed_s` to come to `fraction` still needs, 1 to LONGEST_S."""
    if fraction <= 0.01:
        return UNKNOWN_S
    return min(LONGEST_S, max(1, math.ceil(elapsed_s * (1 - fraction) / fraction)))
