"""The gateway's end of an engine's socket, for asyncio. It connects for ever; engines come and go under it.

Requests belong to the caller: when an engine dies, each open one gets an `Interrupted` that holds what is needed to go
on with another engine.
"""

import asyncio
import random
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
from engine.api.events import Told
from engine.api.frames import FrameReader, encode, from_engine
from engine.api.messages import (
    Abort,
    Control,
    Delta,
    Failed,
    FromEngine,
    Loading,
    Output,
    Ready,
    Stats,
    Submit,
    ToEngine,
)

READ_BYTES = 1 << 18
RETRY_S = (0.05, 0.5)  # first wait between connections that fail, and the longest
_BY_CODE = {error.code: error for error in (EngineGone, StepError, ConfigError, CheckpointError, OutOfMemory)}


class EngineState(msgspec.Struct, frozen=True):
    """`failed`: the engine said why it cannot serve (`message`, and the word `code`) and is not back. `fraction` of
    `phase` is done."""

    kind: Literal["down", "loading", "ready", "failed"]
    phase: str = ""
    fraction: float = 0.0
    message: str = ""
    detail: str = ""
    code: str = ""

    def __str__(self) -> str:
        if self.kind == "loading":
            return f"{self.phase} {self.fraction:.0%}"
        return f"{self.kind}: {self.message}" if self.message else self.kind


DOWN = EngineState("down", message="the engine is not running")


class Interrupted(EngineGone):
    """The engine ended under an open request. `emitted` are all ids it ever gave, those of `submit.emitted` first."""

    def __init__(self, message: str, submit: Submit, emitted: tuple[int, ...]) -> None:
        super().__init__(message)
        self.submit = submit
        self.emitted = emitted

    def resume(self) -> Submit:
        """The same request, to be continued by another engine: its tokens are those that this one would have given."""
        return msgspec.structs.replace(self.submit, emitted=self.emitted)


class Stream:
    """What one request gains, its last delta having `finish` set. The request is sent when the first one is asked for;
    `aclose` before the last one aborts it. Deltas that wait are merged, so a slow reader costs no memory.

    Raises RequestError, StepError, EngineGone (nothing was sent) or Interrupted (see there)."""

    def __init__(self, client: "EngineClient", submit: Submit) -> None:
        self.submit = submit
        self.emitted = list(submit.emitted)
        self.error: EngineError | None = None
        self._client = client
        self._begun = self._over = False
        self._waiting: list[Delta] = []
        self._reader: asyncio.Future[None] | None = None

    # The client's side

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
        """Whether the reader can still take an end that the engine gave it: a last delta, or an error of its own."""
        ended = any(delta.finish not in (None, "error") for delta in self._waiting)
        return ended or (self.error is not None and not isinstance(self.error, EngineGone))

    def begin(self) -> None:
        """Send the request now rather than at the first take, which raises the error if there is one."""
        if self._begun:
            return
        try:
            self._begin()
        except EngineError as error:
            self._over, self.error = False, error

    def detach(self, *, abort: bool = False) -> Delta | None:
        """End the stream for its reader, who gets what came and was not taken from here. `abort`: tell the engine."""
        self._begun = True
        deltas, self._waiting = self._waiting, []
        self._close(left=abort)
        self._wake()
        return merge(deltas) if deltas else None

    # The reader's side

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        """All that came since the last call, as one. Who is cancelled while it waits has left."""
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
        """The same, None while nothing came. What came before an error is given before it is raised."""
        if not self._begun:
            self._begin()
        if self._waiting and (delta := self._taken()) is not None:
            return delta
        if self.error is not None and not self._over:
            self._close()
            raise self.error
        return None

    def change(self) -> asyncio.Future[None]:
        """Done once there is something to take."""
        self._reader = asyncio.get_running_loop().create_future()
        return self._reader

    async def aclose(self) -> None:
        self._begun = True
        self._close(left=True)

    def _begin(self) -> None:
        self._begun = self._over = True  # unless the client takes it
        self._client.submit(self)
        self._over = False

    def _taken(self) -> Delta | None:
        deltas, self._waiting = self._waiting, []
        delta = deltas[0] if len(deltas) == 1 else merge(deltas)
        if delta.finish == "error":
            delta = msgspec.structs.replace(delta, finish=None)  # `error` tells why
        elif delta.finish is not None:
            self._close()
            return delta
        return delta if delta.ids or delta.prompt_logprobs is not None else None

    def _close(self, *, left: bool = False) -> None:
        """`left`: the engine need not go on with it."""
        if not self._over:
            self._over = True
            if self._client.forget(self) and left and self.error is None:
                self._client.abort([self.submit.id])


