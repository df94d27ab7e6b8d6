"""Rate limits of an API key: two token buckets, for requests and for tokens, that refill evenly and hold one minute's
quota.

Tokens are those that an engine computes for a key, of prompts and replies; prefix-cache hits are free. They are
deducted when they are computed, because the length of a reply is not known in advance. So a request is admitted while
the bucket is not empty, and the request that empties it is completed. The deficit has to refill first.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from appliance.security.keys import UNNAMED, ApiKey

MINUTE_S = 60.0


class Bucket:
    """A bucket that starts full. The caller supplies the time, in seconds."""

    def __init__(self, per_minute: int, now_s: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at_s = now_s

    def level(self, now_s: float) -> float:
        """Return the remaining amount; a negative value is a deficit."""
        filled = (now_s - self._at_s) * self.per_minute / MINUTE_S
        self._level, self._at_s = min(float(self.per_minute), self._level + filled), now_s
        return self._level

    def take(self, amount: float, now_s: float) -> None:
        self._level = self.level(now_s) - amount

    def full_s(self, now_s: float) -> float:
        """Return the seconds until the bucket is full."""
        return (self.per_minute - self.level(now_s)) * MINUTE_S / self.per_minute

    def has_s(self, amount: float, now_s: float) -> float:
        """Return the seconds until the bucket contains `amount`; 0 if it does."""
        return max(0.0, amount - self.level(now_s)) * MINUTE_S / self.per_minute

    def resized(self, per_minute: int, now_s: float) -> "Bucket":
        """Return a bucket of another size from which the same amount has been taken."""
        bucket = Bucket(per_minute, now_s)
        bucket.take(self.per_minute - self.level(now_s), now_s)
        return bucket


Unit = Literal["requests", "tokens"]
# Amounts that a request needs: one request, and any positive number of tokens.
REQUIRED: dict[Unit, float] = {"requests": 1.0, "tokens": math.ulp(1.0)}


@dataclass(frozen=True)
class LimitReached:
    """Reason for refusing a request: the limit `per_minute` of `unit` is used up for `seconds`."""

    unit: Unit
    per_minute: int
    seconds: float


class Allowances:
    """Buckets of all keys. A key without a limit has none."""

    def __init__(self) -> None:
        self._buckets: dict[str, dict[Unit, Bucket]] = {}
        self._names: dict[str, str] = {}

    def allow(
        self, keys: Sequence[ApiKey], requests_per_minute: int | None, tokens_per_minute: int | None, now_s: float
    ) -> None:
        """Replace keys and limits; a key's own limits override the general ones. Amounts already used stay deducted."""
        before, self._buckets = self._buckets, {}
        self._names = {key.owner: key.shown for key in keys}
        for key in keys:
            wanted: dict[Unit, int | None] = {
                "requests": key.requests_per_minute or requests_per_minute,
                "tokens": key.tokens_per_minute or tokens_per_minute,
            }
            before_key = before.get(key.owner, {})
            self._buckets[key.owner] = {
                unit: before_key[unit].resized(limit, now_s) if unit in before_key else Bucket(limit, now_s)
                for unit, limit in wanted.items()
                if limit is not None
            }

    def enter(self, owner: str, now_s: float) -> LimitReached | None:
        """Deduct one request. If a limit is used up, return it and deduct nothing."""
        buckets = self._buckets.get(owner, {})
        waits = {unit: bucket.has_s(REQUIRED[unit], now_s) for unit, bucket in buckets.items()}
        unit = max(waits, key=lambda each: waits[each], default=None)
        if unit is not None and waits[unit] > 0:
            return LimitReached(unit, buckets[unit].per_minute, waits[unit])
        if "requests" in buckets:
            buckets["requests"].take(1, now_s)
        return None

    def spend(self, owner: str, tokens: int, now_s: float) -> None:
        """Deduct computed tokens."""
        if bucket := self._buckets.get(owner, {}).get("tokens"):
            bucket.take(tokens, now_s)

    def shown(self, owner: str) -> str:
        """Return the name of a key for metrics, also of a key that a reload removed while its requests were running."""
        return self._names.get(owner, UNNAMED)

    def headers(self, owner: str, now_s: float) -> dict[str, str]:
        """Return the remaining amounts as OpenAI's rate-limit headers."""
        found = {}
        for unit, bucket in self._buckets.get(owner, {}).items():
            found[f"x-ratelimit-limit-{unit}"] = str(bucket.per_minute)
            found[f"x-ratelimit-remaining-{unit}"] = str(max(0, math.floor(bucket.level(now_s))))
            found[f"x-ratelimit-reset-{unit}"] = f"{bucket.full_s(now_s):.3f}s"
        return found
