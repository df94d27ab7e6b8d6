"""Simulate traffic with the real scheduler and a computed clock: the engine's loop without a device."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

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


@dataclass
class Outcome:
    """Result of a simulation."""

    replies: list[Reply]
    refused: int  # requests that cannot be served with these settings
    preemptions: int
    cached_tokens: int
    steps: int


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
    return _Run(requests, config, seconds, rate, depth).run()


class _Run:
    def __init__(
        self,
        requests: list[RecordedRequest],
        config: SchedulerConfig,
        seconds: StepSeconds,
        rate: float,
        depth: int,
    ) -> None:
        self._scheduler = Scheduler(config)
        self._seconds = seconds
        self._rate = rate
        self._depth = depth
        start = requests[0].at if requests else 0.0
        self._upcoming = deque((each, (each.at - start) / rate) for each in requests)
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
                upcoming = [at for _, at in list(self._upcoming)[:1]] + [at for at, _ in self._cancellations]
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
        while self._upcoming and self._upcoming[0][1] <= self._now:
            request, at = self._upcoming.popleft()
            id = request.submit.id
            try:
                self._scheduler.submit(request.submit, at)
            except RequestError:
                self._refused += 1
                continue
            self._open[id], self._replies[id] = request, Reply(at)
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
            if delta.finish is None and request.finish is not None and len(reply.times) >= len(request.tokens):
                self._scheduler.end(delta.id, request.finish)


def _num_accepted(tokens: list[int], drafts: tuple[int, ...]) -> int:
    """Return the number of drafts that equal the recorded tokens and are followed by another one."""
    accepted = 0
    while accepted + 1 < len(tokens) and tokens[accepted] == drafts[accepted]:
        accepted += 1
    return accepted
