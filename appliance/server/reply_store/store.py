"""Store of all durable replies of a gateway, by key.

It is bounded in time and bytes and restored from the log at startup.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from appliance.observability.metrics import Metrics
from appliance.server.reply_store.entry import Entry
from appliance.server.reply_store.log import Log, framed
from appliance.server.reply_store.records import Dropped, Ended, Gained, Identity, Opened, decode, encode
from engine.api.messages import Submit

log = logging.getLogger(__name__)

FILL_S = 5.0  # time between two attempts to rewrite the file after a disk error
SLACK_BYTES = 2**20  # bytes of obsolete records that are tolerated before the file is rewritten


class JournalFull(Exception):
    """Raised when replies that are being generated use all of the allowed space."""


class ReplyStore:
    """Store of durable replies.

    Args:
        keep_s: time for which an ended or unused reply is stored.
        size: maximum bytes of all replies; the file has at most about twice as many.
        most: maximum number of replies.
        outputs: digest of the configuration; replies of another one are not resumed, and kept only with a final object.
        gauge: metric of the file's size.

    Raises JournalTaken, OSError.
    """

    def __init__(
        self,
        path: Path,
        metrics: Metrics,
        *,
        outputs: str,
        keep_s: float,
        size: int,
        max_entries: int | None = None,
        gauge: str = "journal_bytes",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._log = Log(path, self._failed)
        self._metrics = metrics
        self._outputs = outputs
        self._keep_s = keep_s
        self._size = size
        self._count = max_entries
        self._gauge = gauge
        self._clock = clock
        self._entries: dict[bytes, Entry] = {}
        self._numbers = itertools.count()
        self._holed = False  # records were lost since the last rewrite
        self._filled_s = -FILL_S
        self._most = 0  # size from which on the file is rewritten
        self._restore()
        self._log.start()

    def _restore(self) -> None:
        read = self._log.read()
        if read.skipped:
            log.error("%s: skipped %d damaged ranges; their tokens are generated again on resume", self._log.path,
                      read.skipped)  # fmt: skip
            self._metrics.add("journal_skipped_records", read.skipped)
        found: dict[int, Entry] = {}
        last = -1
        for record in read.records:
            try:
                value = decode(record)
            except msgspec.DecodeError:  # a complete record of another version
                self._metrics.add("journal_skipped_records", 1)
                continue
            last = max(last, value.entry)
            entry = found.get(value.entry)
            match value:
                case Opened():
                    found[value.entry] = Entry(value, self._write)
                case Gained() if entry is not None and value.number == len(entry.gained):
                    entry.load(record)  # all deltas after a hole are generated again
                case Ended() if entry is not None and value.deltas == len(entry.gained):
                    entry.state, entry.ended_at = "ended", value.at
                    entry.set_document(value.document)
                case Dropped():
                    found.pop(value.entry, None)
        self._numbers = itertools.count(last + 1)
        for entry in found.values():
            if (self.is_resumable(entry) or entry.document) and not self._is_old(entry):
                self._entries[entry.opened.key] = entry
        self._make_room(0)
        if found:
            log.info("%s: restored %d of %d durable replies", self._log.path, len(self._entries), len(found))
        self._rewrite()

    def reconfigure(self, *, outputs: str, keep_s: float, size: int) -> None:
        """Apply new limits, from the next record on. They also affect replies that are already stored."""
        self._outputs, self._keep_s, self._size = outputs, keep_s, size

    def entries(self) -> list[Entry]:
        return list(self._entries.values())

    def is_resumable(self, entry: Entry) -> bool:
        """Return if the entry's tokens are still valid for the current configuration, so that it can be resumed."""
        return entry.opened.outputs == self._outputs

    def find(self, key: bytes) -> Entry | None:
        entry = self._entries.get(key)
        if entry is not None and self._is_old(entry):
            del self._entries[key]
            return None
        return entry

    def open(
        self, key: bytes, body: bytes, identity: Identity, submits: tuple[Submit, ...], about: bytes = b""
    ) -> Entry:
        """Create an entry for this key. Raise JournalFull."""
        opened = Opened(next(self._numbers), key, body, identity, submits, self._outputs, self._clock(), about)
        entry = Entry(opened, self._write)
        self._make_room(entry.size)
        self._entries[key] = entry
        self._write(encode(opened))
        return entry

    def record_end(self, entry: Entry) -> None:
        """Record that a generation ended or failed.

        A failed one without a final object is dropped, so that it can be retried.
        """
        if entry.failure is None or entry.document:
            entry.ended_at = self._clock()
            return
        self.drop(entry)

    def drop(self, entry: Entry) -> None:
        """Remove an entry."""
        if self._entries.get(entry.opened.key) is entry:
            del self._entries[entry.opened.key]
        self._write(encode(Dropped(entry.opened.entry)))

    async def flushed(self) -> None:
        """Wait until all written records are on disk."""
        await asyncio.wrap_future(self._log.flushed())

    def throttle(self, pause_s: float, for_s: float) -> None:
        """Simulate a slow disk for a while (log.py)."""
        self._log.throttle(pause_s, for_s)

    async def stop(self) -> None:
        for entry in list(self._entries.values()):
            await entry.pause()
        self._log.stop()

    def _is_old(self, entry: Entry) -> bool:
        if entry.state == "running" or entry.subscribers:
            return False
        return self._clock() - max(entry.opened.at, entry.ended_at) > self._keep_s

    def _write(self, record: bytes) -> None:
        self._log.append(framed(record))
        if self._log.size > self._most:
            self._make_room(0)
            self._rewrite()
        self._fill_holes()
        self._metrics.set(self._gauge, self._log.size)

    def _rewrite(self) -> None:
        """Rewrite the file without obsolete records."""
        self._log.replace(self._records())
        self._most = 2 * self._log.size + SLACK_BYTES

    def _make_room(self, wanted: int) -> None:
        """Make room for `wanted` bytes: drop expired entries, then the oldest ones that are neither generated nor
        read.
        """
        for key, entry in list(self._entries.items()):
            if self._is_old(entry):
                del self._entries[key]
        idle = [entry for entry in self._entries.values() if entry.state != "running" and not entry.subscribers]
        idle.sort(key=lambda entry: (entry.state != "ended", entry.ended_at or entry.opened.at))
        held = sum(entry.size for entry in self._entries.values())

        def has_room() -> bool:
            few = self._count is None or len(self._entries) + bool(wanted) <= self._count
            return few and held + wanted <= self._size

        for entry in idle:
            if has_room():
                return
            del self._entries[entry.opened.key]
            held -= entry.size
        if wanted and not has_room():
            raise JournalFull

    def _records(self) -> Iterator[bytes]:
        for entry in self._entries.values():
            yield framed(encode(entry.opened))
            yield from map(framed, entry.gained)
            if entry.state == "ended":
                yield framed(entry.end_record())

    def _failed(self, error: OSError) -> None:
        """Handle a write error in the writer thread. A full disk fails many times a second, so log it only once."""
        if not self._holed:
            log.error("%s: %s; streams continue, but after a gateway restart lost tokens are generated again",
                      self._log.path, error.strerror)  # fmt: skip
        self._holed = True
        self._metrics.add("journal_errors", 1)

    def _fill_holes(self) -> None:
        """Rewrite all entries some time after records were lost, so that a disk that works again has all of them."""
        if self._holed and time.monotonic() - self._filled_s > FILL_S:
            self._filled_s, self._holed = time.monotonic(), False
            log.warning("%s: records were lost; rewriting the journal from memory", self._log.path)
            self._rewrite()
