"""Asyncio client of an engine's Unix socket, used by the gateway. It reconnects until it is cancelled.

If the connection ends, every open request fails with an `Interrupted` error, which has what another engine needs to
resume the request.
"""

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from typing import Literal

import msgspec

from engine.api.errors import (
    CheckpointError,
    ConfigError,
    EngineError,
    EngineGone,
    OutOfMemory,
    RequestError,
    StepError,
)
from engine.api.events import TimelineEvents
from engine.api.frames import FrameReader, encode, from_engine
from engine.api.messages import (
    Abort,
    AdapterChanged,
    Control,
    Delta,
    Failed,
    FromEngine,
    LoadAdapter,
    Loading,
    Output,
    Profile,
    Profiled,
    Ready,
    Stats,
    Submit,
    ToEngine,
    UnloadAdapter,
)

READ_BYTES = 1 << 18
RETRY_S = (0.05, 0.5)  # shortest and longest wait between two attempts to connect
_BY_CODE = {error.code: error for error in (EngineGone, StepError, ConfigError, CheckpointError, OutOfMemory)}


class EngineState(msgspec.Struct, frozen=True):
    """State of an engine as the gateway sees it."""

    kind: Literal["down", "loading", "ready", "failed"]  # failed: the engine reported an error and is not back yet
    phase: str = ""  # while loading
    fraction: float = 0.0  # of the phase that is done
    message: str = ""
    detail: str = ""
    code: str = ""  # EngineError.code of a failed engine

    def __str__(self) -> str:
        if self.kind == "loading":
            return f"{self.phase} {self.fraction:.0%}"
        return f"{self.kind}: {self.message}" if self.message else self.kind


DOWN = EngineState("down", message="the engine is not running")


class Interrupted(EngineGone):
    """The engine exited while a request was open. `emitted`: all token ids so far, including `submit.emitted`."""

    def __init__(self, message: str, submit: Submit, emitted: tuple[int, ...]) -> None:
        super().__init__(message)
        self.submit = submit
        self.emitted = emitted

    def resume(self) -> Submit:
        """Return the request to send to another engine, which continues with the same tokens."""
        return msgspec.structs.replace(self.submit, emitted=self.emitted)


