"""The gateway process: `python -m appliance.server CONFIG.json`. It answers long before an engine is ready.

SIGTERM drains: /ready turns 503, after drain_linger_s new requests get 503 too, open streams have drain_s to finish,
the rest ends with finish_reason "abort", then exit 0. A second SIGTERM or SIGINT exits at once.
"""

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import FrameType

import msgspec
import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp

from appliance.config.gateway import GatewayConfig, read_config
from appliance.config.stores import storage_line
from appliance.observability.history import INTERVAL_S, sample
from appliance.observability.log import RequestLog, set_up_logging
from appliance.observability.metrics import Metrics, now
from appliance.observability.trace_settings import TraceSettings, trace_settings
from appliance.observability.tracing import Tracing
from appliance.observability.usage import Tokens, UsageLedger
from appliance.runtime.crash_exemption import send_exemption
from appliance.runtime.halted import read_halted
from appliance.runtime.inflight import write_inflight
from appliance.runtime.listener import AddressUnavailable, open_listener, receive_listener
from appliance.security.allowance import Allowances
from appliance.security.certificate import Certificate, read_certificate
from appliance.security.keys import ApiKey, read_keys
from appliance.server.app import build_app
from appliance.server.certificate_renewal import watched
from appliance.server.chat.text import load_text
from appliance.server.control import controlled
from appliance.server.errors.api import Unavailable
from appliance.server.first_requests import REQUEST_ID, answer_each
from appliance.server.http.connections import Acceptor, Connection, ConnectionTable
from appliance.server.http.protocol import HttpProtocol, refusal
from appliance.server.http.service import DRAIN_RETRY_AFTER_S, DRAINING, Service
from appliance.server.openai.responses.store import ResponseStore
from appliance.server.reply_store.journal import open_reply_store, open_responses
from appliance.server.routing.adapters import AdapterRegistry
from appliance.server.routing.router import Router
from engine.api.errors import EXIT_PERMANENT, CheckpointError, ConfigError
from engine.api.messages import Submit

log = logging.getLogger(__name__)

USAGE_S = 5.0  # interval between writes of the usage ledger
HALTED_POLL_S = 0.25  # interval between checks for the halted state
FLUSH_S = 0.5
"""Time after the drain for the last records to reach the sockets. The supervisor kills one second after drain_s."""
TRACES_S = 0.4  # maximum time for the last batch of spans
LAST_REQUESTS_S = 0.3
"""Maximum time after the drain for answering connections that were accepted or queued in the kernel but not read."""

TOO_MANY_CONNECTIONS = (
    "Too many connections are open: endpoints.connections.max, or max_per_address for the address of this client."
)


class PortTaken(ConfigError):
    """Raised if the listening address is not available."""

    code = "port"


def build_service(
    config: GatewayConfig,
    keys: Sequence[ApiKey] = (),
    certificate: Certificate | None = None,
    traces: TraceSettings | None = None,
) -> Service:
    """Build the service. Raise JournalUnusable."""
    metrics, allowances = Metrics(config), Allowances()

    def spend(owner: str, tokens: int) -> None:
        if owner:
            allowances.spend(owner, tokens, now())
            metrics.add("key_tokens", tokens, allowances.shown(owner))

    ledger = UsageLedger(Path(config.run) if config.run else None)

    def used(submit: Submit, tokens: Tokens) -> None:
        if submit.id.startswith(REQUEST_ID) and not submit.owner:
            return  # requests of the service itself have no client
        key = allowances.shown(submit.owner) if submit.owner else ""
        ledger.add(key, submit.adapter or config.names[0], tokens)

    adapters = AdapterRegistry(
        config.adapters,
        names=config.names,
        folders=config.adapter_folders,
        on_request=config.adapters_on_request,
        run=config.run,
        clients=lambda: [engine.client for engine in router.engines],
    )
    router = Router(
        config.engines,
        config.limits.max_waiting,
        metrics,
        max_waiting_tokens=config.limits.max_waiting_tokens,
        hold_s=config.lifecycle.restart.hold,
        exempt=partial(send_exemption, config.crash_exemptions),
        timelines=config.observability.timelines,
        policy=config.policy,
        report_in_flight=partial(write_inflight, config.run),
        spend=spend,
        used=used,
        decoder_start_ids=() if config.encoder is None else config.encoder.decoder_start_ids,
        adapters=adapters,
    )
    reply_store = open_reply_store(config, metrics)
    tracing = Tracing(traces, metrics, config.version)
    service = Service(config, router, metrics, RequestLog(config), reply_store, keys, allowances, certificate, tracing)
    service.usage = ledger
    if stored := storage_line(config):
        log.info("storage: %s", stored)
    service.stored_responses = open_responses(config, metrics)
    return service


