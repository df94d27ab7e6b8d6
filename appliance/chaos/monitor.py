"""Monitoring of a service during a fault: /ready continuously, /metrics on demand."""

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

LOOK_S = 0.1
ASK_S = 5.0


class Metrics(dict[str, float]):
    """Sums of samples over their labels, by name. A missing name is 0."""

    def __missing__(self, name: str) -> float:
        return 0.0


def read_metrics(text: str) -> Metrics:
    found = Metrics()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] += sample.value
    return found


async def metrics(client: httpx.AsyncClient) -> Metrics:
    """Return the service's metrics. Raise httpx.HTTPError."""
    return read_metrics((await client.get("/metrics", timeout=ASK_S)).text)


@dataclass(frozen=True)
class Look:
    """Readiness of the service at a time of the monotonic clock."""

    at_s: float
    ready: bool  # False also without a response
    answered: bool = True


@dataclass
class Watch:
    """Polls /ready in the background."""

    client: httpx.AsyncClient
    looks: list[Look] = field(default_factory=list)
    told: dict[str, Any] = field(default_factory=dict)  # last body of /ready

    def start(self) -> None:
        self._task = asyncio.create_task(self._look_on())

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def look(self) -> bool:
        look = Look(time.monotonic(), False, False)
        with contextlib.suppress(httpx.HTTPError, ValueError):
            answer = await self.client.get("/ready", timeout=ASK_S)
            self.told = answer.json()
            look = Look(time.monotonic(), answer.status_code == 200)
        self.looks.append(look)
        return look.ready

    def start_s(self) -> float:
        """Return the longest last start of an engine in seconds, as the service reports it."""
        return max((engine.get("start_s", 0.0) for engine in self.told.get("engines", [])), default=0.0)

    async def _look_on(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)
