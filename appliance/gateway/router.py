"""Requests to engines: the least loaded one takes the next, unless a request names its engine or its session; what
each was asked and gave is journaled here.

The gateway owns a request, the engine is disposable: a `Generation` keeps its Submit and the ids it was given, which is
all that another engine needs to go on (`Submit.emitted`).
"""

import asyncio
import contextlib
import hashlib
import itertools
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType

import msgspec

from appliance.gateway.admission import Admission, loading_retry_after_s
from appliance.http.errors import EngineFailed, Overloaded, Unavailable
from appliance.observe.metrics import Metrics, now
from engine.api.client import EngineClient, EngineState
from engine.api.errors import EngineError, EngineGone, RequestError
from engine.api.messages import Delta, Finish, Output, Stats, Submit, Timing

log = logging.getLogger(__name__)

GONE_RETRY_AFTER_S = 3

# Word for word what the reference engine says: gateways in front of it tell the two apart by these.
BUSY = "The engine is currently busy and cannot accept new requests. Please try again later or on a different instance."
BACKLOG = "The engine has reached its prefill token backlog limit. Please try again later or on a different instance."


@dataclass(frozen=True)
class Placement:
    """Where a request wants to run: on the engine of a number, or on that of its session. Else on the least loaded."""

    rank: int | None = None
    session: str = ""


ANYWHERE = Placement()


@dataclass(frozen=True)
class Load:
    """Of all serving engines: the used share of their KV blocks, 0 to 1, and the requests that wait in them."""

    kv_cache_usage: float
    waiting: int


@dataclass
class Engine:
    """One engine process as the router sees it. `label` is its index as text, as metrics show it."""

    index: int
    client: EngineClient
    since_s: float
    was_ready: bool = False
    open: dict[str, "Generation"] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return str(self.index)

    @property
    def serves(self) -> bool:
        return self.client.state.kind == "ready"

    @property
    def phase(self) -> str:
        """starting, loading (or the engine's own word for it), ready, restarting, failed."""
        state = self.client.state
        if state.kind == "down":
            return "restarting" if self.was_ready else "starting"
        return state.phase if state.kind == "loading" else state.kind

    @property
    def detail(self) -> str:
        return self.client.state.detail

    @property
    def progress(self) -> float:
        return 1.0 if self.serves else self.client.state.fraction


class Generation:
    """One sequence under way: an async iterator of its deltas, to be used in `async with`, which ends what still runs.

    The journal of the request: `submit` as the route made it, `emitted` every id given so far, `engine` who gives them.
    """

    def __init__(self, router: "Router", engine: Engine, submit: Submit, engine_id: str) -> None:
        self.submit = submit
        self.engine = engine
        self.engine_id = engine_id
        self.emitted: list[int] = []
        self.timing: Timing | None = None
        self.started = False
        self._router = router
        self._over = False
        self._uncounted = len(submit.prompt)
        self._arrived_s = self._last_s = self._first_s = now()
        self._deltas = engine.client.generate(msgspec.structs.replace(submit, id=engine_id))

    @property
    def cached_tokens(self) -> int:
        return self.timing.cached_tokens if self.timing else 0

    async def __aenter__(self) -> "Generation":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        if self._over:
            raise StopAsyncIteration
        try:
            delta = await anext(self._deltas)
        except RequestError:
            self._end("error")
            raise
        except EngineGone as error:
            self._end("error")
            raise EngineFailed from error
        except EngineError as error:
            log.error("engine %s gave up a request: %s", self.engine.label, error.code)
            self._end("error")
            raise EngineFailed from error
        self._take(delta)
        return msgspec.structs.replace(delta, id=self.submit.id)

    def take_prompt(self) -> int:
        """Tokens of the prompt the first time, then 0."""
        tokens, self._uncounted = self._uncounted, 0
        return tokens

    def stop(self) -> None:
        """The reply is complete although the engine goes on: a stop string was met."""
        self.engine.client.abort([self.engine_id])
        self._end("stop")

    async def aclose(self) -> None:
        """Ends the request; a running one is aborted in the engine."""
        self._end("abort")
        await self._deltas.aclose()

    def _take(self, delta: Delta) -> None:
        moment, metrics, label = now(), self._router.metrics, self.engine.label
        self.timing = delta.timing or self.timing
        if not self.started:
            self.started = True
            self._router.admission.started(moment)
            self._router.backlog.started(moment, len(self.submit.prompt))
            metrics.prompt(label, len(self.submit.prompt), self.cached_tokens)
        count = len(delta.ids)
        if count:
            metrics.add("generation_tokens", count, label)
            pauses = count if self.emitted else count - 1
            if not self.emitted:
                self._first_s = moment
                metrics.observe("time_to_first_token_seconds", moment - self._arrived_s, label)
            if pauses:
                # Deltas that waited for a slow client come as one: the pause is shared among their tokens.
                share_s = (moment - self._last_s) / pauses if self.emitted else 0.0
                metrics.observe("inter_token_latency_seconds", share_s, label, times=pauses)
            self.emitted += delta.ids
            self._last_s = moment
        if delta.finish is not None:
            self._end(delta.finish)

    def _end(self, reason: Finish) -> None:
        if self._over:
            return
        self._over = True
        del self.engine.open[self.engine_id]
        metrics, label = self._router.metrics, self.engine.label
        metrics.finished(label, reason, len(self.emitted), self.submit.max_tokens)
        if reason != "error" and self.emitted:
            self._observe_times(metrics, label)

    def _observe_times(self, metrics: Metrics, label: str) -> None:
        metrics.observe("request_duration_seconds", self._last_s - self._arrived_s, label)
        decode_s = self._last_s - self._first_s
        timing = self.timing
        if timing is not None and timing.first_token:
            # A reply that was cut at a stop string has no last delta of the engine's: then our own clock tells.
            decode_s = (timing.last_token - timing.first_token) or decode_s
            prefill_s = timing.first_token - timing.scheduled
            metrics.observe("request_queue_time_seconds", timing.scheduled - timing.arrived, label)
            metrics.observe("request_prefill_time_seconds", prefill_s, label)
            metrics.observe("request_inference_time_seconds", prefill_s + decode_s, label)
            metrics.observe("request_decode_time_seconds", decode_s, label)
            metrics.observe("request_preemptions", timing.preemptions, label)
        if len(self.emitted) > 1:
            pause_s = decode_s / (len(self.emitted) - 1)
            metrics.observe("request_time_per_output_token_seconds", pause_s, label)


