"""Routing of requests to the least loaded engine, or to the engine that a request's header or session selects.

The gateway owns a request and engines are disposable: a `Generation` keeps its Submit and the token IDs so far, which
is all that another engine needs to resume (`Submit.emitted`). Requests of a crashed engine are queued together with new
ones until an engine is ready. `Quarantine` decides which of them may be placed at once and which have to be tested.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NoReturn

from appliance.config.gateway import GatewayConfig
from appliance.observability.metrics import Metrics, now
from appliance.observability.usage import Tokens
from appliance.runtime.crash_exemption import CrashKind
from appliance.runtime.inflight import OpenRequest
from appliance.server.errors.api import EngineFailed, Overloaded, Quarantined, Unavailable
from appliance.server.routing.account import Counters, EarlierOutput
from appliance.server.routing.adapters import AdapterRegistry
from appliance.server.routing.admission import (
    Admission,
    DrainRate,
    LatencyEstimate,
    QueueAhead,
    loading_retry_after_s,
    retry_after_s,
)
from appliance.server.routing.engine import Engine
from appliance.server.routing.generation import Generation
from appliance.server.routing.isolation import Isolation
from appliance.server.routing.placement import ANYWHERE, Placement, choose
from appliance.server.routing.refused import content_hash
from appliance.server.routing.timeline import Pending, Timelines
from engine.api.client import EngineClient, EngineState
from engine.api.errors import Drift, RequestError, SelfTestFailed
from engine.api.messages import AdapterChanged, Output, Stats, Submit

log = logging.getLogger(__name__)

SELF_TEST_CODES = (SelfTestFailed.code, Drift.code)
GONE_RETRY_AFTER_S = 3
SWAP_S = 30.0  # maximum time for an engine to exit after it was asked to
HALTED_RETRY_AFTER_S = 60  # an operator has to intervene

# Identical to the reference engine's messages: gateways in front of it tell the two cases apart by this text.
BUSY = "The engine is currently busy and cannot accept new requests. Please try again later or on a different instance."
BACKLOG = "The engine has reached its prefill token backlog limit. Please try again later or on a different instance."


# By scheduling policy: True if the first of two queued requests may run before the second, which arrived later. Under
# fair shares other owners' requests may do so too, while they have used less; only the engine knows how many.
GOES_BEFORE: dict[str, Callable[[Submit, Submit], bool]] = {
    "fcfs": lambda one, other: True,
    "priority": lambda one, other: one.priority <= other.priority,
    "fair": lambda one, other: one.owner == other.owner,
}


@dataclass(frozen=True)
class Load:
    """Load over all ready engines."""

    kv_cache_usage: float  # used share of the KV blocks, 0 to 1
    waiting: int  # requests that are queued in engines


class Router:
    """The engines and every open request.

    Runs in one event loop; `start` connects to the engines, `stop` disconnects.
    """

    def __init__(
        self,
        sockets: Sequence[str],
        max_waiting: int,
        metrics: Metrics,
        *,
        max_waiting_tokens: int | None = None,
        hold_s: float = 10.0,
        exempt: Callable[[str, int, CrashKind], None] = lambda program, crashes, kind: None,
        timelines: int = 0,
        policy: str = "fcfs",
        report_in_flight: Callable[[str, Sequence[OpenRequest]], None] = lambda program, requests: None,
        spend: Callable[[str, int], None] = lambda owner, tokens: None,
        used: Callable[[Submit, Tokens], None] = lambda submit, tokens: None,
        decoder_start_ids: tuple[int, ...] = (),
        adapters: AdapterRegistry | None = None,
    ) -> None:
        """Create a router that is not connected yet.

        Args:
            hold_s: new requests wait for engines that come back within this time.
            exempt: called with (program, crashes, kind) to inform the restart monitor which crashes of an engine count.
            timelines: number of sequences whose timelines are kept.
            policy: scheduling policy of the engines.
            report_in_flight: called with (program, requests) when an engine is gone that was computing these requests.
            spend: called with (owner, tokens) when tokens were computed for an owner.
            used: called with a sequence that has ended and its tokens.
            decoder_start_ids: first decoder tokens of an encoder-decoder model; empty for other models.
            adapters: LoRA adapters, which engines get when they become ready.
        """
        self.metrics = metrics
        self.adapters = adapters or AdapterRegistry(())
        self.timelines = Timelines(timelines)
        self.admission = Admission(max_waiting)
        self.backlog = Admission(max_waiting_tokens)
        self.drain = DrainRate()
        self.latency = LatencyEstimate(self.drain)
        self._counters = Counters(metrics, self.timelines, self.drain, self.latency, spend, used)
        self._goes_before = GOES_BEFORE[policy]
        self.engines: list[Engine[Generation]] = [self._engine(index, socket) for index, socket in enumerate(sockets)]
        self.halted = ""
        self.asks_first = False  # engines count as serving once they have answered a request of each kind
        self._report_in_flight = report_in_flight
        self._hold_s = hold_s
        self._pending: dict[str, Generation] = {}
        self.isolation = Isolation(
            self.engines,
            self._pending,
            note=exempt,
            release=self._release,
            decoder_start_ids=decoder_start_ids,
        )
        self._numbers = itertools.count()
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False

    def _engine(self, index: int, socket: str) -> Engine[Generation]:
        def on_state(state: EngineState) -> None:
            self._changed(self.engines[index], state)

        def on_stats(stats: Stats) -> None:
            self.metrics.stats(index, stats)

        def on_output(output: Output) -> None:
            self._count_step(self.engines[index], output)

        def on_adapter(message: AdapterChanged) -> None:
            self.adapters.answered(index, message)

        client = EngineClient(
            socket,
            on_stats=on_stats,
            on_state=on_state,
            on_output=on_output,
            on_timeline=self.timelines.add_reported,
            on_adapter=on_adapter,
        )
        return Engine[Generation](index, client, now())

    def start(self) -> None:
        """Connect to the engines and reconnect when a connection ends. Needs a running event loop."""
        self._tasks = [asyncio.create_task(engine.client.run()) for engine in self.engines]

    async def broken(self) -> None:
        """Wait until the task of an engine connection fails and raise its error.

        Nothing would reach that engine after such a failure.
        """
        await asyncio.gather(*self._tasks)

    def reconfigure(self, config: GatewayConfig) -> None:
        """Apply new limits."""
        self.admission.allow(config.limits.max_waiting)
        self.backlog.allow(config.limits.max_waiting_tokens)
        self.timelines.keep(config.observability.timelines)
        self._hold_s = config.lifecycle.restart.hold

    def expect_end(self, index: int) -> None:
        """Record that this engine is about to be stopped on purpose."""
        self.engines[index].ends_by_s = now() + SWAP_S

    def has_swapped(self, index: int) -> bool:
        """Return if an engine has exited as expected and its successor has answered its first requests."""
        engine = self.engines[index]
        return self._answers(engine) and not engine.ends_by_s

    def halt(self, why: str) -> None:
        """Halt: no engine will come back. Queued requests fail and no new ones are accepted."""
        self.halted = why
        log.error("halted: %s", why)
        for generation in list(self._pending.values()):
            generation.refuse(EngineFailed(f"The service has halted: {why}"))

    async def stop(self) -> None:
        self._stopping = True
        for generation in self._pending.values():
            generation.refuse(EngineFailed())
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await self.isolation.close()

    def _changed(self, engine: Engine[Generation], state: EngineState) -> None:
        ready = engine.client.ready
        if state.kind == "ready" and ready is not None:
            engine.was_ready, engine.swapped = True, False
            engine.gap_s = now() - engine.since_s
            engine.start_s = sum(ready.seconds.values())
            self.metrics.engine_up(engine.index, ready)
            self.adapters.engine_ready(engine.index)
            log.info("engine %s is ready: %d KV blocks of %d tokens", engine.label, ready.kv_blocks, ready.block_tokens)
            self._release()
        elif state.kind in ("down", "failed") and not self._stopping:
            self.adapters.engine_down(engine.index)
            if state.code in SELF_TEST_CODES:
                self.metrics.self_test_failed(engine.index)
            self.metrics.engine_down(engine.index)
            engine.since_s = now()
            engine.swapped = now() <= engine.ends_by_s
            engine.ends_by_s = 0.0
            if engine.swapped:
                engine.answers = False
                log.info(
                    "engine %s is being replaced: %d requests are queued for the new one",
                    engine.label,
                    len(engine.open),
                )
                engine.reserved = False
                self._interrupt(engine)
                self._release()
                return
            if engine.was_ready or state.kind == "failed":
                log.error("engine %s exited: %s", engine.label, state.message or "the connection closed")
            self._crashed(engine)

    def _count_step(self, engine: Engine[Generation], output: Output) -> None:
        """Count the tokens of a step as vLLM does: the whole prompt counts together with its first token.

        Also pass the gains to the quarantine tests, before a slow client has read them.
        """
        tokens = 0
        for delta in output.deltas:
            generation = engine.open.get(delta.id)
            if generation is not None and self.isolation.quarantine.on:
                if delta.finish is None:
                    self.isolation.gained(delta.id, len(generation.received) + len(delta.ids))
                else:
                    self.isolation.ended(delta.id)
            if generation is not None and delta.ids:
                tokens += generation.count_step(len(delta.ids))
        if tokens:
            self.metrics.observe("iteration_tokens", tokens, engine.label)

    @property
    def serves(self) -> bool:
        return not self.halted and any(engine.serves for engine in self.engines)

    @property
    def answers(self) -> bool:
        """At least one ready engine has answered its first requests, if first requests are configured."""
        return not self.halted and any(self._answers(engine) for engine in self.engines)

    def _answers(self, engine: Engine[Generation]) -> bool:
        return engine.serves and (engine.answers or not self.asks_first)

    @property
    def accepts(self) -> bool:
        """A new request would be served, either now or when an engine is back."""
        return not self.halted and any(engine.serves or engine.returns_within(self._hold_s) for engine in self.engines)

    @property
    def open(self) -> int:
        return len(self._generations())

    @property
    def pending(self) -> int:
        """Number of requests that are queued until an engine comes back."""
        return len(self._pending)

    def _generations(self) -> list[Generation]:
        placed = [generation for engine in self.engines for generation in engine.open.values()]
        return [*placed, *self._pending.values()]

    @property
    def waiting(self) -> int:
        """Number of requests without a first token that no engine reports as running.

        The estimate is at most one step old.
        """
        unstarted = sum(not generation.is_started for generation in self._generations())
        running = sum(engine.client.stats.running for engine in self.engines if engine.serves)
        return min(unstarted, max(0, self.open - running))

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of all requests without a first token.

        Each choice of a request counts its prompt. Only the engine knows how much of a running prompt it has computed
        or will find in the prefix cache.
        """
        return sum(len(each.submit.prompt) for each in self._generations() if not each.is_started)

    def generate(self, submit: Submit, where: Placement = ANYWHERE) -> Generation:
        """Submit a request to an engine. `submit.id` need not be unique.

        Raises:
            Unavailable: no engine, or not the selected one, is ready or coming back.
            Overloaded: the queue is full.
            Quarantined: the same content crashed engines before.
            RequestError: the selected engine does not exist.
        """
        return self.generate_all([submit], where)[0]

    def generate_all(
        self, submits: Sequence[Submit], where: Placement = ANYWHERE, earlier: Sequence[EarlierOutput] = ()
    ) -> list[Generation]:
        """Submit several sequences of one request: either all are admitted or none.

        `past` has the earlier output of each sequence if they are resumed. Raises the same errors as `generate`.
        """
        self._check_engine_index(where.engine_index)
        self.admit()
        refused_s = max(self.isolation.refused.seconds_left(submit, now()) for submit in submits)
        if refused_s:
            raise Quarantined(refused_s)
        if not earlier:  # a resumed request has already returned a part of its reply
            self._refuse_late(submits)
        return [self._open(submit, where, before) for submit, before in zip_longest(submits, earlier)]

    def load(self) -> Load:
        stats = [engine.client.stats for engine in self.engines if engine.serves]
        used, total = sum(each.kv_blocks_used for each in stats), sum(each.kv_blocks_total for each in stats)
        return Load(used / max(1, total), sum(each.waiting for each in stats))

    def abort_all(self) -> None:
        """End every open request: its stream gets a last delta with finish "abort"."""
        for engine in self.engines:
            engine.client.abort(list(engine.open))
        for generation in list(self._pending.values()):
            generation.refuse("abort")

    # Called by generations

    def lost_engine(self, generation: Generation) -> None:
        self._queue(generation)
        self._release()

    def left_engine(self, generation: Generation) -> None:
        self._leave(generation)

    def ended(self, generation: Generation) -> None:
        self._pending.pop(generation.key, None)
        self._leave(generation)
        self.isolation.ended(generation.key)
        self._count_pending()

    # Engines of requests

    def _place(self, generation: Generation, engine: Engine[Generation]) -> None:
        engine.open[generation.key] = generation
        generation.place(engine.client, engine.label)

    def _leave(self, generation: Generation) -> Engine[Generation] | None:
        """Take a request from the engine that computes it. Return that engine."""
        for engine in self.engines:
            if engine.open.pop(generation.key, None) is not None:
                return engine
        return None

    def _queue(self, generation: Generation) -> None:
        """Queue a request whose engine is gone."""
        engine = self._leave(generation)
        generation.interrupt("the connection closed" if engine is None else engine.why_gone)
        if self._stopping or self.halted:
            generation.refuse(EngineFailed())
        self.metrics.add("request_interruptions", 1)
        self._pending[generation.key] = generation
        self._count_pending()

    def _interrupt(self, engine: Engine[Generation]) -> None:
        """Queue the requests of an engine that is gone, whether or not their clients are reading."""
        for generation in list(engine.open.values()):
            if not generation.is_settled:
                self._queue(generation)

    # Pending requests

    def _count_pending(self) -> None:
        self.metrics.set("requests_held", len(self._pending))

    def _release(self) -> None:
        """Place queued requests on engines, as far as engines are free and the quarantine allows it."""
        if self._stopping or not self._pending:
            return
        self.isolation.start_next(self._hold_s)
        for generation in list(self._pending.values()):
            if generation.is_refused:
                continue
            key = generation.key
            tested = self.isolation.is_candidate(key)
            engine = self.isolation.engine_for(key) if tested else choose(self.engines, generation.where)
            if engine is not None:
                del self._pending[key]
                self._place(generation, engine)
        self._count_pending()

    # Crashes

    def _crashed(self, engine: Engine[Generation]) -> None:
        """Account for the crash of an engine and queue its requests again."""
        in_flight = [generation for generation in engine.open.values() if not generation.is_settled]
        requests = [OpenRequest(each.submit.id, len(each.submit.prompt), len(each.received)) for each in in_flight]
        self._report_in_flight(f"engine-{engine.label}", requests)
        isolated = self.isolation.crashed(engine, in_flight)
        self._interrupt(engine)
        if in_flight:
            log.warning("%d requests are queued until an engine is ready", len(in_flight))
        for generation in in_flight:
            if generation.key == isolated:
                self._isolate(generation)
        self._release()

    def _isolate(self, generation: Generation) -> None:
        """End a request that crashes engines, and all open requests with its content."""
        content, refused = content_hash(generation.submit), self.isolation.refused
        log.error("request %s is isolated: engines crashed while running it alone", generation.submit.id)
        refused.add(generation.submit, now())
        for each in self._generations():
            if each is generation or content_hash(each.submit) == content:
                self.metrics.add("requests_quarantined", 1)
                tokens = len(generation.received) if each is generation else None
                each.refuse(Quarantined(refused.seconds_left(each.submit, now()), tokens))

    def refuse_if_halted(self) -> None:
        """Raise Unavailable in a halted appliance."""
        if self.halted:
            raise Unavailable(f"The service has halted and needs an operator: {self.halted}", HALTED_RETRY_AFTER_S)

    def admit(self) -> None:
        """Raise Unavailable or Overloaded if a request could not be accepted now."""
        self.refuse_if_halted()
        if not self.accepts:
            raise Unavailable(self._why_not(), self._retry_after_s(self.engines))
        requests, tokens = self.waiting, self.waiting_tokens
        if self.admission.is_full(requests):
            seconds = self.drain.requests_s(self.admission.excess(requests), now())
            self._refuse(
                "max_num_queued_reqs",
                BUSY,
                seconds,
                f"{requests} requests are queued, the limit is {self.admission.limit}",
            )
        if self.backlog.is_full(tokens):
            seconds = self.drain.tokens_s(self.backlog.excess(tokens), now())
            self._refuse(
                "max_num_queued_tokens",
                BACKLOG,
                seconds,
                f"{tokens} prompt tokens are queued, the limit is {self.backlog.limit}",
            )

    def _refuse_late(self, submits: Sequence[Submit]) -> None:
        """Raise Overloaded for a request whose deadlines cannot be met."""
        timed = [submit for submit in submits if submit.ttft_deadline is not None or submit.deadline is not None]
        if not timed:
            return
        before = [
            each.submit
            for each in self._generations()
            if not each.is_started and self._goes_before(each.submit, timed[0])
        ]
        ahead = QueueAhead(len(before), sum(len(submit.prompt) for submit in before))
        missed = self.latency.missed_deadline(timed, ahead, now())
        if missed is not None:
            self._refuse(missed.field, str(missed), missed.excess_s, str(missed))

    def _refuse(self, reason: str, message: str, seconds: float | None, why: str) -> NoReturn:
        self.metrics.add("admission_rejections", 1, reason)
        log.info("request rejected (%s): %s", reason, why)
        raise Overloaded(message, retry_after_s(seconds))

    def _check_engine_index(self, engine_index: int | None) -> None:
        """Check the engine that a request selects. No other engine serves such a request."""
        if engine_index is None:
            return
        name, last = "X-data-parallel-rank", len(self.engines) - 1
        if not 0 <= engine_index <= last:
            possible = f"0 to {last}" if last else "0 only"
            raise RequestError(
                f"{name} is {engine_index}, but there is no such engine. Possible: {possible} "
                f"(parallelism.data is {last + 1}).",
                name,
            )
        engine = self.engines[engine_index]
        if not engine.serves and self.serves:
            message = (
                f"Engine {engine_index}, which {name} names, is not ready: {engine.phase} ({engine.progress:.0%})."
            )
            raise Unavailable(f"{message} Leave the header out to use another one.", self._retry_after_s([engine]))

    def _open(self, submit: Submit, where: Placement, earlier: EarlierOutput | None) -> Generation:
        key = f"{submit.id}#{next(self._numbers)}"
        generation = Generation(self, self._counters, submit, key, where, earlier)
        generation.arrive(self.open)
        engine = choose(self.engines, where)
        if engine is not None:
            self._place(generation, engine)
        else:
            generation.record(Pending())
            self._pending[key] = generation
            self._count_pending()
        return generation

    def _why_not(self) -> str:
        best = max(self.engines, key=lambda engine: engine.progress)
        return f"The service is not ready: {best.phase} ({best.progress:.0%}). GET /ready shows its progress."

    def _retry_after_s(self, engines: Sequence[Engine[Generation]]) -> int:
        loading = [engine for engine in engines if engine.client.state.kind == "loading"]
        if not loading:
            return GONE_RETRY_AFTER_S
        return min(loading_retry_after_s(now() - engine.since_s, engine.progress) for engine in loading)
