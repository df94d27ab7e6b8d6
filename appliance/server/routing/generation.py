"""One running sequence, from its admission to its last token, across engine crashes.

A `Generation` is the journal of its request: `submit` from the route, and `emitted` with every token ID so far. When
its engine crashes, it is queued in the router, and another engine resumes after the last token. Random noise is keyed
by position and results do not depend on the batch, so the tokens are the ones that the first engine would have
produced.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import msgspec

from appliance.observability.metrics import Metrics, now
from appliance.server.errors.api import EngineFailed
from appliance.server.routing.admission import DrainRate, LatencyEstimate
from appliance.server.routing.engine import Engine
from appliance.server.routing.quarantine import InFlight
from appliance.server.routing.timeline import Finished, FirstToken, Interrupted, Placed, TimelineEvent, Timelines
from engine.api.client import Stream, merge
from engine.api.errors import EngineError, EngineGone, RequestError
from engine.api.events import Expired
from engine.api.messages import Delta, Finish, Submit, Timing

log = logging.getLogger(__name__)

GRACE_S = 0.5
"""Time that the gateway waits after a deadline before it ends a request itself.

An engine that responds ends a request at its deadline between two steps.
"""


@dataclass(frozen=True)
class EarlierOutput:
    """Output of a resumed sequence so far, from engines of this gateway or of an earlier gateway process."""

    emitted: tuple[int, ...] = ()
    timing: Timing | None = None


class Router(Protocol):
    """Interface of the router (router.py) that a sequence uses."""

    metrics: Metrics
    timelines: Timelines
    drain: DrainRate
    latency: LatencyEstimate
    spend: Callable[[str, int], None]

    def interrupted(self, generation: "Generation") -> None: ...

    def ended(self, generation: "Generation") -> None: ...


class Generation:
    """Async iterator of the deltas of one sequence.

    Use it in `async with`, which ends a sequence that still runs. `engine` is the engine that computes it, or None
    while it is queued. `engine_index` and `session` restrict the choice of the engine. `uncounted` is the
    number of prompt tokens that no step has counted yet.
    """

    def __init__(
        self,
        router: Router,
        submit: Submit,
        key: str,
        engine_index: int | None,
        session: str,
        earlier: EarlierOutput | None = None,
    ) -> None:
        self.submit = submit
        self.key = key
        self.engine_index = engine_index
        self.session = session
        self.engine: Engine[Generation] | None = None
        self.emitted: list[int] = [] if earlier is None else list(earlier.emitted)
        self.timing: Timing | None = None if earlier is None else earlier.timing
        self.started = False
        self.interruptions = 0
        self._router = router
        self._deltas: Stream | None = None
        self._placed = asyncio.Event()
        self._outcome: Exception | Finish | None = None  # error or finish reason that ends it while it is queued
        self._over = False
        self._pooled = False  # it has its pooled vector instead of tokens
        self._label = "0"  # of its current or last engine
        self._earlier_timing = self.timing  # timing of the engines before this one
        self._is_resumed = bool(self.emitted)  # so its prompt was already counted
        self.uncounted = 0 if self._is_resumed else len(submit.prompt)
        self._suspended = False
        self._unread: Delta | None = None  # of engines that crashed
        self._received = list(self.emitted)  # by the engines before this one
        self._gain_from = len(self.emitted)  # tokens when this engine took it
        self._timer: asyncio.TimerHandle | None = None
        self._arrived_s = self._last_s = self._first_s = self._queued_s = self._placed_s = now()

    @property
    def cached_tokens(self) -> int:
        return self.timing.cached_tokens if self.timing else 0

    @property
    def received(self) -> list[int]:
        """All token IDs from engines, including those that the route has not read yet."""
        return self._received if self._deltas is None else self._deltas.emitted

    @property
    def in_flight(self) -> InFlight:
        position = len(self.received)
        return InFlight(self.key, position, position - self._gain_from, now() - self._placed_s)

    # The router's side

    def place(self, engine: "Engine[Generation]") -> None:
        """Assign the sequence to an engine, which resumes after the tokens so far."""
        self.engine, self._label = engine, engine.label
        engine.open[self.key] = self
        tokens = self._gain_from = len(self._received)
        self._placed_s = now()
        self.record(Placed(engine.label, tokens))
        self._deltas = engine.client.generate(
            msgspec.structs.replace(self.submit, id=self.key, emitted=tuple(self._received))
        )
        if self.interruptions:
            log.info("request %s resumes after token %d after %.1f s", self.submit.id, tokens, self.pause_s)
            self._router.metrics.observe("interruption_seconds", self.pause_s, self._label)
            self._deltas.begin()  # read at once: a client that reads slowly must not delay a quarantine test
        self._placed.set()

    def interrupt(self) -> None:
        """Queue the request again: its engine is gone."""
        self._detach()
        if self.engine is not None:
            self.engine.open.pop(self.key, None)
            state = self.engine.client.state
            why = state.message if state.kind == "failed" else "the connection closed"
            self.record(Interrupted(self.engine.label, why, len(self._received)))
        self.engine = None
        self._earlier_timing = self.timing
        if self._outcome is None:
            self._placed.clear()
        self.interruptions += 1
        self._queued_s = now()

    def refuse(self, outcome: Exception | Finish) -> None:
        """End the request with an error, or with a last delta that has this finish reason.

        An engine that computes the request aborts it. Do nothing if the request has ended and the route has not read
        its end yet.
        """
        if self._over or self._outcome is not None or self.is_settled:
            return
        self._detach(abort=True)
        if self.engine is not None:
            self.engine.open.pop(self.key, None)
            self.engine = None
        self._outcome = outcome
        self._placed.set()

    @property
    def is_refused(self) -> bool:
        """The request ends as soon as the route reads on."""
        return self._outcome is not None

    @property
    def is_settled(self) -> bool:
        """The engine has ended the request, so that a crash of the engine no longer affects it."""
        return self._deltas is not None and self._deltas.is_settled

    def _detach(self, *, abort: bool = False) -> None:
        """Detach from the engine and keep the deltas that the route has not read."""
        if self._deltas is None:
            return
        deltas, self._deltas = self._deltas, None
        self._received = deltas.emitted
        unread = [each for each in (self._unread, deltas.detach(abort=abort)) if each is not None]
        self._unread = merge(unread) if unread else None

    def watch_deadlines(self) -> None:
        """End the request at its deadlines even if its engine does not answer. The engine gets GRACE_S to end it."""
        until, grace_s = self._next_deadline(), 0.0 if self.engine is None else GRACE_S
        if self._over or self._outcome is not None or until is None:
            return
        delay_s = until + grace_s - now()
        if delay_s > 0:
            self._timer = asyncio.get_running_loop().call_later(delay_s, self.watch_deadlines)
            return
        running = self.engine is not None
        self.record(Expired("end" if until == self.submit.deadline else "first token", running=running))
        if running:
            log.info("engine %s did not end request %s at its deadline", self._label, self.submit.id)
        self.refuse("deadline")

    def _next_deadline(self) -> float | None:
        times = [self.submit.deadline, None if self.received else self.submit.ttft_deadline]
        return min((each for each in times if each is not None), default=None)

    @property
    def pause_s(self) -> float:
        """How long it has been queued for an engine."""
        return now() - self._queued_s

    def record(self, event: TimelineEvent) -> None:
        self._router.timelines.add(self.key, now(), event)

    # The route's side

    async def __aenter__(self) -> "Generation":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        while not self._over:
            if self._unread is not None:
                unread, self._unread = self._unread, None
                return self._deliver(unread)
            if not self._placed.is_set():
                await self._placed.wait()
                continue
            if self._outcome is not None:
                return self._finish_with(self._outcome)
            deltas = self._deltas
            assert deltas is not None, "a placed request has an engine"
            try:
                delta = deltas.take()
            except RequestError:
                self._end("error")
                raise
            except EngineGone:
                self._router.interrupted(self)
                continue
            except EngineError as error:
                log.error("engine %s failed a request: %s", self._label, error.code)
                self._end("error")
                raise EngineFailed from error
            if delta is not None:
                return self._deliver(delta)
            await deltas.change()
        raise StopAsyncIteration

    def stop(self) -> None:
        """End a reply that is complete, because it met a stop string, while the engine still computes it."""
        if self.engine is not None:
            self.engine.client.abort([self.key])
        self._end("stop")

    def suspend(self) -> None:
        """Mark the sequence as one that another generation will resume, so that its end is not counted now."""
        self._suspended = True

    async def aclose(self) -> None:
        """End the request and abort it in the engine if it still runs."""
        deltas = self._deltas
        self._end("abort")
        if deltas is not None:
            await deltas.aclose()

    def _finish_with(self, outcome: Exception | Finish) -> Delta:
        if isinstance(outcome, Exception):
            self._end("error")
            raise outcome
        self._end(outcome)
        return Delta(self.submit.id, finish=outcome)

    def _deliver(self, delta: Delta) -> Delta:
        moment = now()
        if delta.timing is not None:
            self.timing = _joined(self._earlier_timing, delta.timing)
        if not self.started:
            self._start(moment)
        if delta.ids:
            self._gain(delta.ids, moment)
        if delta.pooled is not None:
            self._pooled, self._last_s = True, moment
        if delta.finish is not None:
            self._end(delta.finish)
        return msgspec.structs.replace(delta, id=self.submit.id)

    def _start(self, moment: float) -> None:
        self.started = True
        prompt = len(self.submit.prompt)
        self._router.drain.start(moment, prompt)
        if not self._is_resumed:
            self._router.metrics.prompt(self._label, prompt, self.cached_tokens)
            self._router.spend(self.submit.owner, prompt - self.cached_tokens)

    def _gain(self, ids: tuple[int, ...], moment: float) -> None:
        metrics, label, count = self._router.metrics, self._label, len(ids)
        metrics.add("generation_tokens", count, label)
        if self.submit.owner:
            self._router.spend(self.submit.owner, count)
        pauses, share_s = count, 0.0
        if self.emitted:
            # Deltas that were merged for a slow client share the pause among their tokens.
            share_s = (moment - self._last_s) / count
        else:
            pauses, self._first_s = count - 1, moment
            self.record(FirstToken())
            metrics.observe("time_to_first_token_seconds", moment - self._arrived_s, label)
        if pauses:
            metrics.observe("inter_token_latency_seconds", share_s, label, times=pauses)
        self.emitted += ids
        self._last_s = moment

    def _end(self, reason: Finish) -> None:
        if self._over:
            return
        self._over = True
        if self._timer is not None:
            self._timer.cancel()
        if not self.started:
            self._router.drain.leave(now())
        if self.timing is not None:
            self._router.latency.record(len(self.submit.prompt), self.timing, len(self.emitted))
        self.record(Finished(reason, len(self.emitted)))
        self._router.ended(self)
        if self._suspended:
            return
        metrics, label = self._router.metrics, self._label
        metrics.finished(label, reason, len(self.emitted), self.submit.max_tokens)
        if reason != "error" and (self.emitted or self._pooled):
            self._observe_times(metrics, label)

    def _observe_times(self, metrics: Metrics, label: str) -> None:
        metrics.observe("request_duration_seconds", self._last_s - self._arrived_s, label)
        decode_s = self._last_s - self._first_s if self.emitted else 0.0
        timing = self.timing
        if timing is not None and timing.first_token:
            # A reply that was cut at a stop string has no last delta from the engine, so use the gateway's clock.
            decode_s = (timing.last_token - timing.first_token) or decode_s
            prefill_s = timing.first_token - timing.scheduled
            metrics.observe("request_queue_time_seconds", timing.scheduled - timing.arrived, label)
            metrics.observe("request_prefill_time_seconds", prefill_s, label)
            metrics.observe("request_inference_time_seconds", prefill_s + decode_s, label)
            if self.emitted:
                metrics.observe("request_decode_time_seconds", decode_s, label)
            metrics.observe("request_preemptions", timing.preemptions, label)
        if len(self.emitted) > 1:
            pause_s = decode_s / (len(self.emitted) - 1)
            metrics.observe("request_time_per_output_token_seconds", pause_s, label)


def _joined(before: Timing | None, after: Timing) -> Timing:
    """Return the times over all engines, which share the machine's monotonic clock.

    Arrival, first token and cached tokens come from the first engine that reported them, the end from the last.
    """
    if before is None or not before.first_token:
        return after
    return msgspec.structs.replace(
        before, last_token=after.last_token, preemptions=before.preemptions + after.preemptions
    )
