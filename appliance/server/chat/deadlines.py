"""Deadlines for a request's first token and for its end, which clients give in milliseconds since arrival."""

from dataclasses import dataclass
from typing import Protocol

from engine.api.errors import RequestError

LONGEST_MS = 24 * 3_600_000


class Timed(Protocol):
    """A request body with deadlines."""

    @property
    def ttft_deadline_ms(self) -> int | None: ...
    @property
    def deadline_ms(self) -> int | None: ...


@dataclass(frozen=True)
class Deadlines:
    """Deadlines from a request's headers. Fields of its body take precedence."""

    ttft_ms: int | None = None
    total_ms: int | None = None

    def resolve(self, body: Timed, arrived_s: float) -> tuple[float | None, float | None]:
        """Return the deadlines of the first token and of the end, in seconds on the clock of `arrived_s`.

        Raise RequestError for an invalid value.
        """
        ttft_ms = self.ttft_ms if body.ttft_deadline_ms is None else body.ttft_deadline_ms
        total_ms = self.total_ms if body.deadline_ms is None else body.deadline_ms
        return _time("ttft_deadline_ms", ttft_ms, arrived_s), _time("deadline_ms", total_ms, arrived_s)


def _time(name: str, given_ms: int | None, arrived_s: float) -> float | None:
    if given_ms is None:
        return None
    if not 1 <= given_ms <= LONGEST_MS:
        raise RequestError(f"{name} must be in [1, {LONGEST_MS}] milliseconds, got {given_ms}.", name)
    return arrived_s + given_ms / 1000
