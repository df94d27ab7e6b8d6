"""An append-only file of records with checksums, written by a separate thread.

A record is `SLJ1`, its length and the CRC-32 of its length and payload (little-endian, 4 bytes each), and the payload.
Reading skips damaged data up to the next complete record: a torn tail, a flipped bit or a hole.
"""

import fcntl
import logging
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

MAGIC = b"SLJ1"
HEAD = struct.Struct("<4sII")
# Maximum time that the first byte of a reply waits for the disk. With a slower disk, tokens may have to be generated
# again.
DISK_S = 1.0
SYNC_PAUSE_S = 0.05  # minimum time between two fsyncs that no caller waits for


class JournalTaken(Exception):
    """Raised if another process has this file open for writing."""


@dataclass
class Read:
    """Result of reading a log file."""

    records: list[bytes]
    skipped: int = 0  # number of damaged ranges, not counting the tail
    torn: bool = False  # the file ends within a record


def framed(payload: bytes) -> bytes:
    length = len(payload)
    return HEAD.pack(MAGIC, length, _checksum(length, payload)) + payload


def unframed(data: bytes) -> Read:
    """Return the payloads of all complete records, in order."""
    found = Read([])
    at = 0
    while at < len(data):
        payload = _record(data, at)
        if payload is not None:
            found.records.append(payload)
            at += HEAD.size + len(payload)
            continue
        at = next(_whole_from(data, at + 1), len(data))
        if at < len(data):
            found.skipped += 1
        else:
            found.torn = True
    return found


def _whole_from(data: bytes, at: int) -> Iterator[int]:
    """Yield the offsets of complete records from `at` on."""
    at = data.find(MAGIC, at)
    while at >= 0:
        if _record(data, at) is not None:
            yield at
        at = data.find(MAGIC, at + 1)


def _record(data: bytes, at: int) -> bytes | None:
    if len(data) - at < HEAD.size:
        return None
    magic, length, checksum = HEAD.unpack_from(data, at)
    start = at + HEAD.size
    if magic != MAGIC or length > len(data) - start:
        return None
    payload = data[start : start + length]
    return payload if _checksum(length, payload) == checksum else None


def _checksum(length: int, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(length.to_bytes(4, "little")))


class Log:
    """The log file at `path`, created with mode 0600.

    Raises JournalTaken, or OSError if the file cannot be opened. A failed write loses its records and is reported to
    `on_error` in the writer thread. Later writes are still attempted.
    """

    def __init__(self, path: Path, on_error: Callable[[OSError], None]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.size = 0
        self._on_error = on_error
        self._file = self._open(path)
        self._wake = threading.Condition()
        self._pending: list[bytes] = []
        self._instead: list[bytes] | None = None  # new content of the file, to be written before the pending records
        self._waiting: list[Future[None]] = []
        self._stopping = False
        self._pause_s = self._throttled_until_s = 0.0
        self._unthrottled = threading.Event()
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)

    def _open(self, path: Path) -> int:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(file)
            raise JournalTaken(f"{path} is in use by another process") from error
        return file

    def read(self) -> Read:
        """Read the file. Call this before `start`."""
        found = unframed(self.path.read_bytes())
        self.size = os.fstat(self._file).st_size
        return found

    def start(self) -> None:
        self._thread.start()

    def append(self, record: bytes) -> None:
        """Queue a framed record for writing."""
        with self._wake:
            self._pending.append(record)
            self.size += len(record)
            self._wake.notify()

    def replace(self, records: Iterable[bytes]) -> None:
        """Replace the file by these framed records. The old file stays in place until the new one is complete."""
        with self._wake:
            self._pending.clear()
            self._instead = list(records)
            self.size = sum(map(len, self._instead))
            self._wake.notify()

    def throttle(self, pause_s: float, for_s: float) -> None:
        """Slow down each write by `pause_s` for `for_s` seconds, to simulate a slow disk."""
        self._pause_s, self._throttled_until_s = pause_s, time.monotonic() + for_s
        if pause_s:
            self._unthrottled.clear()
        else:
            self._unthrottled.set()

    def flushed(self) -> Future[None]:
        """Return a future that completes when all appended records are on disk or could not be written."""
        future: Future[None] = Future()
        with self._wake:
            self._waiting.append(future)
            self._wake.notify()
        return future

    def stop(self) -> None:
        """Write the pending records and close the file."""
        with self._wake:
            self._stopping = True
            self._unthrottled.set()
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()
        os.close(self._file)

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._pending or self._waiting or self._instead is not None or self._stopping):
                    self._wake.wait()
                instead, self._instead = self._instead, None
                records, self._pending = self._pending, []
                waiting, self._waiting = self._waiting, []
                stopping = self._stopping
            if time.monotonic() < self._throttled_until_s:
                self._unthrottled.wait(self._pause_s)
            try:
                if instead is not None:
                    self._write_anew(instead)
                self._write(self._file, b"".join(records))
                os.fdatasync(self._file)
            except OSError as error:
                self._on_error(error)
            for future in waiting:
                future.set_result(None)
            if stopping:
                return
            if not waiting:
                time.sleep(SYNC_PAUSE_S)

    def _write_anew(self, records: list[bytes]) -> None:
        path = self.path.with_suffix(".new")
        path.unlink(missing_ok=True)
        file = self._open(path)
        try:
            self._write(file, b"".join(records))
            os.fdatasync(file)
            os.replace(path, self.path)
        except OSError:
            os.close(file)
            path.unlink(missing_ok=True)  # it would use up the rest of a full disk
            raise
        os.close(self._file)
        self._file = file
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _write(self, file: int, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(file, view) :]
