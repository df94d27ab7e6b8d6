"""Load of the service over the last half hour, sampled by the gateway, so that the status page has data when it is
opened."""

from collections import deque
from dataclasses import asdict, dataclass, fields
from typing import Any

from appliance.observability.metrics import Metrics

INTERVAL_S = 2.0
MAX_SAMPLES = 900


@dataclass(frozen=True)
class Sample:
    """Load of the service at one time."""

    generated_tokens: float
    """Tokens generated since the gateway started."""
    prompt_tokens: float
    """Prompt tokens computed or found in the prefix cache since the gateway started."""
    running: float
    """Sequences in the running batches."""
    waiting: float
    """Sequences that wait for an engine or in its queue."""
    open_requests: float
    """HTTP requests that are being served, streams included."""
    kv_cache_usage: float
    """Used share of the KV cache blocks, 0 to 1, mean over the engines."""


NAMES = tuple(field.name for field in fields(Sample))


def sample(metrics: Metrics, open_requests: int) -> Sample:
    """Return the load now."""
    return Sample(
        generated_tokens=metrics.total("generation_tokens"),
        prompt_tokens=metrics.total("prompt_tokens"),
        running=metrics.total("requests_running"),
        waiting=metrics.total("requests_waiting") + metrics.total("requests_held"),
        open_requests=open_requests,
        kv_cache_usage=metrics.mean("kv_cache_usage_ratio"),
    )


class History:
    """The last `MAX_SAMPLES` samples, one every `INTERVAL_S` seconds."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)

    def add(self, sample: Sample) -> None:
        self._samples.append(sample)

    def columns(self, limit: int) -> dict[str, Any]:
        """Return the last `limit` samples, the oldest first, one list for each field of `Sample`."""
        rows = [asdict(each) for each in list(self._samples)[-limit:]]
        return {"interval_s": INTERVAL_S, **{name: [round(row[name], 6) for row in rows] for name in NAMES}}
