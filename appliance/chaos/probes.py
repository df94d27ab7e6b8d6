"""Probe requests before, during and after a fault: a few short requests with known replies."""

import asyncio
import itertools
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

import httpx

from appliance.chaos.client import Reply, ask

Ask = tuple[str, dict[str, Any]]
KINDS = ("stream", "whole", "durable")  # "durable" has an Idempotency-Key
PAUSE_S = 0.05
TOKENS = 120


class Unwell(Exception):
    """Raised if the service does not answer correctly before any fault."""


@dataclass
class Probe:
    """One probe request. Times are seconds of the monotonic clock."""

    kind: str
    sent_s: float
    took_s: float = 0.0
    begun_s: float = 0.0  # time until the first response began
    status: int = 0
    retry_after: str = ""
    error: str = ""
    comebacks: int = 0
    longest_pause_s: float = 0.0
    same: bool | None = None  # the reply has the expected tokens; None if it is not comparable


def asks(tokens: int) -> dict[str, Ask]:
    """Return the requests by kind. Greedy and seeded sampling both have deterministic replies."""
    sampled = {"temperature": 1.0, "seed": 7}
    bodies: dict[str, dict[str, Any]] = {
        "stream": {"prompt": "Once upon a time", "stream": True, "temperature": 0},
        "whole": {"prompt": "Tell me more", "stream": False, **sampled},
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
    exact: bool  # compare the replies
    durable: bool
    tokens: int = TOKENS
    patience_s: float = 300.0
    done: list[Probe] = field(default_factory=list)
    open: list[Probe] = field(default_factory=list)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def start(self) -> None:
        """Record the expected replies and start the clients. Raise Unwell."""
        self._asks = asks(self.tokens)
        if not self.durable:
            del self._asks["durable"]
        self._over = asyncio.Event()
        self._expected: dict[str, Reply] = {}
        for kind, request in self._asks.items():
            reply = self._expected[kind] = await ask(self.client, *request)
            if reply.error:
                raise Unwell(f"a probe got {reply.error}")
        kinds = itertools.chain(*itertools.repeat(tuple(self._asks), self.clients))
        self._tasks = [asyncio.create_task(self._ask_on(kind)) for kind in kinds]

    async def answered(self, since_s: float) -> None:
        """Wait until a request of each kind that was sent after `since_s` has ended, for at most `patience_s`."""
        deadline_s = time.monotonic() + self.patience_s
        while time.monotonic() < deadline_s:
            if {probe.kind for probe in self.done if probe.sent_s >= since_s} == self._asks.keys():
                return
            await asyncio.sleep(PAUSE_S)

    async def stop(self) -> None:
        """Wait for open requests for at most `patience_s`. Requests that are open after that count as lost."""
        self._over.set()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=self.patience_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        for probe in self.open:
            probe.took_s = time.monotonic() - probe.sent_s
            probe.error = f"no end within {probe.took_s:.0f} s"
        self.done += self.open
        self.open = []

    async def cancel(self) -> None:
        """Cancel all open requests."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _ask_on(self, kind: str) -> None:
        while not self._over.is_set():
            probe = Probe(kind, time.monotonic())
            self.open.append(probe)
            key = uuid.uuid4().hex if kind == "durable" else ""
            reply = await ask(self.client, *self._asks[kind], key, self.patience_s)
            self.open.remove(probe)
            probe.took_s = time.monotonic() - probe.sent_s
            probe.begun_s = max(0.0, reply.begun_s - probe.sent_s)
            probe.status, probe.retry_after, probe.error = reply.status, reply.retry_after, reply.error
            probe.comebacks, probe.longest_pause_s = reply.comebacks, max(reply.pauses_s, default=0.0)
            if self.exact and not reply.error:
                probe.same = reply.choices == self._expected[kind].choices
            self.done.append(probe)
            await asyncio.sleep(PAUSE_S)
