"""What an API key may use a minute: two buckets, of requests and of tokens, that fill evenly and hold a minute's worth.

Tokens are those that an engine computes for a key, of prompts and of replies; what the prefix cache has is free. They
are taken when they are computed, so a request is let in while anything is left, and the one that empties the bucket is
served to its end: how long a reply becomes nobody knows before. What is over has to fill up again first.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from appliance.security.keys import UNNAMED, ApiKey

MINUTE_S = 60.0


class Bucket:
    """Starts full. Times are the caller's, in seconds."""

    def __init__(self, per_minute: int, now_s: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at_s = now_s

    def level(self, now_s: float) -> float:
        """What is left; below 0 is owed."""
        filled = (now_s - self._at_s) * self.per_minute / MINUTE_S
        self._level, self._at_s = min(float(self.per_minute), self._level + filled), now_s
        return self._level

    def take(self, amount: float, now_s: float) -> None:
        self._level = self.level(now_s) - amount

    def full_s(self, now_s: float) -> float:
        """Until it is full."""
        return (self.per_minute - self.level(now_s)) * MINUTE_S / self.per_minute

    def has_s(self, amount: float, now_s: float) -> float:
        """Until it has so much; 0 if it has."""
        return max(0.0, amount - self.level(now_s)) * MINUTE_S / self.per_minute

    def resized(self, per_minute: int, now_s: float) -> "Bucket":
        """Another size, with the same taken out of it."""
        bucket = Bucket(per_minute, now_s)
        bucket.take(self.per_minute - self.level(now_s), now_s)
        return bucket


Unit = Literal["requests", "tokens"]
# A request wants one of the first, and of the second anything that is left.
WANTED: dict[Unit, float] = {"requests": 1.0, "tokens": math.ulp(1.0)}


@dataclass(frozen=True)
class Spent:
    """A request is refused: `unit` of its key is used up for `seconds`."""

    unit: Unit
    per_minute: int
    seconds: float


class Allowances:
    """The buckets of all keys. A key without a limit has none."""

    def __init__(self) -> None:
        self._buckets: dict[str, dict[Unit, Bucket]] = {}
        self._names: dict[str, str] = {}

    def allow(
        self, keys: Sequence[ApiKey], requests_per_minute: int | None, tokens_per_minute: int | None, now_s: float
    ) -> None:
        """These keys and limits from now on; a key's own come before those of all. What was used stays used."""
        before, self._buckets = self._buckets, {}
        self._names = {key.owner: key.shown for key in keys}
        for key in keys:
            wanted: dict[Unit, int | None] = {
                "requests": key.requests_per_minute or requests_per_minute,
                "tokens": key.tokens_per_minute or tokens_per_minute,
            }
            had = before.get(key.owner, {})
            self._buckets[key.owner] = {
                unit: had[unit].resized(limit, now_s) if unit in had else Bucket(limit, now_s)
                for unit, limit in wanted.items()
                if limit is not None
            }

    def enter(self, owner: str, now_s: float) -> Spent | None:
        """Takes a request, or says why not: then nothing is taken."""
        buckets = self._buckets.get(owner, {})
        waits = {unit: bucket.has_s(WANTED[unit], now_s) for unit, bucket in buckets.items()}
        unit = max(waits, key=lambda each: waits[each], default=None)
        if unit is not None and waits[unit] > 0:
            return Spent(unit, buckets[unit].per_minute, waits[unit])
        if "requests" in buckets:
            buckets["requests"].take(1, now_s)
        return None

    def spend(self, owner: str, tokens: int, now_s: float) -> None:
        """So many tokens were computed."""
        if bucket := self._buckets.get(owner, {}).get("tokens"):
            bucket.take(tokens, now_s)

    def shown(self, owner: str) -> str:
        """The name of a key in metrics, also of one that a reload took away while its requests ran."""
        return self._names.get(owner, UNNAMED)

    def headers(self, owner: str, now_s: float) -> dict[str, str]:
        """What is left, in the headers that OpenAI's service answers with."""
        found = {}
        for unit, bucket in self._buckets.get(owner, {}).items():
            found[f"x-ratelimit-limit-{unit}"] = str(bucket.per_minute)
            found[f"x-ratelimit-remaining-{unit}"] = str(max(0, math.floor(bucket.level(now_s))))
            found[f"x-ratelimit-reset-{unit}"] = f"{bucket.full_s(now_s):.3f}s"
        return found
