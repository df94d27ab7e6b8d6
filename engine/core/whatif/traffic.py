"""Traffic of a flight recording: requests with arrival times, parameters and tokens, and the steps."""

import dataclasses
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from msgspec.structs import replace

from engine.api.errors import ConfigError, RequestError
from engine.api.messages import Delta, Finish, Submit
from engine.core.config import SchedulerConfig
from engine.core.plan import Row, StepResult
from engine.core.records import (
    AdapterRecord,
    AllEnded,
    Applied,
    CacheReset,
    DeadlinesPassed,
    Ended,
    PlanMade,
    Proposed,
    Record,
    Started,
    Submitted,
    do_adapter,
)
from engine.core.replay import started_scheduler
from engine.core.scheduler import Planned


@dataclass(frozen=True)
class Size:
    """Size of a step, on which its time depends."""

    tokens: int  # computed tokens
    drawn: int  # sampled tokens
    attended: int  # attended positions, including each token's own


@dataclass(frozen=True)
class Step:
    """A recorded step."""

    size: Size
    started: float  # when it was planned or when the previous step ended, whichever is later
    ended: float
    waiting: int = 0  # requests that were queued because the plan had no room for them
    delay: float = 0.0  # seconds from the preceding event to the plan, while requests were open


@dataclass
class RecordedRequest:
    """A request that arrived and ended; times are seconds. Its deadlines are removed: it ends as recorded."""

    submit: Submit
    at: float  # arrival
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # of the tokens
    finish: Finish | None = None  # set if ended from outside: aborted, past its deadline, or its grammar was complete
    ended: float = 0.0  # time of `finish`


@dataclass
class Traffic:
    """Traffic of the last process in a recording."""

    config: SchedulerConfig
    requests: list[RecordedRequest]  # in order of arrival
    steps: list[Step]
    num_ignored: int  # requests that arrived before the recording begins or had not ended at its end
    depth: int  # maximum number of steps in flight


def read_traffic(records: Iterable[Record]) -> Traffic:
    """Read the traffic. Raises ConfigError for a recording without a complete request."""
    reader: _Reader | None = None
    for record in records:
        if isinstance(record, Started):
            if reader is None or record.state is None:
                reader = _Reader(record)
        else:
            assert reader is not None, "a recording begins with Started"
            reader.take(record)
    if reader is None or not reader.done or not reader.steps:
        raise ConfigError("the recording contains no complete request; record for longer (engine.record)")
    return reader.traffic()


class _Reader:
    """Runs the scheduler on the records, to find the request of each row."""

    def __init__(self, started: Started) -> None:
        self.steps: list[Step] = []
        self.done = 0
        self._arrived: list[RecordedRequest] = []
        self._scheduler = started_scheduler(started)
        self._config = self._scheduler.config
        self._num_unknown = self._scheduler.running + self._scheduler.waiting
        self._open: dict[str, RecordedRequest] = {}
        self._in_flight: deque[tuple[float, Planned, int, float]] = deque()
        self._depth = 1
        self._now = self._step_ended = 0.0

    def take(self, record: Record) -> None:
        match record:
            case Submitted(submit, now):
                with suppress(RequestError):  # it was refused when it was recorded, too
                    ended = self._scheduler.submit(submit, now)
                    self._now = max(self._now, now)  # it may have arrived during the last step
                    self._open[submit.id] = RecordedRequest(replace(submit, ttft_deadline=None, deadline=None), now)
                    self._arrived.append(self._open[submit.id])
                    self._add_deltas([] if ended is None else [ended])
            case Proposed(id, tokens):
                self._scheduler.propose(id, tokens)
            case Ended(id, finish):
                self._scheduler.end(id, finish)
                self._end(id, finish)
            case DeadlinesPassed(now):
                self._now = now
                for delta in self._scheduler.expire(now):
                    self._end(delta.id, "deadline")
            case AllEnded():
                self._scheduler.end_all()
                for id in list(self._open):
                    self._end(id, "abort")
            case CacheReset():
                self._scheduler.reset_prefix_cache()
            case AdapterRecord():
                for delta in do_adapter(self._scheduler, record):
                    self._end(delta.id, "error")
            case PlanMade(now):
                delay = 0.0 if self._is_idle or self._in_flight else now - self._now
                self._now = now
                planned = self._scheduler.plan(now)
                if planned is not None:
                    self._in_flight.append((now, planned, self._scheduler.waiting, delay))
                    self._depth = max(self._depth, len(self._in_flight))
            case Applied(now, step, sampled, failed, further, drafts):
                self._now = now
                self._apply(StepResult(step, sampled, further, failed=failed, drafts=drafts))

    def _apply(self, result: StepResult) -> None:
        if self._in_flight:  # otherwise the step was planned before the recording begins
            planned_at, planned, waiting, delay = self._in_flight.popleft()
            started = max(planned_at, self._step_ended)
            self.steps.append(Step(size_of(planned.plan.rows), started, self._now, waiting, delay))
        self._step_ended = self._now
        self._add_deltas(self._scheduler.apply(result, self._now).deltas)

    def _add_deltas(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            request = self._open.get(delta.id)
            if request is None:
                continue
            request.tokens += delta.ids
            request.times += [self._now] * len(delta.ids)
            if delta.finish is not None:
                del self._open[delta.id]
                self.done += 1

    def _end(self, id: str, finish: Finish) -> None:
        request = self._open.pop(id, None)
        if request is not None:
            request.finish, request.ended = finish, self._now
            self.done += 1

    def traffic(self) -> Traffic:
        still = {id(one) for one in self._open.values()}
        requests = sorted((one for one in self._arrived if id(one) not in still), key=lambda request: request.at)
        names = dict.fromkeys((*self._config.adapters, *(one.submit.adapter for one in requests if one.submit.adapter)))
        config = dataclasses.replace(self._config, adapters=tuple(names))  # of the simulation, which loads none
        return Traffic(config, requests, self.steps, self._num_unknown + len(self._open), self._depth)

    @property
    def _is_idle(self) -> bool:
        return not (self._scheduler.running or self._scheduler.waiting)


def size_of(rows: Sequence[Row]) -> Size:
    return Size(
        sum(row.count for row in rows),
        sum(row.sample for row in rows),
        sum(row.count * row.first + row.count * (row.count + 1) // 2 for row in rows),
    )
