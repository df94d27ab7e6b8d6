"""ASGI middleware around every route: request ID, trace, access log, errors, drain, auth, body limit and load.

app.py defines the order. Only `Errors` converts exceptions of routes and of the inner middleware to error objects.
"""

import asyncio
import re
import uuid
from collections.abc import Awaitable

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from appliance.chat_templates.template import TemplateError
from appliance.observability.log import Subject
from appliance.observability.metrics import now
from appliance.observability.spans import RequestSpan
from appliance.observability.trace import read_trace
from appliance.security.keys import ApiKey
from appliance.server.admin.docs import PATHS as DOCS
from appliance.server.admin.page import PATHS as PAGE
from appliance.server.errors.api import (
    ClientGone,
    RateLimited,
    RequestTimeout,
    TooLarge,
    Unavailable,
    is_unexpected,
)
from appliance.server.errors.formats import response_of
from appliance.server.http.api_keys import key_of
from appliance.server.http.reply import record_failure
from appliance.server.http.service import DRAIN_RETRY_AFTER_S, DRAINING, Service
from engine.api.errors import CheckpointError

PROBES = frozenset({"/live", "/ready", "/health", "/ping"}) | {
    f"/{version}/health/{kind}" for version in ("v1", "v2") for kind in ("live", "ready")
}
OPEN = PROBES | {"/version", "/metrics", "/metrics/"}
"""Paths that need no key, keep answering during a drain and do not count as load."""

# Paths that HTTP metrics and access logs leave out.
UNCOUNTED = OPEN | {"/load", "/load/history"}

SLASHED = frozenset(("/", "/metrics/"))
"""Paths that keep their trailing slash. It is removed from other paths before routing."""

FOLLOWED = "/v1/responses/"
OPENAI = "/openai"
"""Prefix of KServe for OpenAI's routes; /openai/v1/models is /v1/models."""

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
CLIENT_GONE = 499


def _is_health(service: Service, scope: Scope) -> bool:
    """Return if the request is for a health route of `endpoints.routes.health`, which precedes all other routes."""
    return scope["path"] in service.health_paths and scope["method"] == "GET"


def subject_of(scope: Scope) -> Subject:
    subject: Subject = scope["state"]["subject"]
    return subject


class RequestFrame:
    """Outermost middleware: sets the request ID and trace, and reports the result to log and metrics."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app = app
        self.service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        path = scope["path"]
        if path.endswith("/") and path not in SLASHED:
            scope = {**scope, "path": path.removesuffix("/")}
        if path.startswith(f"{OPENAI}/v1/"):
            scope = {**scope, "path": scope["path"].removeprefix(OPENAI)}
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        if scope["method"] == "HEAD":
            # Every GET route answers HEAD; the server leaves the body out.
            scope = {**scope, "method": "GET"}
        trace = read_trace(headers.getlist("traceparent"), headers.getlist("tracestate"))
        state = scope.setdefault("state", {})
        started_s = now()
        counted = scope["path"] not in UNCOUNTED and not _is_health(self.service, scope)
        span = None
        if counted:
            trace, span = self.service.tracing.begin(trace, started_s)
        state["request_id"], state["subject"] = request_id, Subject(request_id, trace, started_s, span)
        state["key"], state["owner"] = None, ""  # set by Auth
        shown = request_id if self.service.config.endpoints.compat == "openai" else None
        closes = self.service.draining or self.service.config.endpoints.keep_alive == 0
        traffic = _Traffic(receive, send, shown, closes=closes)
        state["send_body"] = traffic.send  # inner layers do not look at what follows the start of a reply
        try:
            await self.app(scope, traffic.receive, traffic.send)
        finally:
            if counted:
                self._record(scope, traffic, now() - started_s)
            if span is not None:
                _end_span(span, scope, headers, traffic.status)

    def _record(self, scope: Scope, traffic: "_Traffic", seconds: float) -> None:
        method, client = scope["method"], scope.get("client")
        # Use the route's template: client-defined paths would each create a time series.
        handler = getattr(scope.get("route"), "path", "none")
        self.service.metrics.http.request(handler, method, traffic.status, seconds, traffic.received, traffic.sent)
        self.service.log.access(
            subject_of(scope),
            method=method,
            path=scope["path"],
            status=traffic.status,
            seconds=seconds,
            client=client[0] if client else "-",
            key=scope["state"]["key"],
        )


def _end_span(span: RequestSpan, scope: Scope, headers: Headers, status: int) -> None:
    """Finish the span of a request with the attributes of the conventions for HTTP servers."""
    method, route = scope["method"], getattr(scope.get("route"), "path", None)
    client, server = scope.get("client"), scope.get("server")
    key: ApiKey | None = scope["state"]["key"]
    span.update(
        {
            "http.request.method": method,
            "http.route": route,
            "http.response.status_code": status,
            "url.path": scope["path"],
            "url.scheme": scope["scheme"],
            "network.protocol.version": scope["http_version"],
            "client.address": client[0] if client else None,
            "server.address": server[0] if server else None,
            "server.port": server[1] if server else None,
            "user_agent.original": headers.get("user-agent"),
            "slipway.request.id": subject_of(scope).request_id,
            "slipway.api_key.name": None if key is None else key.shown,
        }
    )
    if status >= 500:
        span.fail(str(status))
    span.end(f"{method} {route}" if route else method, now())


class _Traffic:
    """Counts the bytes of one request and its reply. Adds the request ID to the reply if one is given.

    `closes` marks the reply as the last of its connection, so that the client's next request goes to another instance.
    """

    def __init__(self, receive: Receive, send: Send, request_id: str | None, *, closes: bool = False) -> None:
        self._receive, self._send, self._request_id, self._closes = receive, send, request_id, closes
        self.status = CLIENT_GONE
        self.received = self.sent = 0

    async def receive(self) -> Message:
        message = await self._receive()
        self.received += len(message.get("body", b""))
        return message

    def send(self, message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if self._request_id is not None:
                MutableHeaders(scope=message)["X-Request-Id"] = self._request_id
            if self._closes:
                MutableHeaders(scope=message)["Connection"] = "close"
        else:
            self.sent += len(message.get("body", b""))
        return self._send(message)


class CrossOrigin:
    """Allows cross-origin requests from the configured origins."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app = app
        self.service = service
        self._origins: tuple[str, ...] = ()
        self._checked = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        origins = self.service.config.endpoints.cors_origins
        if origins != self._origins:
            self._origins, self._checked = origins, self._around(origins)
        await self._checked(scope, receive, send)

    def _around(self, origins: tuple[str, ...]) -> ASGIApp:
        if not origins:
            return self.app
        exposed = ["X-Request-Id", "Retry-After", "endpoint-load-metrics"]
        return CORSMiddleware(
            self.app, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=exposed
        )


