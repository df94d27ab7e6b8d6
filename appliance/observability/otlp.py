"""Export of spans and log records with OTLP/HTTP in its JSON encoding (https://opentelemetry.io/docs/specs/otlp/).

A background task sends batches. Adding a span never waits: when the collector is slow or gone, the queue fills and
further spans are dropped and counted.
"""

import asyncio
import contextlib
import gzip
import logging
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import httpx
import orjson

from appliance.observability.spans import encode_attributes
from appliance.observability.trace_settings import TraceSettings

log = logging.getLogger(__name__)

DropReason = Literal["queue_full", "unreachable", "rejected", "shutdown"]

RETRIED = frozenset((429, 502, 503, 504))  # statuses after which OTLP allows a client to send a batch again
MAX_ATTEMPTS = 6
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 30.0
YIELD_SPANS = 32  # spans that are encoded before requests get the event loop, about 1 ms


class Item(Protocol):
    """A span or log record."""

    def encoded(self) -> dict[str, Any]:
        """Return it in OTLP's JSON encoding."""


@dataclass(frozen=True)
class Signal:
    """Names of a kind of items in OTLP."""

    name: str  # in messages
    resources: str
    scopes: str
    items: str
    rejected: str  # field of a reply with the number of rejected items


TRACES = Signal("traces", "resourceSpans", "scopeSpans", "spans", "rejectedSpans")
LOGS = Signal("logs", "resourceLogs", "scopeLogs", "logRecords", "rejectedLogRecords")


class Retry(Exception):
    """Raised for a failed attempt that may succeed later, after `pause_s` seconds if the collector named a time."""

    def __init__(self, why: str, pause_s: float | None = None) -> None:
        super().__init__(why)
        self.pause_s = pause_s


