"""A fake engine with the real frames over a real Unix socket, and the gateway's application on a port."""

import asyncio
import itertools
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from fastapi import APIRouter, FastAPI, Request
from pydantic import BaseModel, Field
from starlette.responses import JSONResponse, Response, StreamingResponse

from appliance.config.gateway import GatewayConfig, with_values
from appliance.security.certificate import read_certificate
from appliance.security.keys import ApiKey, parse_keys
from appliance.server.app import build_app
from appliance.server.certificate_renewal import watched
from appliance.server.control import controlled
from appliance.server.errors.api import error_object
from appliance.server.http.body import json_body, read_body
from appliance.server.http.disconnect import until_disconnect
from appliance.server.http.headers import placement
from appliance.server.http.service import Service, service_of
from appliance.server.process import build_server, build_service, connected
from engine.api.frames import FrameReader, encode, to_engine
from engine.api.messages import (
    Abort,
    Control,
    Delta,
    Failed,
    FromEngine,
    Output,
    Pooled,
    Ready,
    Sampling,
    Stats,
    Submit,
    Timing,
)

PATIENCE_S = 100.0  # against hangs only; nothing is timed


@pytest.fixture(scope="session", autouse=True)
def use_shared_renderers(shared_renderers: None) -> None:
    """Share the processes for templates in all tests of this folder."""


def until(what: str, check: Callable[[], bool]) -> None:
    """Poll `check` until it is true. Raise AssertionError naming `what` after PATIENCE_S."""
    deadline = time.monotonic() + PATIENCE_S
    while not check():
        assert time.monotonic() < deadline, f"waited {PATIENCE_S:.0f} s in vain: {what}"
        time.sleep(0.005)


def pooled(submit: Submit) -> Pooled:
    """Return the fake engine's vector of a prompt: its length, first and last token."""
    values = (len(submit.prompt), submit.prompt[0], submit.prompt[-1])
    return Pooled((3,), struct.pack("<3f", *values))


class Sequence:
    """One submitted request in the fake engine: token n of its reply is 100 + n."""

    def __init__(self, submit: Submit, cached: int) -> None:
        self.submit = submit
        self.given = len(submit.emitted)
        self.arrived = time.monotonic()
        self.cached = cached

    def timing(self) -> Timing:
        # Thousandths, so that sums in tests are exact: queued 1 ms, prefill 2 ms, then 3 ms a token.
        first = self.arrived + 0.003
        return Timing(self.arrived, self.arrived + 0.001, first, first + 0.003 * (self.given - 1), self.cached)