@asynccontextmanager
async def connected(
    service: Service, routes: ASGIApp | None = None, store: ResponseStore | None = None
) -> AsyncIterator[None]:
    """Run the router's connections, the loading of the tokenizer and other background tasks of the service.

    With `routes`, each engine has to answer first requests on them before it counts as ready. A large tokenizer loads
    slower than the gateway may take to answer, so it is loaded in a thread.
    """
    _read_halted(service)
    service.router.start()
    service.tracing.start()
    work = [each(service) for each in (_watch_halted, _watch_connections, _record_history, _save_usage)]
    # The gateway of a halted appliance answers no request, so a damaged checkpoint must not make it exit again.
    if service.halted is None:
        work.append(_load_text(service))
    if routes is not None and service.halted is None:
        service.router.asks_first = True
        work.append(answer_each(service, routes, _exit_unanswered))
    if store is not None:
        work.append(store.resume_in_background())
    tasks = [asyncio.create_task(each) for each in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for reply_store in (service.reply_store, service.shelved, service.stored_responses):
            if reply_store is not None:
                await reply_store.stop()
        service.grammars.close()
        if service.media is not None:
            service.media.close()
        await service.router.stop()
        service.usage.save()
        await service.tracing.stop(TRACES_S)


async def _load_text(service: Service) -> None:
    try:
        service.set_text(await asyncio.to_thread(load_text, service.config))
    except CheckpointError as error:
        _exit(f"{error.code}: {error}", EXIT_PERMANENT)
    except Exception:
        log.exception("the tokenizer or the chat template cannot be loaded")
        _exit("text: the tokenizer or the chat template cannot be loaded", EXIT_PERMANENT)


def _exit_unanswered(why: str) -> None:
    _exit(why, EXIT_PERMANENT)


async def _watch_halted(service: Service) -> None:
    """Poll until the launcher halts the appliance."""
    while service.config.run and service.halted is None:
        await asyncio.sleep(HALTED_POLL_S)
        _read_halted(service)


def _read_halted(service: Service) -> None:
    """Read the halted state that the launcher writes."""
    if service.config.run:
        service.halted = read_halted(Path(service.config.run))
    if service.halted is not None:
        service.router.halt(service.halted.message)


async def _record_history(service: Service) -> None:
    """Sample the load for the status page."""
    while True:
        service.history.add(sample(service.metrics, service.open_requests))
        await asyncio.sleep(INTERVAL_S)


async def _save_usage(service: Service) -> None:
    """Save the usage of API keys regularly."""
    while True:
        await asyncio.sleep(USAGE_S)
        await service.usage.save_apart()


async def _watch_connections(service: Service) -> None:
    """Exit if the connection to an engine is lost by an internal error.

    The gateway would otherwise queue that engine's requests forever. The next gateway process reconnects.
    """
    try:
        await service.router.broken()
    except Exception:
        log.exception("the connection to an engine failed")
        _exit("internal: the connection to an engine failed in the gateway", 1)


def _exit(message: str, code: int) -> None:
    """Exit the process from within the event loop. The last line on standard error gives the reason."""
    print(message, file=sys.stderr, flush=True)
    os._exit(code)


class Server(uvicorn.Server):
    """uvicorn server that keeps answering while it drains, so that clients get a 503 instead of a reset.

    It accepts connections itself (appliance/server/http/connections.py).
    """

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self.service = service
        self._deadline_s: float | None = None
        self._closes_s = 0.0
        metrics = service.metrics
        self.table = ConnectionTable(
            lambda: service.config.endpoints.connections, lambda reason: metrics.add("connections_closed", 1, reason)
        )
        metrics.connections = lambda: (len(self.table), self.table.idle)
        self._acceptors: list[Acceptor] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        for listener in sockets or ():
            acceptor = Acceptor(
                listener,
                self.table,
                self._protocol,
                context=self.config.ssl,
                handshake_s=lambda: self.service.config.endpoints.connections.head_timeout,
                refusal=self._refusal,
            )
            acceptor.start()
            self._acceptors.append(acceptor)
        self.servers = list(self._acceptors)  # type: ignore[arg-type]  # uvicorn closes them and waits for them
        self.started = True

    def _protocol(self, connection: Connection) -> HttpProtocol:
        arguments = {"config": self.config, "server_state": self.server_state, "app_state": self.lifespan.state}
        return HttpProtocol(connection, self.table, lambda: self.service.config, arguments)

    def _refusal(self) -> bytes:
        if self.service.draining:
            return refusal(Unavailable(DRAINING, DRAIN_RETRY_AFTER_S))
        return refusal(Unavailable(TOO_MANY_CONNECTIONS, 1))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._answer_the_rest()
        await super().shutdown(sockets)

    async def _answer_the_rest(self) -> None:
        """Answer requests with 503 that clients have sent but that were not read yet."""
        deadline_s = now() + LAST_REQUESTS_S
        quiet = 0  # consecutive rounds of the event loop without input
        while quiet < 3 and now() < deadline_s and not self.force_exit:
            accepted = sum(acceptor.accept() + acceptor.handshakes for acceptor in self._acceptors)
            protocols = [each for each in self.server_state.connections if isinstance(each, HttpProtocol)]
            waiting = any(protocol.waits_for_reply for protocol in protocols)
            quiet = 0 if accepted or waiting else quiet + 1
            await asyncio.sleep(0.01)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.service.draining:
            # A kill could leave the files in the same state.
            os._exit(128 + sig)
        self.service.draining = True
        config = self.service.config
        self._deadline_s = now() + config.drain_s
        self._closes_s = now() + min(config.drain_linger_s, config.drain_s)
        self.service.closed = self._closes_s <= now()
        log.info("%s: draining %d requests", signal.Signals(sig).name, self.service.open_requests)

    async def on_tick(self, counter: int) -> bool:
        await super().on_tick(counter)
        if self._deadline_s is None:
            return False
        if now() < self._closes_s:
            return False
        self.service.closed = True
        if self.service.open_requests and now() < self._deadline_s:
            return False
        if self.service.open_requests:
            log.warning("drain time is over: aborting %d requests", self.service.open_requests)
            self.service.router.abort_all()
            deadline_s = now() + FLUSH_S
            while self.service.open_requests and now() < deadline_s:
                await asyncio.sleep(0.02)
            self.force_exit = self.service.open_requests > 0
        return True


MAX_EVENT = 1 << 24  # bytes of a message of a WebSocket


def build_server(app: FastAPI, service: Service) -> Server:
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http="httptools",
        ws="wsproto",
        ws_max_size=MAX_EVENT,
        ws_per_message_deflate=False,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    config.load()
    if service.certificate is not None:
        config.ssl = service.certificate.context
    return Server(config, service)


def _listener(config: GatewayConfig) -> socket.socket:
    """Return the launcher's listening socket, or open one if there is none. Raise PortTaken.

    The launcher's socket accepts connections even while no gateway process runs.
    """
    try:
        return (
            receive_listener(config.listener)
            if config.listener
            else open_listener(config.endpoints.host, config.endpoints.port)
        )
    except AddressUnavailable as error:
        raise PortTaken(str(error)) from error
    except OSError as error:
        raise SystemExit(
            f"cannot use the launcher's listener: {error}"
        ) from error  # code 1: the next start may succeed


def collect_garbage() -> None:
    """Start garbage collections. Modules and routes are never freed, so the collector need not traverse them."""
    gc.freeze()
    gc.enable()


async def serve(service: Service, listener: socket.socket) -> None:
    """Serve on the socket until a signal ends the process."""
    app = build_app(service)
    server = build_server(app, service)
    host, port = listener.getsockname()[:2]
    scheme = "http" if service.certificate is None else "https"
    collect_garbage()
    log.info("listening on %s://%s:%d", scheme, f"[{host}]" if ":" in host else host, port)
    async with AsyncExitStack() as stack:
        for each in (connected(service, app.router, app.state.responses), controlled(service), watched(service)):
            await stack.enter_async_context(each)
        await stack.enter_async_context(_grpc(service, app, server.table))
        await server.serve([listener])
    log.info("ended")


def _grpc(service: Service, app: ASGIApp, table: ConnectionTable) -> AbstractAsyncContextManager[None]:
    """Return the gRPC server, or nothing without a port for it."""
    if service.config.endpoints.grpc_port is None:
        return nullcontext()
    from appliance.server.platforms.grpc_server import grpc_served  # needs grpcio

    log.info("listening for gRPC on port %d", service.config.endpoints.grpc_port)
    return grpc_served(lambda: service.config, app, table, service.certificate)


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    if len(given) != 1:
        print("usage: python -m appliance.server CONFIG.json", file=sys.stderr)
        return 2
    try:
        config = read_config(Path(given[0]))
        set_up_logging(config)
        keys = read_keys(config.api_keys)
        certificate = None if config.tls is None else read_certificate(config.tls)
        listener = _listener(config)
        traces = trace_settings(config, os.environ)
        service = build_service(config, keys, certificate, traces)
    except (OSError, msgspec.DecodeError) as error:
        print(f"config: {given[0]}: {error}", file=sys.stderr)
        return EXIT_PERMANENT
    except ConfigError as error:
        print(f"{error.code}: {error}", file=sys.stderr)
        return EXIT_PERMANENT
    import uvloop

    try:
        uvloop.run(serve(service, listener))
    except ConfigError as error:  # the port of gRPC
        print(f"{error.code}: {error}", file=sys.stderr)
        return EXIT_PERMANENT
    return 0
