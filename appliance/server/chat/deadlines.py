"""Until when a request wants its first token, and its end: in milliseconds since it arrived, as clients say it."""

from dataclasses import dataclass
from typing import Protocol

from engine.api.errors import RequestError

LONGEST_MS = 24 * 3_600_000


class Timed(Protocol):
    """A body that says until when."""

    @property
    def ttft_deadline_ms(self) -> int | None: ...
    @property
    def deadline_ms(self) -> int | None: ...


@dataclass(frozen=True)
class Deadlines:
    """Those of a request's headers; fields of its body win."""

    ttft_ms: int | None = None
    total_ms: int | None = None

    def resolve(self, body: Timed, arrived_s: float) -> tuple[float | None, float | None]:
        """Of the first token and of the end, as seconds of the clock of `arrived_s`. Raises RequestError for a time
        that is none."""
        ttft_ms = self.ttft_ms if body.ttft_deadline_ms is None else body.ttft_deadline_ms
        total_ms = self.total_ms if body.deadline_ms is None else body.deadline_ms
        return _time("ttft_deadline_ms", ttft_ms, arrived_s), _time("deadline_ms", total_ms, arrived_s)


def _time(name: str, given_ms: int | None, arrived_s: float) -> float | None:
    if given_ms is None:
        return None
    if not 1 <= given_ms <= LONGEST_MS:
        raise RequestError(f"{name} must be in [1, {LONGEST_MS}] milliseconds, got {given_ms}.", name)
    return arrived_s + given_ms / 1000