class Stream:
    """Deltas of one request; the last one has `finish` set.

    The request is sent when the first delta is requested. `aclose` before the last delta aborts the request. Deltas
    that the reader has not taken yet are merged, so a slow reader costs no memory.

    Raises RequestError, StepError, EngineGone (the request was not sent) or Interrupted."""

    def __init__(self, client: "EngineClient", submit: Submit) -> None:
        self.submit = submit
        self.emitted = list(submit.emitted)
        self.error: EngineError | None = None
        self._client = client
        self._begun = self._over = False
        self._waiting: list[Delta] = []
        self._reader: asyncio.Future[None] | None = None

    # Called by the client

    def put(self, delta: Delta) -> None:
        self.emitted += delta.ids
        self._waiting.append(delta)
        self._wake()

    def fail(self, error: EngineError) -> None:
        self.error = error
        self._wake()

    def _wake(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():
            reader.set_result(None)

    @property
    def is_settled(self) -> bool:
        """Return whether the engine has ended the request: with a last delta, or with an error of the request."""
        ended = any(delta.finish not in (None, "error") for delta in self._waiting)
        return ended or (self.error is not None and not isinstance(self.error, EngineGone))

    def begin(self) -> None:
        """Send the request now instead of at the first `take`. An error is raised by that `take`."""
        if self._begun:
            return
        try:
            self._begin()
        except EngineError as error:
            self._over, self.error = False, error

    def detach(self, *, abort: bool = False) -> Delta | None:
        """Close the stream and return the deltas that were not taken, merged. `abort`: also abort the request."""
        self._begun = True
        deltas, self._waiting = self._waiting, []
        self._close(left=abort)
        self._wake()
        return merge(deltas) if deltas else None

    # Called by the reader

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        """Wait for deltas and return everything since the last call as one. Cancellation aborts the request."""
        try:
            while (delta := self.take()) is None:
                if self._over:
                    raise StopAsyncIteration
                await self.change()
        except asyncio.CancelledError:
            self._close(left=True)
            raise
        return delta

    def take(self) -> Delta | None:
        """Return everything since the last call as one delta, or None. Deltas before an error come before the error."""
        if not self._begun:
            self._begin()
        if self._waiting and (delta := self._taken()) is not None:
            return delta
        if self.error is not None and not self._over:
            self._close()
            raise self.error
        return None

    def change(self) -> asyncio.Future[None]:
        """Return a future that is done once there is something to take."""
        self._reader = asyncio.get_running_loop().create_future()
        return self._reader

    async def aclose(self) -> None:
        self._begun = True
        self._close(left=True)

    def _begin(self) -> None:
        self._begun = self._over = True  # stays so if `submit` raises
        self._client.submit(self)
        self._over = False

    def _taken(self) -> Delta | None:
        deltas, self._waiting = self._waiting, []
        delta = deltas[0] if len(deltas) == 1 else merge(deltas)
        if delta.finish == "error":
            delta = msgspec.structs.replace(delta, finish=None)  # self.error has the reason
        elif delta.finish is not None:
            self._close()
            return delta
        return delta if delta.ids or delta.prompt_logprobs is not None else None

    def _close(self, *, left: bool = False) -> None:
        """Close the stream. `left`: the reader left, so abort the request if it is still open."""
        if not self._over:
            self._over = True
            if self._client.forget(self) and left and self.error is None:
                self._client.abort([self.submit.id])


class EngineClient:
    """Connection to one engine. `run` has to run as a task. Callbacks run in the event loop and must not block."""

    def __init__(
        self,
        socket_path: str,
        *,
        on_stats: Callable[[Stats], None] | None = None,
        on_state: Callable[[EngineState], None] | None = None,
        on_output: Callable[[Output], None] | None = None,
        on_timeline: Callable[[TimelineEvents], None] | None = None,
        on_adapter: Callable[[AdapterChanged], None] | None = None,
    ) -> None:
        self.path = socket_path
        self.state = DOWN
        self.ready: Ready | None = None
        self.stats = Stats()
        self._on_stats, self._on_state, self._on_output, self._on_timeline = on_stats, on_state, on_output, on_timeline
        self._on_adapter = on_adapter
        self._streams: dict[str, Stream] = {}
        self._profiles: deque[asyncio.Future[Profiled]] = deque()  # open commands to the profiler
        self._writer: asyncio.StreamWriter | None = None
        self._is_ready = asyncio.Event()

    @property
    def open(self) -> int:
        return len(self._streams)

    async def run(self) -> None:
        """Connect and serve the connection until it ends, then reconnect; runs until cancelled."""
        wait = RETRY_S[0]
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(self.path)
            except OSError:
                await asyncio.sleep(wait * random.uniform(0.5, 1.0))
                wait = min(2 * wait, RETRY_S[1])
                continue
            wait = RETRY_S[0]
            self._writer = writer
            try:
                await self._serve(reader)
            finally:
                self._lose()
                writer.close()
                with suppress(OSError):
                    await writer.wait_closed()
            await asyncio.sleep(wait)

    async def wait_ready(self) -> None:
        await self._is_ready.wait()

    def generate(self, submit: Submit) -> Stream:
        """Return the stream of a request. The request is sent when the stream is first read."""
        return Stream(self, submit)

    def submit(self, stream: Stream) -> None:
        """Send the stream's request. Raises EngineGone without an engine, RequestError for an id that is in use."""
        submit = stream.submit
        if self.state.kind != "ready":
            raise EngineGone(f"the engine is not ready ({self.state})")
        if submit.id in self._streams:
            raise RequestError(f"request id {submit.id!r} is in use; ids of open requests must differ", "id")
        self._streams[submit.id] = stream
        self._send([submit])

    def forget(self, stream: Stream) -> bool:
        """Remove the stream. Returns whether it was open."""
        if self._streams.get(stream.submit.id) is not stream:
            return False
        del self._streams[stream.submit.id]
        return True

    def abort(self, ids: Iterable[str]) -> None:
        """Abort requests. Each stream yields one more delta, with finish "abort"."""
        self._send([Abort(tuple(ids))])

    def control(self, verb: Literal["stats", "reset_prefix_cache", "drain"]) -> None:
        self._send([Control(verb)])

    def send_adapter(self, message: LoadAdapter | UnloadAdapter) -> None:
        """Load or unload a LoRA adapter. The answer is passed to `on_adapter`."""
        self._send([message])

    async def profile(self, verb: Literal["start", "stop"]) -> Profiled:
        """Start or stop the engine's profiler. Raises EngineGone if the engine exits first."""
        if self.state.kind != "ready":
            raise EngineGone(f"the engine is not ready ({self.state})")
        answer: asyncio.Future[Profiled] = asyncio.get_running_loop().create_future()
        self._profiles.append(answer)
        self._send([Profile(verb)])
        return await answer

    # One connection

    async def _serve(self, reader: asyncio.StreamReader) -> None:
        frames = FrameReader()
        with suppress(OSError, ValueError):  # a broken connection or an invalid frame ends it like a close
            while data := await reader.read(READ_BYTES):
                for body in frames.feed(data):
                    for message in from_engine(body):
                        self._receive(message)

    def _receive(self, message: FromEngine) -> None:
        match message:
            case Output(deltas=deltas):
                if self._on_output is not None:
                    self._on_output(message)
                for delta in deltas:
                    stream = self._streams.get(delta.id)
                    if stream is not None:
                        stream.put(delta)
            case Stats():
                self.stats = message
                if self._on_stats is not None:
                    self._on_stats(message)
            case Failed(id=None):
                self._become(EngineState("failed", message=message.message, code=message.code))
            case Failed():
                stream = self._streams.get(message.id or "")
                if stream is not None:
                    stream.fail(_error(message))
            case AdapterChanged():
                if self._on_adapter is not None:
                    self._on_adapter(message)
            case Profiled():
                answer = self._profiles.popleft()
                if not answer.done():
                    answer.set_result(message)
            case TimelineEvents():
                if self._on_timeline is not None:
                    self._on_timeline(message)
            case Loading(phase, fraction, detail):
                self._become(EngineState("loading", phase, fraction, detail=detail))
            case Ready():
                self.ready = message
                self._become(EngineState("ready"))

    def _lose(self) -> None:
        """Handle the end of the connection: fail every open request with an error from which it can be resumed."""
        self._writer = None
        self.ready = None
        self.stats = Stats()
        for stream in list(self._streams.values()):
            message = "the engine exited while the request was open; send the request again"
            stream.fail(Interrupted(message, stream.submit, tuple(stream.emitted)))
        self._streams.clear()
        for answer in self._profiles:
            if not answer.done():
                answer.set_exception(EngineGone("the engine exited while it was profiled"))
        self._profiles.clear()
        if self.state.kind != "failed":
            self._become(DOWN)

    def _become(self, state: EngineState) -> None:
        self.state = state
        if state.kind == "ready":
            self._is_ready.set()
        else:
            self._is_ready.clear()
        if self._on_state is not None:
            self._on_state(state)

    def _send(self, messages: list[ToEngine]) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(encode(messages))


def merge(deltas: list[Delta]) -> Delta:
    """Return several consecutive deltas of one request as one."""
    last = deltas[-1]
    return Delta(
        last.id,
        tuple(id for delta in deltas for id in delta.ids),
        logprobs=tuple(logprob for delta in deltas for logprob in delta.logprobs),
        prompt_logprobs=next((d.prompt_logprobs for d in deltas if d.prompt_logprobs is not None), None),
        routes=tuple(route for delta in deltas for route in delta.routes),
        finish=last.finish,
        stop_reason=last.stop_reason,
        alignment=last.alignment,
        timing=next((delta.timing for delta in reversed(deltas) if delta.timing is not None), None),
    )


def _error(failed: Failed) -> EngineError:
    if failed.code == RequestError.code:
        return RequestError(failed.message, failed.param)
    return _BY_CODE.get(failed.code, EngineError)(failed.message)
