"""What a service says of itself while a fault is made: /ready all the time, /metrics at moments."""

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
    """Sums of samples over their labels, by name. What is not there is 0."""

    def __missing__(self, name: str) -> float:
        return 0.0


def read_metrics(text: str) -> Metrics:
    found = Metrics()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] += sample.value
    return found


async def metrics(client: httpx.AsyncClient) -> Metrics:
    """Raises httpx.HTTPError."""
    return read_metrics((await client.get("/metrics", timeout=ASK_S)).text)


@dataclass(frozen=True)
class Look:
    """At a moment of the monotonic clock: whether the service was ready, False also where nobody answered."""

    at_s: float
    ready: bool
    answered: bool = True


@dataclass
class Watch:
    """`told` is the last body of /ready."""

    client: httpx.AsyncClient
    looks: list[Look] = field(default_factory=list)
    told: dict[str, Any] = field(default_factory=dict)

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
        """The longest last start of an engine, in seconds, as the service tells it."""
        return max((engine.get("start_s", 0.0) for engine in self.told.get("engines", [])), default=0.0)

    async def _look_on(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)