class FakeEngine:
    """Fake engine: answers each Submit at once with max_tokens tokens, one Output and one Stats per step; with
    `holding`, only with as many tokens as `give` says. Runs in a thread with its own event loop."""

    READY = Ready(
        max_context=64, kv_blocks=10, block_tokens=4, kv_tokens=40, weight_bytes=1, kv_bytes=1, seconds={}, pid=1
    )

    def __init__(self, path: Path) -> None:
        self.path = path
        self.holding = False
        self.poison: int | None = None  # a prompt token that crashes it
        self.deaths: list[list[str]] = []  # keys that were open at each crash
        self.submits: list[Submit] = []
        self.aborted: list[str] = []
        self.open: dict[str, Sequence] = {}
        self.cached = 0
        self.refusal: Failed | None = None
        self.first: list[FromEngine] = [self.READY]
        self._stats = Stats(kv_blocks_total=10)
        self._writer: asyncio.StreamWriter | None = None
        self._server: asyncio.Server | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    # Called by tests -------------------------------------------------------------------------------------------------

    def start(self) -> "FakeEngine":
        self._call(self._listen())
        return self

    def say(self, *messages: FromEngine) -> None:
        self._call(self._say(*messages))

    def give(self, tokens: int = 1) -> None:
        """Send one token to every open request, `tokens` times; a complete request ends with finish length."""
        for _ in range(tokens):
            self._call(self._step())

    def die(self) -> None:
        """Crash as after kill -9: the connection closes, and the socket has no listener."""
        self._call(self._close())

    def stop(self) -> None:
        self.die()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def is_connected(self) -> bool:
        return self._writer is not None

    # In the engine's thread ------------------------------------------------------------------------------------------

    def _call(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)

    async def _listen(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, str(self.path))

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
            self.path.unlink(missing_ok=True)
        if self._writer is not None:
            self._writer.transport.abort()
            self._writer = None
        self.open.clear()
        self._stats = Stats(kv_blocks_total=10)

    async def _say(self, *messages: FromEngine) -> None:
        if self._writer is not None:
            self._writer.write(encode(list(messages)))
            await self._writer.drain()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        await self._say(*self.first)
        frames = FrameReader()
        try:
            while data := await reader.read(65536):
                for body in frames.feed(data):
                    for message in to_engine(body):
                        await self._take(message)
        except ConnectionError:
            pass
        finally:
            writer.close()
            if self._writer is writer:
                self._writer = None

    async def _take(self, message: Submit | Abort | Control) -> None:
        if isinstance(message, Submit):
            self.submits.append(message)
            if self.refusal is not None:
                refusal = Failed(message.id, self.refusal.code, self.refusal.message, self.refusal.param)
                return await self._say(refusal)
            self.open[message.id] = Sequence(message, self.cached)
            if self.holding:
                await self._tell(())
            while not self.holding and message.id in self.open:
                await self._step()
        elif isinstance(message, Abort):
            self.aborted += message.ids
            ended = [each for each in message.ids if self.open.pop(each, None) is not None]
            await self._say(Output(self._stats.step, tuple(Delta(each, finish="abort") for each in ended)))
            await self._tell(())

    async def _step(self) -> None:
        if any(self.poison in sequence.submit.prompt for sequence in self.open.values()):
            self.deaths.append(sorted(self.open))
            return await self._close()
        deltas, sizes = [], 0
        for sequence in list(self.open.values()):
            submit = sequence.submit
            sizes += len(submit.prompt) if sequence.given == 0 else 1
            sequence.given += 1
            ends = sequence.given >= submit.max_tokens
            timing = sequence.timing() if ends or sequence.given == 1 else None
            if submit.pooling is not None:
                deltas.append(Delta(submit.id, finish="stop", timing=timing, pooled=pooled(submit)))
            else:
                finish = "length" if ends else None
                deltas.append(Delta(submit.id, (99 + sequence.given,), finish=finish, timing=timing))
            if ends:
                del self.open[submit.id]
        await self._say(Output(self._stats.step + 1, tuple(deltas)))
        await self._tell((sizes,))

    async def _tell(self, sizes: tuple[int, ...]) -> None:
        running = sum(sequence.given > 0 for sequence in self.open.values())
        self._stats = Stats(
            step=self._stats.step + len(sizes),
            running=running,
            waiting=len(self.open) - running,
            kv_blocks_used=running,
            kv_blocks_total=10,
            prefix_queries=sum(len(submit.prompt) for submit in self.submits),
            prefix_hits=self.cached * len(self.submits),
            step_tokens=sizes,
        )
        await self._say(self._stats)


class GenerateBody(BaseModel):
    """Body of the test's own route, which drives the router like the text routes, without a tokenizer."""

    prompt: list[int] = [1, 2, 3]
    max_tokens: int = Field(default=2, ge=1)
    n: int = 1
    stream: bool = False
    stop_after: int | None = None
    seed: int = Field(default=0, ge=-(2**63), le=2**63 - 1)
    raises: str | None = None


RAISES: dict[str, Exception] = {
    "ValueError": ValueError("cannot read /srv/models/secret/file.bin of <Thing object at 0x7f00aa11bb22>"),
    "OverflowError": OverflowError("int too large"),
    "NotImplementedError": NotImplementedError("no such thing"),
    "KeyError": KeyError("/srv/models/secret/file.bin"),
    "RuntimeError": RuntimeError("canary-of-an-exception"),
}

test_routes = APIRouter()


@test_routes.post("/test/generate", openapi_extra=json_body(GenerateBody))
async def generate(request: Request) -> Response:
    service, body = service_of(request), await read_body(request, GenerateBody)
    request_id = request.state.request_id
    if body.raises:
        raise RAISES[body.raises]
    owner = request.state.key.owner if request.state.key else ""
    submits = [
        Submit(f"{request_id}-{n}", tuple(body.prompt), Sampling(), body.max_tokens, owner=owner) for n in range(body.n)
    ]
    generations = service.router.generate_all(submits, placement(request))

    async def collect() -> list[dict[str, Any]]:
        choices = []
        async with AsyncExitStack() as stack:
            for generation in [await stack.enter_async_context(each) for each in generations]:
                ids: list[int] = []
                finish = None
                async for delta in generation:
                    ids += delta.ids
                    finish = delta.finish
                    if body.stop_after is not None and len(ids) >= body.stop_after:
                        generation.stop()
                        finish = "stop"
                        break
                choices.append({"ids": ids, "finish": finish})
        return choices

    async def stream() -> Any:
        try:
            async with generations[0] as generation:
                async for delta in generation:
                    yield b"data: " + orjson.dumps({"ids": delta.ids, "finish": delta.finish}) + b"\n\n"
        except Exception as error:
            yield b"data: " + orjson.dumps(error_object(error, request_id)) + b"\n\n"
        yield b"data: [DONE]\n\n"

    if body.stream:
        return StreamingResponse(stream(), media_type="text/event-stream")
    choices = await until_disconnect(request, collect())
    service.metrics.request_done(body.n, max(len(choice["ids"]) for choice in choices))
    return JSONResponse({"choices": choices})