class Errors:
    """Converts every exception to the error object of its path.

    After the first byte it can only close the connection.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app = app
        self.service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except (ClientGone, ClientDisconnect):
            return  # the client has disconnected
        except (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as raised:  # panics of Rust libraries are not subclasses of Exception
            error = raised if isinstance(raised, Exception) else RuntimeError(type(raised).__name__)
            subject = subject_of(scope)
            record_failure(subject.span, error)
            if is_unexpected(error):
                self.service.log.unexpected(subject, error)
            elif isinstance(error, CheckpointError):
                self.service.log.model_fault(subject, error.place if isinstance(error, TemplateError) else str(error))
            if not begun:
                answer = response_of(scope["path"])
                await answer(error, subject.request_id)(scope, receive, send)


class Drain:
    """Rejects new requests after SIGTERM and the linger time for load balancers. Open requests continue."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app = app
        self.service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN or _is_health(self.service, scope):
            return await self.app(scope, receive, send)
        if self.service.closed:
            raise Unavailable(DRAINING, DRAIN_RETRY_AFTER_S, close=True)
        await self.app(scope, receive, send)


class Auth:
    """Requires an API key as Bearer token or x-api-key, except on probes, page files and OPTIONS (RT-01, 02, 03)."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app = app
        self.service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        guarded = scope["type"] == "http" and not self._is_open(scope)
        if guarded and self.service.keys:
            key = scope["state"]["key"] = key_of(self.service, Headers(scope=scope))
            scope["state"]["owner"] = key.owner
        await self.app(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        """Return if the path is served without a key. Complete paths are compared, so an unknown path needs a key.

        The files of the pages are static and contain nothing of this service. They load before the user enters the key.
        """
        path, method, config = scope["path"], scope["method"], self.service.config
        reads_page = method == "GET" and (
            (config.endpoints.page and path in PAGE) or (config.endpoints.docs and path in DOCS)
        )
        invokes = method == "POST" and path == "/invocations" and config.endpoints.invocations_without_key
        return path in OPEN or method == "OPTIONS" or reads_page or invokes or _is_health(self.service, scope)


class Allowance:
    """Rejects requests over the limits of their key (429) and reports the remaining allowance."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app = app
        self.service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key: ApiKey | None = scope["state"]["key"] if scope["type"] == "http" else None
        if key is None or scope["method"] != "POST":
            return await self.app(scope, receive, send)
        allowances, owner = self.service.allowances, key.owner
        spent = allowances.enter(owner, now())
        left = allowances.headers(owner, now())
        if spent is not None:
            self.service.metrics.add("key_refusals", 1, key.shown, spent.unit)
            raise RateLimited(spent.unit, spent.per_minute, spent.seconds, left)

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(left)
            await send(message)

        await self.app(scope, receive, send_with_limits if left else send)


class BodyLimit:
    """Rejects bodies over the limit before they are in memory (413), and bodies that arrive too slowly (408)."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app = app
        self.service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        limit = self.service.config.limits.max_body
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdigit() and int(announced) > limit:
            raise TooLarge(limit)
        received, complete = 0, False
        seconds = self.service.config.endpoints.connections.body_timeout
        deadline = asyncio.get_running_loop().time() + seconds

        async def limited() -> Message:
            nonlocal received, complete
            if complete:  # only a disconnect can follow
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise RequestTimeout("body", seconds) from None
            received += len(message.get("body", b""))
            if received > limit:
                raise TooLarge(limit)
            complete = not message.get("more_body", False)
            return message

        await self.app(scope, limited, send)


def _holds(scope: Scope) -> bool:
    """Return if a request may take long: POST requests, and GET requests that stream a response."""
    reads = scope["method"] == "GET" and scope["path"].startswith(FOLLOWED)
    return (reads or scope["method"] == "POST") and scope["path"] not in UNCOUNTED


class Load:
    """Counts requests in progress, up to the last byte of a stream or the client's disconnect (API-05)."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app = app
        self.service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _holds(scope):
            return await self.app(scope, receive, send)
        self._count(1)
        try:
            await self.app(scope, receive, send)
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        self.service.open_requests += change
        self.service.metrics.set("open_requests", self.service.open_requests)
