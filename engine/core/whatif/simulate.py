"""Simulate traffic with the real scheduler and a computed clock: the engine's loop without a device."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from engine.api.errors import RequestError
from engine.core.config import SchedulerConfig
from engine.core.plan import StepResult
from engine.core.scheduler import Planned, Scheduler
from engine.core.whatif.traffic import RecordedRequest, Size, size_of

StepSeconds = Callable[[Size, float], float]
"""Return the time of a step from its size and its start time, relative to the first arrival."""


@dataclass
class Reply:
    """Arrival of a request and times of its tokens."""

    at: float
    times: list[float] = field(default_factory=list)
    id: str = ""


@dataclass
class Outcome:
    """Result of a simulation."""

    replies: list[Reply]
    refused: int  # requests that cannot be served with these settings
    preemptions: int
    cached_tokens: int
    steps: int


class Requests(Protocol):
    """Requests that arrive during a simulation. Times are seconds from its start."""

    def next_at(self) -> float | None:
        """Return the time of the next arrival that is known, or None."""

    def take(self) -> tuple[RecordedRequest, float]:
        """Remove the next request and return it with its time of arrival."""

    def ended(self, id: str, now: float) -> None:
        """Note the end of a request, after which others may arrive."""


class _Recorded:
    """Requests that arrive when they were recorded, at a multiple of the rate."""

    def __init__(self, requests: list[RecordedRequest], rate: float) -> None:
        start = requests[0].at if requests else 0.0
        self._upcoming = deque((each, (each.at - start) / rate) for each in requests)

    def next_at(self) -> float | None:
        return self._upcoming[0][1] if self._upcoming else None

    def take(self) -> tuple[RecordedRequest, float]:
        return self._upcoming.popleft()

    def ended(self, id: str, now: float) -> None:
        """Recorded arrivals do not depend on the ends of requests."""


def simulate(
    requests: list[RecordedRequest],
    config: SchedulerConfig,
    seconds: StepSeconds,
    *,
    rate: float = 1.0,
    depth: int = 2,
) -> Outcome:
    """Simulate requests in order of arrival. Every request gets its recorded tokens and ends as recorded.

    rate: factor of the request rate. depth: maximum number of steps in flight."""
    return _Run(_Recorded(requests, rate), config, seconds, rate, depth).run()


def simulate_requests(requests: Requests, config: SchedulerConfig, seconds: StepSeconds, *, depth: int = 2) -> Outcome:
    """Simulate requests that arrive at given times or after the end of others. Every request gets its tokens."""
    return _Run(requests, config, seconds, 1.0, depth).run()


class _Run:
    def __init__(
        self,
        requests: Requests,
        config: SchedulerConfig,
        seconds: StepSeconds,
        rate: float,
        depth: int,
    ) -> None:
        self._scheduler = Scheduler(config)
        self._seconds = seconds
        self._rate = rate
        self._depth = depth
        self._requests = requests
        self._open: dict[str, RecordedRequest] = {}
        self._replies: dict[str, Reply] = {}
        self._cancellations: list[tuple[float, str]] = []  # requests that were cancelled before their first token
        self._refused = 0
        self._now = self._free_at = 0.0

    def run(self) -> Outcome:
        in_flight: deque[tuple[Planned, float]] = deque()
        steps = 0
        while True:
            self._arrive()
            planned = self._scheduler.plan(self._now)
            if self._read_adapters() and planned is None:
                continue
            if planned is not None:
                steps += 1
                begins = max(self._now, self._free_at)
                self._free_at = begins + self._seconds(size_of(planned.plan.rows), begins)
                in_flight.append((planned, self._free_at))
            if in_flight and (planned is None or len(in_flight) == self._depth):
                done, ended = in_flight.popleft()
                self._now = max(self._now, ended)
                self._apply(done)
            elif planned is None:
                next_at = self._requests.next_at()
                upcoming = [*([] if next_at is None else [next_at]), *(at for at, _ in self._cancellations)]
                if not upcoming:
                    break
                self._now = max(self._now, min(upcoming))
        counters = self._scheduler.counters
        return Outcome(list(self._replies.values()), self._refused, counters.preemptions, counters.cached_tokens, steps)

    def _read_adapters(self) -> bool:
        """Read the adapters that requests wait for. It takes no time, because the recording does not have it."""
        wanted = tuple(self._scheduler.adapters.wanted)
        for version in wanted:
            self._scheduler.adapter_prepared(version)
        return bool(wanted)

    def _arrive(self) -> None:
        while (next_at := self._requests.next_at()) is not None and next_at <= self._now:
            request, at = self._requests.take()
            id = request.submit.id
            try:
                self._scheduler.submit(request.submit, at)
            except RequestError:
                self._refused += 1
                self._requests.ended(id, at)
                continue
            self._open[id], self._replies[id] = request, Reply(at, id=id)
            if request.finish is not None and not request.tokens:
                self._cancellations.append((at + (request.ended - request.at) / self._rate, id))
        for cancellation in [each for each in self._cancellations if each[0] <= self._now]:
            self._cancellations.remove(cancellation)
            self._scheduler.end(cancellation[1], self._open[cancellation[1]].finish or "abort")

    def _apply(self, planned: Planned) -> None:
        sampled, further = list[int](), dict[int, tuple[int, ...]]()
        for sequence, row in zip(planned.sequences, planned.plan.rows, strict=True):
            request = self._open[sequence.id]
            number = len(sequence.ids) - sequence.prompt_tokens - len(request.submit.emitted)
            tokens = request.tokens[number : number + row.samples] if number >= 0 else []
            accepted = _num_accepted(tokens, row.drafts)
            if accepted:
                further[len(sampled)] = tuple(tokens[1 : 1 + accepted])
            sampled.append((tokens[0] if tokens else 0) if row.sample else -1)
        result = StepResult(planned.plan.step, tuple(sampled), further)
        for delta in self._scheduler.apply(result, self._now).deltas:
            reply, request = self._replies[delta.id], self._open[delta.id]
            reply.times += [self._now] * len(delta.ids)
            if delta.finish is not None:
                self._requests.ended(delta.id, self._now)
            elif request.finish is not None and len(reply.times) >= len(request.tokens):
                self._scheduler.end(delta.id, request.finish)


def _num_accepted(tokens: list[int], drafts: tuple[int, ...]) -> int:
    """Return the number of drafts that equal the recorded tokens and are followed by another one."""
    accepted = 0
    while accepted + 1 < len(tokens) and tokens[accepted] == drafts[accepted]:
        accepted += 1
    return accepted