class FakeText:
    """Replaces tokenizer and template: the test's own route needs neither."""

    tokenizer = template = None


class Gateway:
    """The application on a port: `service` is its internal state, `client` sends requests."""

    def __init__(self, service: Service, url: str) -> None:
        self.service = service
        self.url = url
        self.client = httpx.Client(base_url=url, timeout=PATIENCE_S, verify=False)

    def generate(self, **body: Any) -> httpx.Response:
        return self.client.post("/test/generate", json=body)

    def samples(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        from prometheus_client.parser import text_string_to_metric_families

        text = self.client.get("/metrics").text
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of the samples of this name whose labels contain the given ones; there must be some."""
        found = [
            value
            for (each, own), value in self.samples().items()
            if each == name and labels.items() <= dict(own).items()
        ]
        assert found, f"no sample {name} with {labels}"
        return sum(found)


@contextmanager
def running(service: Service, app: FastAPI, listener: socket.socket) -> Iterator[None]:
    """Run the application in a thread; appliance.server.process runs it in a process."""
    server = build_server(app, service)
    server.capture_signals = contextmanager(lambda: iter([None]))  # type: ignore[method-assign]  # threads get none

    async def serve() -> None:
        async with connected(service, store=app.state.responses), controlled(service), watched(service):
            await server.serve([listener])

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    until("the gateway listens", lambda: server.started)
    yield
    server.handle_exit(2, None)
    thread.join(PATIENCE_S)
    assert not thread.is_alive(), "the gateway did not end"


@pytest.fixture
def eventually() -> Callable[[str, Callable[[], bool]], None]:
    return until


@pytest.fixture
def new_engine(tmp_path: Path) -> Iterator[Callable[[], FakeEngine]]:
    """Return a function that makes fake engines that are not started yet."""
    made: list[FakeEngine] = []
    numbers = itertools.count()

    def make() -> FakeEngine:
        made.append(FakeEngine(tmp_path / f"e{next(numbers)}.sock"))
        return made[-1]

    yield make
    for engine in made:
        engine.stop()


@pytest.fixture
def engine(new_engine: Callable[[], FakeEngine]) -> FakeEngine:
    return new_engine().start()


@pytest.fixture
def new_config(tmp_path: Path) -> Callable[..., GatewayConfig]:
    def make(*engines: FakeEngine, **values: Any) -> GatewayConfig:
        facts = {"names": ("tiny", "org/alias"), "model": str(tmp_path), "max_context": 64, "vocab_size": 1000}
        sockets = tuple(str(each.path) for each in engines)
        facts |= {"engines": sockets, "drain_s": 0.0, "version": "1.2.3", "manifest_sha256": "ab" * 32}
        address = {"endpoints.host": "127.0.0.1", "endpoints.port": 0}
        return with_values(GatewayConfig(**facts), address | values)

    return make


@pytest.fixture
def start_gateway(
    new_config: Callable[..., GatewayConfig], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Gateway]]:
    """Return a function that starts gateways over fake engines: `start_gateway(engine, keys=[…], ready=False,
    **config)`."""
    monkeypatch.setattr("appliance.server.process.load_text", lambda config: FakeText())
    with ExitStack() as stack:

        def start(
            *engines: FakeEngine,
            keys: Iterable[str | ApiKey] = (),
            ready: bool = True,
            traces: Any = None,
            **values: Any,
        ) -> Gateway:
            config = new_config(*engines, **values)
            parsed = [key if isinstance(key, ApiKey) else parse_keys([key], "keys")[0] for key in keys]
            certificate = None if config.tls is None else read_certificate(config.tls)
            service = build_service(config, parsed, certificate, traces)
            app = build_app(service)
            app.include_router(test_routes)
            listener = socket.create_server(("127.0.0.1", 0))
            scheme = "http" if certificate is None else "https"
            gateway = Gateway(service, f"{scheme}://127.0.0.1:{listener.getsockname()[1]}")
            stack.enter_context(running(service, app, listener))
            stack.enter_context(gateway.client)
            if ready:
                until("/ready", lambda: gateway.client.get("/ready").status_code == 200)
            return gateway

        yield start


@pytest.fixture
def gateway(start_gateway: Callable[..., Gateway], engine: FakeEngine) -> Gateway:
    """Return one gateway with one fake engine, ready."""
    return start_gateway(engine)