class EngineClient:
    """`run` has to run as a task. The callbacks are called in the event loop and must not block."""

    def __init__(
        self,
        socket_path: str,
        *,
        on_stats: Callable[[Stats], None] | None = None,
        on_state: Callable[[EngineState], None] | None = None,
        on_output: Callable[[Output], None] | None = None,
        on_told: Callable[[Told], None] | None = None,
    ) -> None:
        self.path = socket_path
        self.state = DOWN
        self.ready: Ready | None = None
        self.stats = Stats()
        self._on_stats, self._on_state, self._on_output, self._on_told = on_stats, on_state, on_output, on_told
        self._streams: dict[str, Stream] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._is_ready = asyncio.Event()

    @property
    def open(self) -> int:
        return len(self._streams)

    async def run(self) -> None:
        """Connects, serves the connection until it ends, and again, until cancelled."""
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
        """The request under way, once it is read."""
        return Stream(self, submit)

    def submit(self, stream: Stream) -> None:
        """Sends its request. Raises EngineGone where there is no engine, RequestError for an id that is in use."""
        submit = stream.submit
        if self.state.kind != "ready":
            raise EngineGone(f"the engine is not ready ({self.state})")
        if submit.id in self._streams:
            raise RequestError(f"request id {submit.id!r} is in use; ids of open requests must differ", "id")
        self._streams[submit.id] = stream
        self._send([submit])

    def forget(self, stream: Stream) -> bool:
        """Whether it was open."""
        if self._streams.get(stream.submit.id) is not stream:
            return False
        del self._streams[stream.submit.id]
        return True

    def abort(self, ids: Iterable[str]) -> None:
        """Their streams yield one more delta with finish "abort"."""
        self._send([Abort(tuple(ids))])

    def control(self, verb: Literal["stats", "reset_prefix_cache", "drain"]) -> None:
        self._send([Control(verb)])

    # One connection

    async def _serve(self, reader: asyncio.StreamReader) -> None:
        frames = FrameReader()
        with suppress(OSError, ValueError):  # broken, or not our frames: as good as an end
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
            case Told():
                if self._on_told is not None:
                    self._on_told(message)
            case Loading(phase, fraction, detail):
                self._become(EngineState("loading", phase, fraction, detail=detail))
            case Ready():
                self.ready = message
                self._become(EngineState("ready"))

    def _lose(self) -> None:
        """The connection ended: every open request learns it, with what it needs to go on elsewhere."""
        self._writer = None
        self.ready = None
        self.stats = Stats()
        for stream in list(self._streams.values()):
            message = "the engine ended under this request; send it again"
            stream.fail(Interrupted(message, stream.submit, tuple(stream.emitted)))
        self._streams.clear()
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
    """Several deltas of one request, in order, as one."""
    last = deltas[-1]
    return Delta(
        last.id,
        tuple(id for delta in deltas for id in delta.ids),
        logprobs=tuple(logprob for delta in deltas for logprob in delta.logprobs),
        prompt_logprobs=next((d.prompt_logprobs for d in deltas if d.prompt_logprobs is not None), None),
        finish=last.finish,
        stop_reason=last.stop_reason,
        timing=next((delta.timing for delta in reversed(deltas) if delta.timing is not None), None),
    )


def _error(failed: Failed) -> EngineError:
    if failed.code == RequestError.code:
        return RequestError(failed.message, failed.param)
    return _BY_CODE.get(failed.code, EngineError)(failed.message)
