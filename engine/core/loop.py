"""The engine's loop: receives messages, plans step n+1 while step n runs, applies the result of step n, sends outputs.

It owns the scheduler and runs in one thread; `post`, `call`, `stop` and `probe` may be called from any thread. Without
work it blocks on its inbox.
"""

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Literal, Protocol

import msgspec

from engine.api.config import EngineConfig, StepCosts
from engine.api.errors import EngineError, EngineGone, RequestError
from engine.api.events import Event, TimelineEvents
from engine.api.golden import REPLY_TOKENS, Arithmetic, Prompt, prompts
from engine.api.heartbeat import State
from engine.api.messages import (
    Abort,
    Control,
    Delta,
    Failed,
    Finish,
    FromEngine,
    LoadAdapter,
    Output,
    Pooling,
    PoolingTask,
    Profile,
    Profiled,
    RankMemory,
    Submit,
    ToEngine,
    UnloadAdapter,
)
from engine.core.adapter_loads import AdapterLoads, AdapterStore
from engine.core.config import EncoderLimits, PooledTasks, SchedulerConfig
from engine.core.golden import HealthCheck, Run, SelfTestRunner
from engine.core.grammars import Grammars, OpenCompiler
from engine.core.media import MediaLimits
from engine.core.plan import Masks, PendingMasks, StepPlan, StepResult
from engine.core.profiler import OperationTrace, Profiler
from engine.core.recorder import Recorder
from engine.core.scheduler import Planned, Scheduler
from engine.core.step_costs import StepCounter
from engine.kv.layout import Layout
from engine.models.parts import Model, Pooler, attentions, is_bidirectional

TimedEvent = tuple[str, float, Event]

ADAPTER_WAIT_S = 0.1  # interval of heartbeats while all requests wait for adapters to be read
STATS_S = 0.1  # minimum interval between Stats


class Handle(Protocol):
    def result(self) -> StepResult:
        """Wait for the step and return its result. Raises the step's exception."""


class Worker(Protocol):
    """Interface of a device. Steps run in the order in which they are started."""

    model: Model
    layout: Layout
    blocks: int  # including the null block
    snapshots: int | None  # of recurrent state; None for a model without
    weight_bytes: int
    kv_bytes: int
    memory: tuple[RankMemory, ...]
    seconds: dict[str, float]
    reserved: tuple[int, ...]  # additional blocks for golden prompts
    arithmetic: Arithmetic  # determines the outputs together with the weights

    @property
    def adapters(self) -> AdapterStore | None:
        """LoRA adapters by version. None: they do not change after the start."""

    def start(self, plan: StepPlan, masks: Masks | PendingMasks) -> Handle:
        """Start a step without waiting for it. Late masks are set before the result is awaited."""

    def call(self, function: Callable[[], None]) -> Future[None]:
        """Run a function in the worker's thread, after the steps that were started."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A step that was started."""

    planned: Planned
    handle: Handle
    limited: list[int]  # rows that may need a mask
    late: PendingMasks | None  # masks to be set later
    at: float  # time of the start


