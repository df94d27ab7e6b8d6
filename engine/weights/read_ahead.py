"""Thread that reads tensors from the disk before they are used, so that the disk works while matrices are converted.

Weights are views of mapped files: without this thread, the disk waits for every conversion, and every page fault waits
for the disk. The thread reads into a buffer that is not used; the pages stay in the page cache, from which the views
have them. It is at most AHEAD bytes before the tensor that was asked for last, so that pages are not evicted again, and
skips parts that are in the page cache.
"""

import os
import threading
from bisect import bisect_right
from collections.abc import Iterable
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

AHEAD = 256 << 20  # bytes
PART = 4 << 20  # bytes of one read
PAGE = 4096


class Span(NamedTuple):
    """Bytes of a file."""

    file: Path
    start: int
    end: int


def spans(tensors: Iterable[Span]) -> list[Span]:
    """Return the bytes of tensors in the order of the files, adjacent ones joined."""
    found: list[Span] = []
    for one in sorted(tensors):
        last = found[-1] if found else None
        if last is not None and last.file == one.file and one.start <= last.end + PAGE:
            found[-1] = last._replace(end=max(last.end, one.end))
        else:
            found.append(one)
    return found


class ReadAhead:
    """The thread. Places are numbers of bytes, counted through all spans."""

    def __init__(self, tensors: Iterable[Span]) -> None:
        self._spans = spans(tensors)
        self._begins = list(accumulate((one.end - one.start for one in self._spans), initial=0))
        self._wanted = 0  # place behind the last tensor that was asked for
        self._stopped = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="read-ahead", daemon=True)
        self._thread.start()

    def used(self, tensor: Span) -> None:
        """Note that a tensor is read now."""
        at = bisect_right(self._spans, (tensor.file, tensor.start, float("inf"))) - 1
        place = self._begins[at] + tensor.end - self._spans[at].start
        with self._changed:
            if place > self._wanted:
                self._wanted = place
                self._changed.notify()

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        buffer = memoryview(bytearray(PART))
        for begin, span in zip(self._begins, self._spans, strict=False):
            # A file that cannot be read is reported where its tensors are used.
            with suppress(OSError), span.file.open("rb", buffering=0) as file:
                for start in range(span.start, span.end, PART):
                    if not self._may_read(begin + start - span.start):
                        return
                    part = buffer[: min(PART, span.end - start)]
                    if not _is_cached(file.fileno(), start, len(part)):
                        os.preadv(file.fileno(), [part], start)
            if self._stopped:
                return

    def _may_read(self, place: int) -> bool:
        """Wait until a place is near enough. Return False at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or place < self._wanted + AHEAD)
            return not self._stopped


def _is_cached(file: int, start: int, size: int) -> bool:
    """Return whether the first and the last page of a part are in the page cache. False where this cannot be asked."""
    byte = bytearray(1)
    try:
        return all(os.preadv(file, [byte], at, os.RWF_NOWAIT) == 1 for at in (start, start + size - 1))
    except (OSError, AttributeError):
        return False
