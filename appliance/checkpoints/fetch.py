"""Download the files of a listing into its cache directory: several in parallel, each with retries that resume where
the previous attempt ended.

An attempt ends with the complete file, with an error, or after `stall_s` without a byte, which the clients of the
stores detect. Attempts without progress are counted; `total_s` limits the whole download. Permanent errors (401, 403,
404, a wrong checksum) end it at once.
"""

import hashlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from appliance.checkpoints.cache_directory import CacheDirectory
from appliance.checkpoints.progress import Progress, format_bytes
from appliance.checkpoints.remote import Listing, Policy, RemoteFile, RestartFile, SourceError, Store

CONNECTIONS = 4
MAX_PAUSE_S = 30.0
BLOCK = 1 << 20

T = TypeVar("T")


class DownloadAborted(SourceError):
    """Raised if the download ended because another file failed."""


class Deadline:
    """Time limit of a download. Raises SourceError when the time is over or another thread has failed."""

    def __init__(self, total_s: float) -> None:
        self._total_s = total_s
        self._end = time.monotonic() + total_s
        self.failed = threading.Event()

    def check(self) -> None:
        if self.failed.is_set():
            raise DownloadAborted("stopped because another file failed")
        if time.monotonic() > self._end:
            raise SourceError(f"not complete after {self._total_s:g} s; raise model.download.total_timeout")

    def pause(self, seconds: float) -> None:
        self.failed.wait(min(seconds, max(0.0, self._end - time.monotonic())))
        self.check()


def _incomplete() -> bool:
    return False


def fetch(
    store: Store,
    listing: Listing,
    cache_directory: CacheDirectory,
    policy: Policy,
    progress: Progress,
    is_complete: Callable[[], bool] = _incomplete,
) -> None:
    """Download the missing files. Raise SourceError; the data received so far is kept for the next download.

    Do nothing if `is_complete` returns True, because another process has finished meanwhile.
    """
    deadline = Deadline(policy.total_s)

    def waiting() -> None:
        progress.waiting = True
        for file in listing.files:
            progress.put(file.name, cache_directory.cached_bytes(file))
        deadline.check()

    try:
        with cache_directory.lock(waiting):
            progress.waiting = False
            if is_complete():
                return
            for file in listing.files:
                progress.put(file.name, cache_directory.cached_bytes(file))
            missing = [file for file in listing.files if not cache_directory.has(file)]
            check_space(cache_directory, missing, policy)
            with ThreadPoolExecutor(CONNECTIONS) as pool:
                done = [
                    pool.submit(_download_file, store, file, cache_directory, policy, progress, deadline)
                    for file in missing
                ]
            failures = [error for error in (future.exception() for future in done) if error is not None]
            if failures:
                raise next((error for error in failures if not isinstance(error, DownloadAborted)), failures[0])
    except OSError as error:
        raise SourceError(f"{cache_directory.folder}: cannot be written: {error.strerror or error}") from error


def check_space(cache_directory: CacheDirectory, missing: list[RemoteFile], policy: Policy) -> None:
    """Raise SourceError if the missing files, as far as their sizes are known, would leave less than `min_free`
    bytes."""
    needed = sum((file.size or 0) - cache_directory.cached_bytes(file) for file in missing)
    free = cache_directory.free_bytes()
    if missing and free - needed < policy.min_free:
        raise SourceError(
            f"{cache_directory.folder} has {format_bytes(free)} free, but {format_bytes(needed)} must be downloaded "
            f"and {format_bytes(policy.min_free)} must stay free (model.download.min_free); free space, or change "
            "model.download.cache"
        )


def with_retries(policy: Policy, run: Callable[[], T]) -> T:
    """Return the result of `run`, retried while its error is transient."""
    deadline = Deadline(policy.total_s)
    for failures in range(1, policy.attempts + 1):
        try:
            return run()
        except SourceError as error:
            if not error.transient or failures == policy.attempts:
                raise
            deadline.pause(min(policy.pause_s * 2 ** (failures - 1), MAX_PAUSE_S))
    raise AssertionError("there is at least one attempt")