class Exporter:
    """Queue of finished items and the task that sends them."""

    def __init__(
        self,
        settings: TraceSettings,
        version: str,
        on_sent: Callable[[int], None],
        on_dropped: Callable[[int, DropReason], None],
        transport: httpx.AsyncBaseTransport | None = None,
        signal: Signal = TRACES,
        url: str = "",
    ) -> None:
        """Create an exporter that collects items and sends none until `run`.

        Args:
            on_sent: called with the number of spans that the collector accepted.
            on_dropped: called with a number of spans and the reason why they are lost.
            transport: replaces the network.
            signal: kind of the items.
            url: complete address of the collector's route; default: that of traces.
        """
        self._settings, self._signal, self._url = settings, signal, url or settings.url
        self._on_sent, self._on_dropped = on_sent, on_dropped
        self._transport = transport
        self.headers = dict(settings.headers)
        self._queue: deque[Item] = deque()
        self._wake = asyncio.Event()
        self._client: httpx.AsyncClient | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_failing = False
        resource = {"attributes": encode_attributes(settings.resource)}
        scope = {"name": "slipway", "version": version}
        scopes = {signal.scopes: [{"scope": scope, signal.items: []}]}
        head = orjson.dumps({signal.resources: [{"resource": resource, **scopes}]})
        self._head = head.removesuffix(b"]}]}]}")

    def add(self, item: Item) -> None:
        """Queue a finished item, or drop it if the queue is full."""
        if len(self._queue) >= self._settings.max_queue:
            self._on_dropped(1, "queue_full")
            return
        self._queue.append(item)
        if len(self._queue) >= self._settings.max_batch:
            self._wake.set()

    def start(self) -> None:
        """Send batches in the background. Needs a running event loop."""
        self._task = asyncio.create_task(self._run())

    async def stop(self, timeout_s: float) -> None:
        """Send the remaining spans within `timeout_s` seconds and drop those that are left."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        with contextlib.suppress(TimeoutError, Retry):
            async with asyncio.timeout(timeout_s):
                while self._queue:
                    await self._send_batch(max_attempts=1)
        if self._queue:
            self._on_dropped(len(self._queue), "shutdown")
            self._queue.clear()
        if self._client is not None:
            await self._client.aclose()

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), self._settings.delay_s)
            self._wake.clear()
            while self._queue:
                await self._send_batch(MAX_ATTEMPTS)

    async def _send_batch(self, max_attempts: int) -> None:
        """Send the oldest spans. They return to the queue if this is cancelled."""
        batch = [self._queue.popleft() for _ in range(min(len(self._queue), self._settings.max_batch))]
        try:
            body = await self._encode(batch)
            sent = await self._deliver(body, len(batch), max_attempts)
        except asyncio.CancelledError:
            self._queue.extendleft(reversed(batch))
            raise
        except Exception as error:  # a fault of the exporter must not end the export of later spans
            self._report(f"unexpected {type(error).__name__}")
            sent = None
        if sent is None:
            self._on_dropped(len(batch), "unreachable")
            return
        self._on_sent(sent)
        if sent < len(batch):
            self._on_dropped(len(batch) - sent, "rejected")

    async def _encode(self, batch: Sequence[Item]) -> bytes:
        parts = []
        for number, item in enumerate(batch):
            if number % YIELD_SPANS == YIELD_SPANS - 1:
                await asyncio.sleep(0)
            parts.append(orjson.dumps(item.encoded()))
        body = self._head + b",".join(parts) + b"]}]}]}"
        return await asyncio.to_thread(gzip.compress, body, 5) if self._settings.compresses else body

    async def _deliver(self, body: bytes, count: int, max_attempts: int) -> int | None:
        """Return the number of accepted spans, or None if the collector could not be reached."""
        for attempt in range(1, max_attempts + 1):
            try:
                accepted = await self._post(body, count)
            except Retry as error:
                self._report(str(error))
                if attempt < max_attempts:
                    await asyncio.sleep(_pause_s(attempt) if error.pause_s is None else error.pause_s)
            else:
                if self._is_failing and accepted == count:
                    log.info("the collector accepts %s again", self._signal.name)
                    self._is_failing = False
                return accepted
        return None

    async def _post(self, body: bytes, count: int) -> int:
        """Return the number of accepted spans. Raise Retry if the same request may succeed later."""
        if self._client is None:
            # Reading the system's certificates takes 20 ms.
            self._client = await asyncio.to_thread(
                httpx.AsyncClient, timeout=self._settings.timeout_s, transport=self._transport
            )
        headers = {"Content-Type": "application/json", **self.headers}
        if self._settings.compresses:
            headers["Content-Encoding"] = "gzip"
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                reply = await self._client.post(self._url, content=body, headers=headers)
        except (httpx.HTTPError, OSError) as error:
            raise Retry(f"the collector cannot be reached: {type(error).__name__}") from error
        if reply.status_code in RETRIED:
            raise Retry(f"the collector answered {reply.status_code}", _retry_after_s(reply))
        if not reply.is_success:
            self._report(f"the collector answered {reply.status_code}")
            return 0
        rejected = _rejected(reply, self._signal.rejected)
        if rejected:
            self._report(f"the collector rejected {rejected} {self._signal.items}")
        return max(0, count - rejected)

    def _report(self, why: str) -> None:
        """Log the first failure after a success."""
        if not self._is_failing:
            log.warning("%s are not exported to %s: %s", self._signal.name, self._url, why)
        self._is_failing = True


def _pause_s(attempt: int) -> float:
    """Return the pause after a failed attempt: exponential, with jitter against simultaneous retries."""
    return min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (attempt - 1)) * random.uniform(0.5, 1.0)


def _retry_after_s(reply: httpx.Response) -> float | None:
    given = reply.headers.get("retry-after", "")
    return min(MAX_PAUSE_S, float(given)) if given.isascii() and given.isdecimal() else None


def _rejected(reply: httpx.Response, field: str) -> int:
    """Return the number of rejected items in a reply of success."""
    try:
        answer = orjson.loads(reply.content or b"{}")
        return int(answer.get("partialSuccess", {}).get(field, 0))
    except (ValueError, TypeError, AttributeError):
        return 0  # some collectors answer with protobuf or text
