"""Monitoring of a service during a fault: /ready continuously, /metrics on demand."""

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

SAMPLE_INTERVAL_S = 0.1
REQUEST_TIMEOUT_S = 5.0


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
    return read_metrics((await client.get("/metrics", timeout=REQUEST_TIMEOUT_S)).text)


@dataclass(frozen=True)
class ReadinessSample:
    """Readiness of the service at a time of the monotonic clock."""

    at_s: float
    ready: bool  # False also without a response
    answered: bool = True


@dataclass
class ReadinessMonitor:
    """Polls /ready in the background."""

    client: httpx.AsyncClient
    samples: list[ReadinessSample] = field(default_factory=list)
    last_body: dict[str, Any] = field(default_factory=dict)  # last body of /ready

    def start(self) -> None:
        self._task = asyncio.create_task(self._poll())

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def sample(self) -> bool:
        sample = ReadinessSample(time.monotonic(), False, False)
        with contextlib.suppress(httpx.HTTPError, ValueError):
            answer = await self.client.get("/ready", timeout=REQUEST_TIMEOUT_S)
            self.last_body = answer.json()
            sample = ReadinessSample(time.monotonic(), answer.status_code == 200)
        self.samples.append(sample)
        return sample.ready

    def start_s(self) -> float:
        """Return the longest last start of an engine in seconds, as the service reports it."""
        return max((engine.get("start_s", 0.0) for engine in self.last_body.get("engines", [])), default=0.0)

    async def _poll(self) -> None:
        while True:
            await self.sample()
            await asyncio.sleep(SAMPLE_INTERVAL_S)