def _download_file(
    store: Store,
    file: RemoteFile,
    cache_directory: CacheDirectory,
    policy: Policy,
    progress: Progress,
    deadline: Deadline,
) -> None:
    if cache_directory.has_content(file):
        cache_directory.put(file)
        return
    cache_directory.part(file).parent.mkdir(parents=True, exist_ok=True)
    failures = restarts = 0
    try:
        while True:
            attempt = _Attempt(store, file, cache_directory, progress, deadline)
            try:
                deadline.check()
                attempt.run()
                cache_directory.put(file)
                return
            except SourceError as error:
                if not error.transient:
                    raise
                failures = 1 if attempt.received else failures + 1
                restarts += isinstance(error, RestartFile)  # counted regardless of the bytes received
                if max(failures, restarts) >= policy.attempts:
                    raise SourceError(
                        f"{file.name}: failed after {max(failures, restarts)} attempts: {error}"
                    ) from error
                progress.failed(file.name, f"attempt {failures + 1} of {policy.attempts}", _brief(error))
                deadline.pause(min(policy.pause_s * 2 ** (failures - 1), MAX_PAUSE_S))
    except BaseException:
        deadline.failed.set()
        raise


def _brief(error: SourceError) -> str:
    """Return the message without the address, which is shown next to it."""
    where, _, what = str(error).partition(": ")
    return what if what and "://" in where else str(error)


class _Attempt:
    """One attempt at the missing part of a file. `received` is the number of bytes that it added."""

    def __init__(
        self, store: Store, file: RemoteFile, cache_directory: CacheDirectory, progress: Progress, deadline: Deadline
    ) -> None:
        self._store, self._file, self._part = store, file, cache_directory.part(file)
        self._progress, self._deadline = progress, deadline
        self.received = 0

    def run(self) -> None:
        """Run the attempt. Raise SourceError; raise RestartFile after deleting data that cannot be used."""
        start = self._part.stat().st_size if self._part.exists() else 0
        self._progress.put(self._file.name, start)
        try:
            digest = self._digest()
            self._check(start, self._read(start, digest), digest)
        except RestartFile:
            self._part.unlink(missing_ok=True)
            self._progress.put(self._file.name, 0)
            self.received = 0
            raise

    def _digest(self) -> "hashlib._Hash":
        digest = hashlib.sha256()
        if self._file.sha256 and self._part.exists():
            with self._part.open("rb") as part:
                while block := part.read(BLOCK):
                    digest.update(block)
                    self._deadline.check()
        return digest

    def _read(self, start: int, digest: "hashlib._Hash") -> int:
        size, at = self._file.size, start
        if size is not None and start >= size:
            return start
        with self._part.open("ab") as part:
            for block in self._store.stream(self._file, start):
                part.write(block)
                part.flush()  # received data survives a SIGKILL
                if self._file.sha256:
                    digest.update(block)
                at += len(block)
                self.received += len(block)
                self._progress.add(self._file.name, len(block))
                self._deadline.check()
                if size is not None and at > size:
                    break
            part.flush()
            os.fsync(part.fileno())
        return at

    def _check(self, start: int, at: int, digest: "hashlib._Hash") -> None:
        file = self._file
        if file.size is not None and at < file.size:
            raise SourceError(f"{file.name}: ended after {at:,} of {file.size:,} bytes", transient=True)
        if file.size is not None and at > file.size:
            raise RestartFile(f"{file.name}: has more than the {file.size:,} bytes that the server announced")
        if file.sha256 and digest.hexdigest() != file.sha256:
            wrong = f"{file.name}: has SHA-256 {digest.hexdigest()}, but {file.sha256} is expected"
            if start:
                raise RestartFile(wrong)  # the cached part may belong to another version
            self._part.unlink()
            raise SourceError(wrong)
