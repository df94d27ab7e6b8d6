"""One running sequence, from its admission to its last token, across engine crashes.

A `Generation` is the journal of its request: `submit` from the route, and `emitted` with every token ID so far. When
its engine crashes, it is queued in the router, and another engine resumes after the last token. Random noise is keyed
by position and results do not depend on the batch, so the tokens are the ones that the first engine would have
produced.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Protocol

import msgspec

from appliance.observability.metrics import now
from appliance.server.errors.api import EngineFailed
from appliance.server.routing.account import Account, Counters, EarlierOutput
from appliance.server.routing.placement import Placement
from appliance.server.routing.quarantine import InFlight
from appliance.server.routing.timeline import Interrupted, TimelineEvent
from engine.api.client import EngineClient, Stream, merge
from engine.api.errors import EngineError, EngineGone, RequestError
from engine.api.events import Expired
from engine.api.messages import Delta, Finish, Submit

log = logging.getLogger(__name__)

GRACE_S = 0.5
"""Time that the gateway waits after a deadline before it ends a request itself.

An engine that responds ends a request at its deadline between two steps.
"""


class Owner(Protocol):
    """All that a sequence asks of the router that opened it."""

    def lost_engine(self, generation: "Generation") -> None:
        """Queue a sequence again, because its engine is gone."""

    def left_engine(self, generation: "Generation") -> None:
        """Forget the engine of a sequence that has been refused."""

    def ended(self, generation: "Generation") -> None:
        """Drop the state of a sequence that has ended for any reason."""


class Generation:
    """Async iterator of the deltas of one sequence.

    Use it in `async with`, which ends a sequence that still runs. `where` restricts the choice of the engine.
    """

    def __init__(
        self,
        owner: Owner,
        counters: Counters,
        submit: Submit,
        key: str,
        where: Placement,
        earlier: EarlierOutput | None = None,
    ) -> None:
        self.submit = submit
        self.key = key
        self.where = where
        self._owner = owner
        self._account = Account(counters, submit, key, earlier, where)
        self._client: EngineClient | None = None  # connection to the current engine; None while queued
        self._interruptions = 0
        self._deltas: Stream | None = None
        self._placed = asyncio.Event()
        self._outcome: Exception | Finish | None = None  # error or finish reason that ends it while it is queued
        self._over = False
        self._suspended = False
        self._unread: Delta | None = None  # of engines that crashed
        self._received = list(self.emitted)  # by the engines before this one
        self._gain_from = len(self.emitted)  # tokens when this engine took it
        self._timer: asyncio.TimerHandle | None = None
        self._queued_s = self._placed_s = now()

    @property
    def emitted(self) -> list[int]:
        """All token IDs that the route has read."""
        return self._account.emitted

    @property
    def is_started(self) -> bool:
        """The route has read a delta."""
        return self._account.started

    @property
    def received(self) -> list[int]:
        """All token IDs from engines, including those that the route has not read yet."""
        return self._received if self._deltas is None else self._deltas.emitted

    @property
    def in_flight(self) -> InFlight:
        position = len(self.received)
        return InFlight(self.key, position, position - self._gain_from, now() - self._placed_s)

    # The router's side

    def arrive(self, num_open: int) -> None:
        """Count the sequence as queued, while `num_open` other sequences run, and watch its deadlines."""
        self._account.arrive(num_open)
        self._watch_deadlines()

    def record(self, event: TimelineEvent) -> None:
        """Add an event to the timeline."""
        self._account.record(event)

    def place(self, client: EngineClient, label: str) -> None:
        """Assign the sequence to an engine, which resumes after the tokens so far."""
        self._client = client
        tokens = self._gain_from = len(self._received)
        self._placed_s = now()
        self._account.place(label, tokens)
        self._deltas = client.generate(msgspec.structs.replace(self.submit, id=self.key, emitted=tuple(self._received)))
        if self._interruptions:
            pause_s = now() - self._queued_s
            log.info("request %s resumes after token %d after %.1f s", self.submit.id, tokens, pause_s)
            self._account.resume(pause_s)
            self._deltas.begin()  # read at once: a client that reads slowly must not delay a quarantine test
        self._placed.set()

    def interrupt(self, why: str) -> None:
        """Wait for another engine: this one is gone, for the reason `why`."""
        self._detach()
        if self._client is not None:
            self._account.record(Interrupted(self._account.label, why, len(self._received)))
        self._client = None
        self._account.interrupt()
        if self._outcome is None:
            self._placed.clear()
        self._interruptions += 1
        self._queued_s = now()

    def refuse(self, outcome: Exception | Finish) -> None:
        """End the request with an error, or with a last delta that has this finish reason.

        An engine that computes the request aborts it. Do nothing if the request has ended and the route has not read
        its end yet.
        """
        if self._over or self._outcome is not None or self.is_settled:
            return
        self._detach(abort=True)
        self._client = None
        self._owner.left_engine(self)
        self._outcome = outcome
        self._placed.set()

    def count_step(self, tokens: int) -> int:
        """Return how many tokens a step of its engine counts, which has sampled `tokens` of them."""
        return self._account.count_step(tokens)

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

    def _watch_deadlines(self) -> None:
        """End the request at its deadlines even if its engine does not answer. The engine gets GRACE_S to end it."""
        until, grace_s = self._next_deadline(), 0.0 if self._client is None else GRACE_S
        if self._over or self._outcome is not None or until is None:
            return
        delay_s = until + grace_s - now()
        if delay_s > 0:
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._watch_deadlines)
            return
        running = self._client is not None
        self._account.record(Expired("end" if until == self.submit.deadline else "first token", running=running))
        if running:
            log.info("engine %s did not end request %s at its deadline", self._account.label, self.submit.id)
        self.refuse("deadline")

    def _next_deadline(self) -> float | None:
        times = [self.submit.deadline, None if self.received else self.submit.ttft_deadline]
        return min((each for each in times if each is not None), default=None)

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
                self._owner.lost_engine(self)
                continue
            except EngineError as error:
                log.error("engine %s failed a request: %s", self._account.label, error.code)
                self._end("error")
                raise EngineFailed from error
            if delta is not None:
                return self._deliver(delta)
            await deltas.change()
        raise StopAsyncIteration

    def stop(self) -> None:
        """End a reply that is complete, because it met a stop string, while the engine still computes it."""
        if self._client is not None:
            self._client.abort([self.key])
        self._end("stop")

    def suspend(self) -> None:
        """Do not count the end of this sequence, because another generation will resume it."""
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
        self._account.take(delta)
        if delta.finish is not None:
            self._end(delta.finish)
        return msgspec.structs.replace(delta, id=self.submit.id)

    def _end(self, reason: Finish) -> None:
        if self._over:
            return
        self._over = True
        if self._timer is not None:
            self._timer.cancel()
        self._account.end(reason)
        self._owner.ended(self)
        if not self._suspended:
            self._account.count_end(reason)
