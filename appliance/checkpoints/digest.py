"""SHA-256 of many large files: streamed, several in parallel (hashlib releases the GIL), with progress.

Digests are cached by path, size, modification time in ns and inode. That is sufficient for `check` to report that
nothing has changed; `serve` reads every byte again.
"""

import contextlib
import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec

from engine.api.files import open_file, real_path

BUFFER_BYTES = 4 * 2**20
THREADS = 8
CACHE_FILE = "digests.json"
_LINE_EVERY_S = 10.0  # without a terminal, for example in the log of a container
_DRAW_EVERY_S = 0.2
_SILENT_S = 1.0  # work that finishes earlier shows no progress

Sha256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
Progress = Callable[[int], None]


class Digest(msgspec.Struct, frozen=True):
    """Size in bytes and SHA-256 of a file."""

    size: int
    sha256: Sha256


def digests(paths: Iterable[Path], progress: Progress) -> dict[Path, Digest]:
    """Return the digest of each file, starting with the largest. `progress` is called with the bytes read. Raise
    OSError."""
    from concurrent.futures import ThreadPoolExecutor  # 8 ms that a start without a lock should not spend

    largest = sorted(paths, key=lambda path: -path.stat().st_size)
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        return dict(zip(largest, pool.map(lambda path: digest(path, progress), largest), strict=True))


def digest(path: Path, progress: Progress) -> Digest:
    found, size, buffer = hashlib.sha256(), 0, bytearray(BUFFER_BYTES)
    view = memoryview(buffer)
    with open_file(path) as file:
        while count := file.readinto(buffer):
            found.update(view[:count])
            size += count
            progress(count)
    return Digest(size, found.hexdigest())


# -- cache of digests -------------------------------------------------------------------------------------------------


class _CachedDigest(msgspec.Struct, frozen=True):
    """Status of a file and its digest at that time."""

    size: int
    changed_ns: int
    inode: int
    sha256: Sha256


def _file_status(path: Path) -> tuple[int, int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ino


def cached_digests(cache: Path | None, paths: Iterable[Path]) -> dict[Path, Digest]:
    """Return the cached digests of files whose status has not changed."""
    seen = _read(cache)
    found = {}
    for path in paths:
        old = seen.get(str(real_path(path)))
        with contextlib.suppress(OSError):
            if old is not None and _file_status(path) == (old.size, old.changed_ns, old.inode):
                found[path] = Digest(old.size, old.sha256)
    return found


def cache_digests(cache: Path | None, found: Mapping[Path, Digest]) -> None:
    """Store digests for the next `check`. A cache that cannot be written is not an error."""
    if cache is None:
        return
    seen = _read(cache)
    with contextlib.suppress(OSError):
        for path, one in found.items():
            seen[str(real_path(path))] = _CachedDigest(*_file_status(path), one.sha256)
        cache.mkdir(parents=True, exist_ok=True)
        draft = cache / f"{CACHE_FILE}.{os.getpid()}"
        draft.write_bytes(msgspec.json.encode(seen))
        draft.replace(cache / CACHE_FILE)


def _read(cache: Path | None) -> dict[str, _CachedDigest]:
    try:
        return msgspec.json.decode((cache / CACHE_FILE).read_bytes(), type=dict[str, _CachedDigest]) if cache else {}
    except (OSError, msgspec.DecodeError):
        return {}


# -- progress ---------------------------------------------------------------------------------------------------------


@dataclass
class HashProgress:
    """Prints the progress of hashing to standard error: one line that is updated on a terminal, else one every 10 s."""

    total: int
    what: str
    started: float = field(default_factory=time.monotonic)
    done: int = 0
    _next: float = 0.0
    _drawn: bool = False

    def __call__(self, count: int) -> None:
        self.done += count
        now = time.monotonic()
        terminal = sys.stderr.isatty()
        if now < max(self._next, self.started + (_SILENT_S if terminal else _LINE_EVERY_S)):
            return
        self._next = now + (_DRAW_EVERY_S if terminal else _LINE_EVERY_S)
        rate = self.done / (now - self.started)
        text = f"hashing {self.what}: {self.done / 2**30:.1f} of {self.total / 2**30:.1f} GiB, {rate / 2**30:.1f} GiB/s"
        print(f"\r{text}\x1b[K" if terminal else text, end="" if terminal else "\n", file=sys.stderr, flush=True)
        self._drawn = terminal

    def close(self) -> None:
        if self._drawn:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
