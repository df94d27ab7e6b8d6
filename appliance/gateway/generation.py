"""One sequence under way, from its admission to its last token, whatever engines come and go under it.

It is the journal of its request: `submit` as the route made it, `emitted` every id given so far. When its engine dies
it waits in the router's hall, and another engine goes on behind the last id: noise is keyed by position and rows do not
depend on their neighbours, so its tokens are those that the first engine would have given.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

import msgspec

from appliance.gateway.stories import FirstToken, Happening, Interrupted, Over, Placed
from appliance.http.errors import EngineFailed
from appliance.observe.metrics import Metrics, now
from engine.api.client import Stream
from engine.api.errors import EngineError, EngineGone, RequestError
from engine.api.events import Expired
from engine.api.messages import Delta, Finish, Submit, Timing

if TYPE_CHECKING:
    from appliance.gateway.router import Engine, Router

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Past:
    """What a sequence that goes on was given before, by an engine of this gateway or of one before it."""

    emitted: tuple[int, ...] = ()
    timing: Timing | None = None


class Generation:
    """An async iterator of the sequence's deltas, to be used in `async with`, which ends what still runs. `engine` is
    the one that computes it, None while it waits for one; `rank` and `session` say which it wants. `uncounted` tokens
    of its prompt are in no step's count yet."""

    def __init__(
        self, router: "Router", submit: Submit, key: str, rank: int | None, session: str, past: Past | None = None
    ) -> None:
        self.submit = submit
        self.key = key
        self.rank = rank
        self.session = session
        self.engine: Engine | None = None
        self.emitted: list[int] = [] if past is None else list(past.emitted)
        self.timing: Timing | None = None if past is None else past.timing
        self.started = False
        self.interruptions = 0
        self._router = router
        self._deltas: Stream | None = None
        self._placed = asyncio.Event()
        self._fate: Exception | Finish | None = None  # what ends it while it waits
        self._over = False
        self._pooled = False  # it has its numbers instead of tokens
        self._label = "0"  # of the engine that computes it, or did
        self._gained = False  # something on this engine
        self._earlier = self.timing  # of the engines before this one
        self._goes_on = bool(self.emitted)  # so its prompt was counted
        self.uncounted = 0 if self._goes_on else len(submit.prompt)
        self._suspended = False
        self._arrived_s = self._last_s = self._first_s = self._held_s = now()

    @property
    def cached_tokens(self) -> int:
        return self.timing.cached_tokens if self.timing else 0

    @property
    def flight(self) -> tuple[str, int, bool]:
        """What the quarantine needs to know when the engine dies: key, tokens so far, whether this engine gave any."""
        return self.key, len(self.emitted), self._gained

    # The router's side

    def place(self, engine: "Engine") -> None:
        """This engine computes it from now on, behind what was given."""
        self.engine, self._label, self._gained = engine, engine.label, False
        engine.open[self.key] = self
        self.tell(Placed(engine.label, len(self.emitted)))
        self._deltas = engine.client.generate(
            msgspec.structs.replace(self.submit, id=self.key, emitted=tuple(self.emitted))
        )
        if self.interruptions:
            log.info("request %s goes on behind token %d after %.1f s", self.submit.id, len(self.emitted), self.pause_s)
            self._router.metrics.observe("interruption_seconds", self.pause_s, self._label)
        self._placed.set()

    def interrupt(self) -> None:
        """Its engine is gone. It waits, and its client with it."""
        if self.engine is not None:
            self.engine.open.pop(self.key, None)
            state = self.engine.client.state
            why = state.message if state.kind == "failed" else "its connection ended"
            self.tell(Interrupted(self.engine.label, why, len(self.emitted)))
        self.engine = self._deltas = None
        self._earlier = self.timing
        if self._fate is None:
            self._placed.clear()
        self.interruptions += 1
        self._held_s = now()

    def refuse(self, fate: Exception | Finish) -> None:
        """Ends it while it waits: with this error, or with a last delta of this reason."""
        self._fate = fate
        self._placed.set()

    @property
    def pause_s(self) -> float:
        """How long it has waited for an engine."""
        return now() - self._held_s

    def tell(self, what: Happening) -> None:
        self._router.stories.add(self.key, now(), what)

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
            if not self._placed.is_set():
                await self._wait_for_place()
            if self._fate is not None:
                return self._meet(self._fate)
            deltas = self._deltas
            assert deltas is not None, "a placed request has an engine"
            try:
                while (delta := deltas.take()) is None:
                    await deltas.change()
            except RequestError:
                self._end("error")
                raise
            except EngineGone:
                self._router.interrupted(self)
                continue
            except EngineError as error:
                log.error("engine %s gave up a request: %s", self._label, error.code)
                self._end("error")
                raise EngineFailed from error
            self._take(delta)
            return msgspec.structs.replace(delta, id=self.submit.id)
        raise StopAsyncIteration

    def stop(self) -> None:
        """The reply is complete although the engine goes on: a stop string was met."""
        if self.engine is not None:
            self.engine.client.abort([self.key])
        self._end("stop")

    def suspend(self) -> None:
        """It will go on as another generation: its end now counts for nothing."""
        self._suspended = True

    async def aclose(self) -> None:
        """Ends the request; a running one is aborted in the engine."""
        deltas = self._deltas
        self._end("abort")
        if deltas is not None:
            await deltas.aclose()

    async def _wait_for_place(self) -> None:
        """Waits for an engine, until it is late."""
        submit = self.submit
        times = [submit.deadline, None if self.emitted else submit.ttft_deadline]
        until = min((each for each in times if each is not None), default=None)
        try:
            async with asyncio.timeout(None if until is None else max(0.0, until - now())):
                await self._placed.wait()
        except TimeoutError:
            self.tell(Expired("end" if until == submit.deadline else "first token", running=False))
            self.refuse("deadline")

    def _meet(self, fate: Exception | Finish) -> Delta:
        if isinstance(fate, Exception):
            self._end("error")
            raise fate
        self._end(fate)
        return Delta(self.submit.id, finish=fate)

    def _take(self, delta: Delta) -> None:
        moment = now()
        if delta.timing is not None:
            self.timing = _joined(self._earlier, delta.timing)
        if not self.started:
            self._start(moment)
        if delta.ids:
            self._gain(delta.ids, moment)
        if delta.pooled is not None:
            self._pooled, self._last_s = True, moment
        if delta.finish is not None:
            self._end(delta.finish)
        elif delta.ids:
            self._router.gained(self)

    def _start(self, moment: float) -> None:
        self.started = True
        prompt = len(self.submit.prompt)
        self._router.drain.start(moment, prompt)
        if not self._goes_on:
            self._router.metrics.prompt(self._label, prompt, self.cached_tokens)
            self._router.spend(self.submit.owner, prompt - self.cached_tokens)

    def _gain(self, ids: tuple[int, ...], moment: float) -> None:
        metrics, label, count = self._router.metrics, self._label, len(ids)
        metrics.add("generation_tokens", count, label)
        if self.submit.owner:
            self._router.spend(self.submit.owner, count)
        pauses, share_s = count, 0.0
        if self.emitted:
            # Deltas that waited for a slow client come as one: the pause is shared among their tokens.
            share_s = (moment - self._last_s) / count
        else:
            pauses, self._first_s = count - 1, moment
            self.tell(FirstToken())
            metrics.observe("time_to_first_token_seconds", moment - self._arrived_s, label)
        if pauses:
            metrics.observe("inter_token_latency_seconds", share_s, label, times=pauses)
        self.emitted += ids
        self._gained, self._last_s = True, moment

    def _end(self, reason: Finish) -> None:
        if self._over:
            return
        self._over = True
        if not self.started:
            self._router.drain.leave(now())
        if self.timing is not None:
            self._router.pace.measured(len(self.submit.prompt), self.timing, len(self.emitted))
        self.tell(Over(reason, len(self.emitted)))
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
            # A reply that was cut at a stop string has no last delta of the engine's: then our own clock tells.
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
    """Times over all engines, which share the machine's monotonic clock: arrival, first token and cache of the first
    that told them, the end of the last."""
    if before is None or not before.first_token:
        return after
    return msgspec.structs.replace(
        before, last_token=after.last_token, preemptions=before.preemptions + after.preemptions
    )
