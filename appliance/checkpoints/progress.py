"""Progress of a download in bytes, for the console and for /ready."""

import threading
import time
from collections import deque
from collections.abc import Callable

SILENT_S = 5.0  # seconds without data after which a pause is reported
_WINDOW_S = 20.0
_UNITS = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


class Progress:
    """Thread-safe positions of several files. `report` is called with a line for each failed attempt. `clock` returns
    seconds. `estimate` returns the total if it is not known before the download."""

    def __init__(
        self,
        total: int,
        report: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        estimate: Callable[[], int] = lambda: 0,
    ) -> None:
        self._total = total
        self._estimate = estimate
        self._report = report or (lambda text: None)
        self.waiting = False  # another process downloads the same files
        self._clock = clock
        self._lock = threading.Lock()
        self._at: dict[str, int] = {}
        self._moved = 0  # bytes received over the network
        self._last = clock()  # time of the last received bytes
        self._troubles: dict[str, str] = {}
        self._seen: deque[tuple[float, int]] = deque([(clock(), 0)])

    def put(self, name: str, position: int) -> None:
        """Set the number of bytes of a file that are in the cache, from any source."""
        with self._lock:
            self._at[name] = position

    def add(self, name: str, count: int) -> None:
        """Add newly received bytes of a file."""
        with self._lock:
            self._at[name] = self._at.get(name, 0) + count
            self._moved += count
            self._troubles.pop(name, None)
            self._last = now = self._clock()
            if now - self._seen[-1][0] > 0.25:
                self._seen.append((now, self._moved))
                while len(self._seen) > 2 and now - self._seen[0][0] > _WINDOW_S:
                    self._seen.popleft()

    def failed(self, name: str, attempt: str, error: str) -> None:
        """Record the error of an attempt. `attempt` describes the next one: `attempt 2 of 5`."""
        with self._lock:
            self._troubles[name] = f"{attempt}: {error}"
        self._report(f"{name}: {error}; {attempt} follows")

    @property
    def total(self) -> int:
        """Return the bytes of all files; 0 if unknown."""
        return self._total or self._estimate()

    @property
    def done(self) -> int:
        with self._lock:
            return sum(self._at.values())

    @property
    def fraction(self) -> float:
        total = self.total
        return min(1.0, self.done / total) if total else 0.0

    @property
    def rate(self) -> float:
        """Return bytes per second over the last 20 s."""
        with self._lock:
            (first, before), now = self._seen[0], self._clock()
            return (self._moved - before) / (now - first) if now > first else 0.0

    def text(self) -> str:
        """Return for example `3.1 of 15.2 GB, 120 MB/s, 2 min left` or `3.1 of 15.2 GB, no data for 8 s, attempt 2 of
        5: reset`."""
        done, rate = self.done, self.rate
        if self.waiting:
            return f"{format_bytes(done, self.total)}, downloaded by another process"
        with self._lock:
            silent_s, trouble = self._clock() - self._last, next(iter(self._troubles.values()), "")
        if silent_s >= SILENT_S or (trouble and not rate):
            silence = f", no data for {format_duration(silent_s)}" if silent_s >= 1 else ""
            return f"{format_bytes(done, self.total)}{silence}{trouble and ', '}{trouble}"
        if not rate:
            return format_bytes(done, self.total)
        left = f", {format_duration((self.total - done) / rate)} left" if self.total > done else ""
        return f"{format_bytes(done, self.total)}, {format_bytes(rate)}/s{left}"


def format_bytes(count: float, of: float = 0) -> str:
    """Format a number of bytes: `15.2 GB`, `3.1 of 15.2 GB`."""
    size, unit = next(((size, unit) for size, unit in _UNITS if max(count, of) >= size), (1, "bytes"))
    places = 0 if size == 1 else 1
    return f"{count / size:.{places}f} of {of / size:.{places}f} {unit}" if of else f"{count / size:.{places}f} {unit}"


def format_duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
