"""How far a download is, in bytes, for a person and for /ready."""

import threading
import time
from collections import deque
from collections.abc import Callable

SILENT_S = 5.0  # from then on a pause is told
_WINDOW_S = 20.0
_UNITS = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


class Progress:
    """Positions of several files, told by several threads. `say` gets a line for each attempt that failed; `clock` in
    seconds; `estimate` gives the total where it is not known before the download."""

    def __init__(
        self,
        total: int,
        say: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        estimate: Callable[[], int] = lambda: 0,
    ) -> None:
        self._total = total
        self._estimate = estimate
        self._say = say or (lambda text: None)
        self.waiting = False  # for another process that downloads the same
        self._clock = clock
        self._lock = threading.Lock()
        self._at: dict[str, int] = {}
        self._moved = 0  # bytes that came over the network
        self._last = clock()  # when some came last
        self._troubles: dict[str, str] = {}
        self._seen: deque[tuple[float, int]] = deque([(clock(), 0)])

    def put(self, name: str, position: int) -> None:
        """So many bytes of a file are here, wherever they came from."""
        with self._lock:
            self._at[name] = position

    def add(self, name: str, count: int) -> None:
        """So many further bytes of it came just now."""
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
        """An attempt at a file ended with an error, and `attempt` comes next: `attempt 2 of 5`."""
        with self._lock:
            self._troubles[name] = f"{attempt}: {error}"
        self._say(f"{name}: {error}; {attempt} follows")

    @property
    def total(self) -> int:
        """Bytes of all files; 0 where nobody knows."""
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
        """Bytes a second, of the last 20 s."""
        with self._lock:
            (first, before), now = self._seen[0], self._clock()
            return (self._moved - before) / (now - first) if now > first else 0.0

    def text(self) -> str:
        """`3.1 of 15.2 GB, 120 MB/s, 2 min left`, `3.1 of 15.2 GB, no byte for 8 s, attempt 2 of 5: reset`"""
        done, rate = self.done, self.rate
        if self.waiting:
            return f"{spell(done, self.total)}, by another process"
        with self._lock:
            silent_s, trouble = self._clock() - self._last, next(iter(self._troubles.values()), "")
        if silent_s >= SILENT_S or (trouble and not rate):
            silence = f", no byte for {spell_time(silent_s)}" if silent_s >= 1 else ""
            return f"{spell(done, self.total)}{silence}{trouble and ', '}{trouble}"
        if not rate:
            return spell(done, self.total)
        left = f", {spell_time((self.total - done) / rate)} left" if self.total > done else ""
        return f"{spell(done, self.total)}, {spell(rate)}/s{left}"


def spell(count: float, of: float = 0) -> str:
    """`15.2 GB`, `3.1 of 15.2 GB`"""
    size, unit = next(((size, unit) for size, unit in _UNITS if max(count, of) >= size), (1, "bytes"))
    places = 0 if size == 1 else 1
    return f"{count / size:.{places}f} of {of / size:.{places}f} {unit}" if of else f"{count / size:.{places}f} {unit}"


def spell_time(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