class Router:
    """The engines and every open request. Runs in one event loop; `start` connects, `stop` lets go."""

    def __init__(
        self, sockets: Sequence[str], max_waiting: int, metrics: Metrics, *, max_waiting_tokens: int | None = None
    ) -> None:
        self.metrics = metrics
        self.admission = Admission(max_waiting)
        self.backlog = Admission(max_waiting_tokens)
        self.engines = [self._engine(index, socket) for index, socket in enumerate(sockets)]
        self._numbers = itertools.count()
        self._tasks: list[asyncio.Task[None]] = []
        self._letting_go = False

    def _engine(self, index: int, socket: str) -> Engine:
        def on_state(state: EngineState) -> None:
            self._changed(self.engines[index], state)

        def on_stats(stats: Stats) -> None:
            self.metrics.stats(index, stats)

        def on_output(output: Output) -> None:
            self._count_step(self.engines[index], output)

        client = EngineClient(socket, on_stats=on_stats, on_state=on_state, on_output=on_output)
        return Engine(index, client, now())

    def start(self) -> None:
        """Connects to the engines, again and again; needs a running event loop."""
        self._tasks = [asyncio.create_task(engine.client.run()) for engine in self.engines]

    async def stop(self) -> None:
        self._letting_go = True
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def _changed(self, engine: Engine, state: EngineState) -> None:
        ready = engine.client.ready
        if state.kind == "ready" and ready is not None:
            engine.was_ready = True
            self.metrics.engine_up(engine.index, ready)
            log.info("engine %s serves: %d KV blocks of %d tokens", engine.label, ready.kv_blocks, ready.block_tokens)
        elif state.kind in ("down", "failed") and not self._letting_go:
            self.metrics.engine_down(engine.index)
            engine.since_s = now()
            if engine.was_ready or state.kind == "failed":
                log.error("engine %s is gone: %s", engine.label, state.message or "its connection ended")

    def _count_step(self, engine: Engine, output: Output) -> None:
        """Tokens of a step as the reference engine counts them: a prompt counts whole, with its first token."""
        tokens = 0
        for delta in output.deltas:
            generation = engine.open.get(delta.id)
            if generation is not None and delta.ids:
                tokens += len(delta.ids) + generation.take_prompt()
        if tokens:
            self.metrics.observe("iteration_tokens", tokens, engine.label)

    @property
    def serves(self) -> bool:
        return any(engine.serves for engine in self.engines)

    @property
    def open(self) -> int:
        return sum(len(engine.open) for engine in self.engines)

    @property
    def waiting(self) -> int:
        """Requests without a first token that no engine reported as running, an estimate at most a step old."""
        unstarted = sum(not generation.started for engine in self.engines for generation in engine.open.values())
        running = sum(engine.client.stats.running for engine in self.engines if engine.serves)
        return min(unstarted, max(0, self.open - running))

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of all requests without a first token. Each choice of a request counts its prompt; what a
        running one has computed of it, or will find in the prefix cache, only its engine knows."""
        generations = (generation for engine in self.engines for generation in engine.open.values())
        return sum(len(generation.submit.prompt) for generation in generations if not generation.started)

    def generate(self, submit: Submit, where: Placement = ANYWHERE) -> Generation:
        """Gives the request to an engine. Raises Unavailable when none serves, or not the one it wants, Overloaded when
        too much waits, RequestError for an engine that does not exist. `submit.id` need not be unique."""
        return self.generate_all([submit], where)[0]

    def generate_all(self, submits: Sequence[Submit], where: Placement = ANYWHERE) -> list[Generation]:
        """The same for several sequences of one request: all are admitted or none."""
        wanted = self._wanted(where)
        self._admit()
        return [self._open(submit, wanted or self._least_loaded()) for submit in submits]

    def load(self) -> Load:
        stats = [engine.client.stats for engine in self.engines if engine.serves]
        used, total = sum(each.kv_blocks_used for each in stats), sum(each.kv_blocks_total for each in stats)
        return Load(used / max(1, total), sum(each.waiting for each in stats))

    def abort_all(self) -> None:
        """Ends every open request: its stream gets a last delta with finish "abort"."""
        for engine in self.engines:
            engine.client.abort(list(engine.open))

    def _admit(self) -> None:
        if not self.serves:
            raise Unavailable(self._why_not(), self._retry_after_s(self.engines))
        self._refuse_over(self.admission, self.waiting, "max_num_queued_reqs", BUSY)
        self._refuse_over(self.backlog, self.waiting_tokens, "max_num_queued_tokens", BACKLOG)

    def _refuse_over(self, admission: Admission, waiting: int, reason: str, message: str) -> None:
        if admission.is_full(waiting):
            self.metrics.add("admission_rejections", 1, reason)
            log.info("a request is refused: %d wait, the limit is %d (%s)", waiting, admission.limit, reason)
            raise Overloaded(message, admission.retry_after_s(waiting, now()))

    def _wanted(self, where: Placement) -> Engine | None:
        """The engine that the request wants, or None where any will do."""
        if where.rank is not None:
            return self._of_rank(where.rank)
        serving = [engine for engine in self.engines if engine.serves]
        if not where.session or not serving:
            return None
        # The highest of one draw an engine: when an engine goes, only its own sessions move, and they come back to it.
        return max(serving, key=lambda engine: _draw(where.session, engine.index))

    def _of_rank(self, rank: int) -> Engine:
        name, last = "X-data-parallel-rank", len(self.engines) - 1
        if not 0 <= rank <= last:
            possible = f"0 to {last}" if last else "0 only"
            message = f"{name} {rank}: there is no such engine; possible: {possible} (parallelism.data is {last + 1})."
            raise RequestError(message, name)
        engine = self.engines[rank]
        if not engine.serves and self.serves:
            message = f"Engine {rank}, which {name} names, is not ready: {engine.phase} ({engine.progress:.0%})."
            raise Unavailable(f"{message} Leave the header out to use another one.", self._retry_after_s([engine]))
        return engine

    def _least_loaded(self) -> Engine:
        return min((engine for engine in self.engines if engine.serves), key=lambda each: len(each.open))

    def _open(self, submit: Submit, engine: Engine) -> Generation:
        engine_id = f"{submit.id}#{next(self._numbers)}"
        engine.open[engine_id] = Generation(self, engine, submit, engine_id)
        return engine.open[engine_id]

    def _why_not(self) -> str:
        best = max(self.engines, key=lambda engine: engine.progress)
        return f"The service is not ready: {best.phase} ({best.progress:.0%}). GET /ready shows its progress."

    def _retry_after_s(self, engines: Sequence[Engine]) -> int:
        loading = [engine for engine in engines if engine.client.state.kind == "loading"]
        if not loading:
            return GONE_RETRY_AFTER_S
        return min(loading_retry_after_s(now() - engine.since_s, engine.progress) for engine in loading)


def _draw(session: str, engine: int) -> bytes:
    """A number by session and engine, the same in every process."""
    return hashlib.blake2b(session.encode(), salt=engine.to_bytes(8, "big")).digest()