class Loop:
    """Runs the scheduler and the worker.

    send: called in the loop's thread; must not block.
    events: list to which the scheduler adds events.
    on_idle: called before the loop sleeps or ends; must not block.
    heartbeat: called before the loop waits for a step (BUSY) and before it sleeps (IDLE).
    self_test: golden prompts to run while idle.
    pooling: parameters of the health check, for a pooling model.
    encoder_decoder: the model is an encoder-decoder.
    adapters: folders of the LoRA adapters at the start.
    adapter_store: reads adapters while the engine runs; None if they do not change.
    costs: of steps; None: operations and memory traffic are not counted.
    profiler: None if the configuration has no folder for its files."""

    def __init__(
        self,
        scheduler: Scheduler,
        worker: Worker,
        send: Callable[[list[FromEngine]], None],
        *,
        overlap: bool = True,
        grammars: Grammars | None = None,
        events: list[TimedEvent] | None = None,
        on_idle: Callable[[], None] | None = None,
        heartbeat: Callable[[State], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        self_test: SelfTestRunner | None = None,
        pooling: Pooling | None = None,
        encoder_decoder: bool = False,
        adapters: dict[str, str] | None = None,
        adapter_store: AdapterStore | None = None,
        costs: StepCosts | None = None,
        profiler: Profiler | None = None,
    ) -> None:
        self.scheduler = scheduler
        scheduler.drafting.clock = clock
        self._pooling, self._encoder_decoder = pooling, encoder_decoder
        self.drained = False
        self._worker, self._send, self._clock = worker, send, clock
        self._step_counter, self._profiler = StepCounter(costs), profiler
        self._idle_hook = on_idle or _nothing
        self._heartbeat = heartbeat or _no_heartbeat
        self._depth = 2 if overlap else 1
        self._grammars = grammars or Grammars(None)
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._out: list[FromEngine] = []
        self._events = [] if events is None else events
        self._adapters = AdapterLoads(
            scheduler,
            adapter_store,
            adapters or {},
            call=self.call,
            send=lambda message: self._out.append(message),
            submit=self._submit,
        )
        self._stopping = self._draining = False
        self._jumps_ahead = scheduler.config.speculation.enabled
        self._stats_at, self._stats_stale = 0.0, True
        self._self_test, self._probing, self._idle_since = self_test, False, clock()

    # Called from any thread

    def post(self, messages: list[ToEngine], accepts: Callable[[], bool] | None = None) -> None:
        """Queue messages with the time of their arrival. They are dropped if `accepts`, which the loop's thread calls,
        returns False."""
        self._inbox.put(partial(self._receive, messages, self._clock(), accepts))

    def call(self, function: Callable[[], None]) -> None:
        """Run a function in the loop's thread, in order with the messages."""
        self._inbox.put(function)

    def stop(self) -> None:
        self._inbox.put(self._stop)

    def probe(self) -> None:
        """Run a golden prompt that is due, or else a health check, if there is no work."""
        self._inbox.put(self._request_probe)

    # In the loop's thread

    def run(self) -> None:
        """Run until `stop`, or until drained. Raises a step's exception, after which the device's state is unknown, or
        Drift, before another step of a request is planned."""
        in_flight: deque[_InFlight] = deque()
        try:
            self._run(in_flight)
        finally:
            for step in in_flight:  # otherwise the worker would wait for the masks, and the process could not exit
                if step.late is not None and not step.late.done():
                    step.late.set_result({})
        for step in in_flight:
            step.handle.result()
        self._grammars.close()
        self._idle_hook()

    def _run(self, in_flight: deque[_InFlight]) -> None:
        """Loop until stopped. Steps that are still running then stay in `in_flight`."""
        while True:
            idle = not in_flight and self._idle
            if idle:
                self._on_idle()
            if not in_flight and self._adapters.busy and self.scheduler.waiting_for_adapters:
                self._wait_for_adapters()
            self._handle_messages(wait=idle)
            if self._stopping:
                return
            if self._probing:
                self._probing = False
                if not in_flight and self._idle:
                    self._run_probe()
                if self._stopping:
                    return
            now = self._clock()
            if not self._idle:
                self._idle_since = now
            if self.scheduler.late(now):
                self._expire(now)
            planned = self.scheduler.plan(now)
            self._adapters.apply()
            if planned is not None:
                in_flight.append(self._start(planned))
            assert in_flight or self._adapters.busy or not (self.scheduler.running or self.scheduler.waiting), (
                "requests are queued but no step can run"
            )
            if in_flight and (planned is None or len(in_flight) == self._depth):
                step = in_flight.popleft()
                self._heartbeat(State.BUSY)
                result = step.handle.result()
                self._measure(step)
                self._apply(result)
                for step in in_flight:  # at most one; all tokens before its own are known now
                    if step.late is not None:
                        step.late.set_result(self._masks(step.planned, step.limited))
            self._flush()

    def _measure(self, step: _InFlight) -> None:
        """Count the time of a step that has ended."""
        ended = self._clock()
        self._step_counter.took(step.at, ended)
        if self._profiler is not None and self._profiler.active:
            pool = self.scheduler.cache.pool
            load = {"running": self.scheduler.running, "waiting": self.scheduler.waiting, "kv_blocks": pool.used}
            self._profiler.step(step.planned.plan, step.planned.at, step.at, ended, load)

    @property
    def _idle(self) -> bool:
        return not self.scheduler.running and not self.scheduler.waiting

    def _request_probe(self) -> None:
        self._probing = True

    def _run_probe(self) -> None:
        """Run the steps of a golden prompt or health check. Messages are handled between steps; a request cancels
        it."""
        began = self._clock()
        golden = None if self._self_test is None else self._self_test.next(began, self._idle_since)
        run: Run | HealthCheck = golden or HealthCheck(
            self._worker.layout, self._pooling, encoder_decoder=self._encoder_decoder
        )
        while (plan := run.plan()) is not None:
            if self._stopping or not self._idle:
                break
            self._heartbeat(State.BUSY)
            run.apply(self._worker.start(plan, {}).result())
            self._handle_messages(wait=False)
        if self._self_test is None or golden is None:
            return
        self._stats_stale = True
        if plan is None:
            self._self_test.finish(golden, self._clock() - began, self._clock())
        else:
            self._self_test.count_yield()

    def end_all(self) -> None:
        """Abort every request without sending deltas."""
        self.scheduler.end_all()
        self._grammars.drop_all()
        self._adapters.drop_all()

    def _handle_messages(self, *, wait: bool) -> None:
        """Handle all queued messages. `wait`: block until there is at least one."""
        try:
            while True:
                self._inbox.get(block=wait)()
                wait = False
        except Empty:
            return

    def _wait_for_adapters(self) -> None:
        """Wait for a message, such as that an adapter has been read, unless other requests can run."""
        if self.scheduler.running or self.scheduler.waiting > self.scheduler.waiting_for_adapters:
            return
        self._heartbeat(State.BUSY)
        with suppress(Empty):
            self._inbox.get(timeout=ADAPTER_WAIT_S)()

    def _on_idle(self) -> None:
        """Prepare for an idle period."""
        if self._draining and not self._grammars.compiling:
            self.drained = True
            self._stop()
        if self._stats_stale:
            self._report()
        self._flush()
        self._idle_hook()
        self._heartbeat(State.IDLE)

    def _stop(self) -> None:
        self._stopping = True
        self._inbox.put(_nothing)  # wakes the loop if it is about to sleep

    def _flush(self) -> None:
        if self._events:
            self._out.append(TimelineEvents(tuple(self._events)))
            self._events.clear()
        if self._out:
            out, self._out = self._out, []
            self._send(out)

    def _receive(self, messages: list[ToEngine], arrived: float, accepts: Callable[[], bool] | None) -> None:
        if accepts is not None and not accepts():
            return
        for message in messages:
            match message:
                case Submit():
                    self._submit(message, arrived)
                case Abort(ids):
                    self._abort(ids)
                case LoadAdapter():
                    self._stats_stale = True
                    self._adapters.load(message)
                case UnloadAdapter(name):
                    self._stats_stale = True
                    self._adapters.unload(name)
                case Profile(verb):
                    self._profile(verb)
                case Control(verb="stats"):
                    self._report()
                case Control(verb="reset_prefix_cache"):
                    self.scheduler.reset_prefix_cache()
                case Control(verb="drain"):
                    self._draining = True

    def _profile(self, verb: Literal["start", "stop"]) -> None:
        try:
            if self._profiler is None:
                raise RequestError("the profiler is off; set observability.profiler_folder")
            change = self._profiler.start if verb == "start" else self._profiler.stop
            change(lambda answer: self.call(lambda: self._out.append(answer)))
        except RequestError as error:
            self._out.append(Profiled(error=str(error)))

    def _submit(self, submit: Submit, arrived: float) -> None:
        self._stats_stale = True
        try:
            if self._draining:
                raise EngineGone("the engine is shutting down; send the request to another engine")
            if self._adapters.holds(submit, arrived):
                return
            if submit.grammar is None and submit.thinking is None:
                self._admit(submit, arrived)
            else:
                self.scheduler.check(submit)
                self._grammars.start(submit, arrived, lambda done: self.call(lambda: self._compiled(submit, done)))
        except EngineError as error:
            self._refuse(submit.id, error)

    def _compiled(self, submit: Submit, future: Future[Any]) -> None:
        try:
            arrived = self._grammars.finish(submit, future)
            if arrived is not None:
                self._admit(submit, arrived)
        except RequestError as error:
            self._grammars.drop(submit.id)
            self._refuse(submit.id, error)

    def _admit(self, submit: Submit, arrived: float) -> None:
        delta = self.scheduler.submit(submit, arrived)
        if delta is not None:
            self._grammars.drop(submit.id)
            self._out.append(Output(self.scheduler.step, (delta,)))

    def _abort(self, ids: tuple[str, ...]) -> None:
        deltas = []
        for id in ids:
            delta = self.scheduler.end(id, "abort")
            if self._grammars.drop(id) or self._adapters.drop(id):
                delta = Delta(id, finish="abort")
            if delta is not None:
                deltas.append(delta)
        if deltas:
            self._stats_stale = True
            self._out.append(Output(self.scheduler.step, tuple(deltas)))

    def _expire(self, now: float) -> None:
        deltas = self.scheduler.expire(now)
        for delta in deltas:
            self._grammars.drop(delta.id)
        if deltas:
            self._stats_stale = True
            self._out.append(Output(self.scheduler.step, tuple(deltas)))

    def _refuse(self, id: str, error: EngineError) -> None:
        param = error.param if isinstance(error, RequestError) else None
        self._out.append(Failed(id, error.code, str(error), param))

    # Steps

    def _start(self, planned: Planned) -> _InFlight:
        """Start a planned step. Masks that depend on pending tokens are set later."""
        limited = self._grammars.limited(planned)
        late = PendingMasks() if any(planned.sequences[row].pending > 1 for row in limited) else None
        masks = self._masks(planned, limited) if late is None else late
        self._step_counter.count(planned.plan)
        return _InFlight(planned, self._worker.start(planned.plan, masks), limited, late, self._clock())

    def _masks(self, planned: Planned, limited: list[int]) -> Masks:
        if not limited:
            return {}
        masks, failed = self._grammars.masks(planned, limited, self._clock)
        for id, error in failed:  # the row runs without a mask, and its token is ignored
            self._fail(id, error)
        return masks

    def _apply(self, result: StepResult) -> None:
        now = self._clock()
        applied = self.scheduler.apply(result, now)
        deltas = [self._advance_matcher(delta) if delta.id in self._grammars else delta for delta in applied.deltas]
        for delta in deltas:
            if delta.finish is None and delta.id in self._grammars and self._jumps_ahead:
                self._set_draft(delta.id)
        self._out += applied.failed
        if deltas:
            self._out.append(Output(result.step, tuple(deltas)))
        self._stats_stale = True
        if now - self._stats_at >= STATS_S:
            self._report()

    def _set_draft(self, id: str) -> None:
        """Draft forced text, or else end the draft of a model where the grammar does not allow it."""
        drafts, forced = self.scheduler.proposed(id), self._grammars.forced(id)
        allowed = forced or self._grammars.allowed(id, drafts)
        if allowed != drafts:
            self.scheduler.propose(id, allowed)

    def _advance_matcher(self, delta: Delta) -> Delta:
        """Advance the request's matcher, which may end the request."""
        try:
            if self._grammars.advance(delta):
                ended = self._end(delta.id, "stop")
                return msgspec.structs.replace(delta, finish="stop", timing=ended.timing)
        except RequestError as error:
            self._fail(delta.id, error)
        return delta

    def _fail(self, id: str, error: RequestError) -> None:
        self._refuse(id, error)
        self._out.append(Output(self.scheduler.step, (self._end(id, "error"),)))

    def _end(self, id: str, finish: Finish) -> Delta:
        delta = self.scheduler.end(id, finish)
        self._grammars.drop(id)
        assert delta is not None, "only open requests have a matcher"
        return delta

    def _report(self) -> None:
        self._stats_at, self._stats_stale = self._clock(), False
        stats, counters = self.scheduler.stats(), self._grammars.counters()
        stats = msgspec.structs.replace(
            stats,
            waiting=stats.waiting + self._grammars.compiling,
            grammars_compiled=counters.compiled,
            grammars_cached=counters.cached,
            grammar_seconds=counters.compile_seconds,
            masks=counters.masks,
            mask_seconds=counters.mask_seconds,
            adapter_loads=self._adapters.loads,
            adapter_load_seconds=self._adapters.load_seconds,
            flops=self._step_counter.flops,
            read_bytes=self._step_counter.read_bytes,
            step_seconds=self._step_counter.seconds,
        )
        if self._self_test is not None:
            counts = self._self_test.counts
            stats = msgspec.structs.replace(
                stats, self_tests=counts.runs, self_test_yields=counts.yields, self_test_s=counts.seconds
            )
        self._out.append(stats)
        self.scheduler.counters.steps.clear()


def build_loop(
    config: EngineConfig,
    worker: Worker,
    send: Callable[[list[FromEngine]], None],
    open_compiler: OpenCompiler | None = None,
    heartbeat: Callable[[State], None] | None = None,
    self_test: SelfTestRunner | None = None,
    trace: OperationTrace | None = None,
) -> Loop:
    """Build the loop for a worker of the same configuration. trace: of the worker's operations, for the profiler."""
    settings = scheduler_config(
        config, worker.model, layout=worker.layout, blocks=worker.blocks, snapshots=worker.snapshots
    )
    grammars, events, on_idle = Grammars(open_compiler), list[TimedEvent](), None

    def notify(id: str, now: float, event: Event) -> None:
        events.append((id, now, event))

    if config.record is None:
        scheduler = Scheduler(settings, notify)
    else:
        scheduler = recorder = Recorder(settings, config.record, config.record_size, notify)
        on_idle = recorder.on_idle
    pooled = settings.pooled
    return Loop(
        scheduler,
        worker,
        send,
        overlap=config.scheduling.overlap,
        grammars=grammars,
        events=events,
        on_idle=on_idle,
        heartbeat=heartbeat,
        self_test=self_test,
        pooling=None if pooled is None else Pooling(pooled.tasks[0]),
        encoder_decoder=settings.sources is not None,
        adapters={adapter.name: adapter.path for adapter in config.adapters},
        adapter_store=worker.adapters,
        costs=config.observability.step_costs,
        profiler=_profiler(config, trace),
    )


def _profiler(config: EngineConfig, trace: OperationTrace | None) -> Profiler | None:
    folder = config.observability.profiler_folder
    if not folder or trace is None:
        return None
    return Profiler(Path(folder), Path(config.socket).stem or "engine", trace)


def scheduler_config(
    config: EngineConfig, model: Model, *, layout: Layout, blocks: int, snapshots: int | None
) -> SchedulerConfig:
    """Return the configuration of the scheduler. `blocks` includes the null block. `snapshots` is None for a model
    without recurrent state."""
    ropes = dict.fromkeys(part.rope for part in attentions(model) if part.rope is not None)
    return SchedulerConfig(
        layout=layout,
        blocks=blocks,
        max_context=config.model.max_context,
        vocab_size=model.embed.vocab,
        max_running=config.scheduling.max_running,
        max_step_tokens=config.scheduling.max_step_tokens,
        policy=config.scheduling.policy,
        prefix_cache=config.cache.prefix,
        ropes=tuple(ropes),
        pooled=pooled_tasks(model),
        whole=is_bidirectional(model) and not model.encoder_only,
        sources=encoder_limits(model),
        snapshots=snapshots,
        adapters=tuple(adapter.name for adapter in config.adapters),
        adapter_slots=config.adapter_loading.max_active,
        speculation=config.speculation,
        media=media_limits(model, config.scheduling.max_media_tokens),
        routes=config.return_routed_experts,
    )


def build_self_test(config: EngineConfig, worker: Worker, texts: tuple[Prompt, ...] = ()) -> SelfTestRunner | None:
    """Return the self-test with the golden prompts of the lock file first, then generated ones and `texts`; None if
    it is disabled."""
    wanted, locked = config.lifecycle.self_test, config.lifecycle.self_test.locked
    if not wanted.prompts or worker.model.audio is not None:  # golden prompts are text
        return None
    block_tokens = worker.layout.block_tokens
    groups, longest = len(worker.layout.groups), config.model.max_context
    if groups:
        longest = min(longest, len(worker.reserved) // groups * block_tokens)
    known = [one.prompt for one in locked.goldens] if locked else []
    chosen = [prompt for prompt in known if len(prompt.ids) + REPLY_TOKENS <= longest]
    names = {prompt.name for prompt in known}
    own = prompts(
        wanted.prompts,
        vocab=worker.model.embed.vocab,
        block_tokens=block_tokens,
        longest=longest,
        texts=texts,
        encoder_decoder=worker.model.encoder is not None,
    )
    chosen = [*chosen, *(prompt for prompt in own if prompt.name not in names)][: wanted.prompts]
    if not chosen:
        return None
    return SelfTestRunner(
        wanted, worker.arithmetic, chosen, worker.layout, worker.reserved, config.scheduling.max_step_tokens
    )


def pooled_tasks(model: Model) -> PooledTasks | None:
    """Return the pooling tasks of a model, or None if it generates."""
    pooler, segments = model.pooler, model.embed.segments
    if pooler is None:
        return None
    return PooledTasks(
        tasks=_tasks(pooler),
        width=pooler.width,
        last=pooler.pool == "last",
        dimensions=pooler.dimensions,
        any_dimensions=pooler.any_dimensions,
        segments=1 if segments is None else segments.count,
    )


def encoder_limits(model: Model) -> EncoderLimits | None:
    """Return the length limits of an encoder-decoder model, or None for other models."""
    if model.encoder is None:
        return None
    audio = model.audio
    return EncoderLimits(
        longest=model.max_encoder_input,
        reply=model.max_context - model.max_encoder_input,
        spectrogram=None if audio is None else (audio.mels, audio.frames),
    )


def media_limits(model: Model, step_tokens: int) -> MediaLimits | None:
    """Return the media that a model reads, or None if it reads only text."""
    media = model.media
    if media is None:
        return None
    windows = [part.window for part in attentions(model) if part.window is not None]
    return MediaLimits(
        modalities=media.modalities,
        step_tokens=media.step_embeddings(step_tokens),
        attention=media.attention,
        window=min(windows, default=None),
        is_vector=media.is_vector,
        encoder_only=model.encoder_only,
    )


def _tasks(pooler: Pooler) -> tuple[PoolingTask, ...]:
    if pooler.task != "embed":
        return (pooler.task,)
    return ("embed", "token_embed") if pooler.whole else ("token_embed",)


def _nothing() -> None:
    """Do nothing. Put into the inbox, it wakes the loop."""


def _no_heartbeat(state: State) -> None:
    """Ignore the state: no monitor is configured."""
