"""Probe requests before, during and after a fault: a few short requests with known replies."""

import asyncio
import itertools
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

import httpx

from appliance.chaos.client import Reply, send

ProbeRequest = tuple[str, dict[str, Any]]
KINDS = ("stream", "complete", "durable")  # "durable" has an Idempotency-Key
PAUSE_S = 0.05
TOKENS = 120


class ServiceUnhealthy(Exception):
    """Raised if the service does not answer correctly before any fault."""


@dataclass
class Probe:
    """One probe request. Times are seconds of the monotonic clock."""

    kind: str
    sent_s: float
    took_s: float = 0.0
    first_response_s: float = 0.0  # time until the first response began
    status: int = 0
    retry_after: str = ""
    error: str = ""
    reconnects: int = 0
    longest_gap_s: float = 0.0
    matches: bool | None = None  # the reply has the expected tokens; None if it is not comparable


def probe_requests(tokens: int) -> dict[str, ProbeRequest]:
    """Return the requests by kind. Greedy and seeded sampling both have deterministic replies."""
    sampled = {"temperature": 1.0, "seed": 7}
    bodies: dict[str, dict[str, Any]] = {
        "stream": {"prompt": "Once upon a time", "stream": True, "temperature": 0},
        "complete": {"prompt": "Tell me more", "stream": False, **sampled},
        "durable": {"prompt": "One two three", "stream": True, **sampled},
    }
    return {
        kind: ("/v1/completions", {**body, "max_tokens": tokens, "ignore_eos": True}) for kind, body in bodies.items()
    }


@dataclass
class Prober:
    """Sends probes from `clients` clients of each kind without a pause, between `start` and `stop`."""

    client: httpx.AsyncClient
    clients: int
    compare: bool  # compare the replies
    durable: bool
    tokens: int = TOKENS
    timeout_s: float = 300.0
    completed: list[Probe] = field(default_factory=list)
    in_flight: list[Probe] = field(default_factory=list)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def start(self) -> None:
        """Record the expected replies and start the clients. Raise ServiceUnhealthy."""
        self._requests = probe_requests(self.tokens)
        if not self.durable:
            del self._requests["durable"]
        self._stopping = asyncio.Event()
        self._expected: dict[str, Reply] = {}
        for kind, request in self._requests.items():
            reply = self._expected[kind] = await send(self.client, *request)
            if reply.error:
                raise ServiceUnhealthy(f"a request before the fault failed: {reply.error}")
        kinds = itertools.chain(*itertools.repeat(tuple(self._requests), self.clients))
        self._tasks = [asyncio.create_task(self._send_probes(kind)) for kind in kinds]

    async def wait_for_replies(self, since_s: float) -> None:
        """Wait until a request of each kind that was sent after `since_s` has ended, for at most `timeout_s`."""
        deadline_s = time.monotonic() + self.timeout_s
        while time.monotonic() < deadline_s:
            if {probe.kind for probe in self.completed if probe.sent_s >= since_s} == self._requests.keys():
                return
            await asyncio.sleep(PAUSE_S)

    async def stop(self) -> None:
        """Wait for open requests for at most `timeout_s`. Requests that are open after that count as lost."""
        self._stopping.set()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=self.timeout_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        for probe in self.in_flight:
            probe.took_s = time.monotonic() - probe.sent_s
            probe.error = f"no complete reply within {probe.took_s:.0f} s"
        self.completed += self.in_flight
        self.in_flight = []

    async def cancel(self) -> None:
        """Cancel all open requests."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _send_probes(self, kind: str) -> None:
        while not self._stopping.is_set():
            probe = Probe(kind, time.monotonic())
            self.in_flight.append(probe)
            key = uuid.uuid4().hex if kind == "durable" else ""
            reply = await send(self.client, *self._requests[kind], key, self.timeout_s)
            self.in_flight.remove(probe)
            probe.took_s = time.monotonic() - probe.sent_s
            probe.first_response_s = max(0.0, reply.first_response_s - probe.sent_s)
            probe.status, probe.retry_after, probe.error = reply.status, reply.retry_after, reply.error
            probe.reconnects, probe.longest_gap_s = reply.reconnects, max(reply.token_gaps_s, default=0.0)
            if self.compare and not reply.error:
                probe.matches = reply.choices == self._expected[kind].choices
            self.completed.append(probe)
            await asyncio.sleep(PAUSE_S)
