"""Cache directory of one version of a checkpoint. A file gets its name when it is complete and verified; until then it
is NAME.part, from which an interrupted download resumes."""

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

_POLL_S = 0.1


class _File(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int | None: ...
    @property
    def version(self) -> str: ...


@dataclass(frozen=True)
class CacheDirectory:
    """Cache directory of one version."""

    folder: Path  # the folder that is served
    lock_file: Path  # prevents two processes from downloading the same files
    blobs: Path | None = None
    """If set (layout of the Hugging Face cache), files are stored here under their version, and `folder` has links to
    them."""

    def target(self, file: _File) -> Path:
        return self.folder / file.name if self.blobs is None else self.blobs / file.version

    def has(self, file: _File) -> bool:
        try:
            size = (self.folder / file.name).stat().st_size
        except OSError:
            return False
        return file.size is None or size == file.size

    def has_content(self, file: _File) -> bool:
        """Return whether the content is in the cache, possibly only under another revision."""
        if self.blobs is None or file.size is None:
            return self.has(file)
        try:
            return self.target(file).stat().st_size == file.size
        except OSError:
            return False

    def cached_bytes(self, file: _File) -> int:
        """Return the number of bytes that are in the cache, of a complete or partial file."""
        if self.has(file) or self.has_content(file):
            return file.size or 0
        with contextlib.suppress(OSError):
            return self.part(file).stat().st_size
        return 0

    def part(self, file: _File) -> Path:
        target = self.target(file)
        return target.with_name(f"{target.name}.part")

    def put(self, file: _File) -> None:
        """Give a complete file its final name."""
        target, name = self.target(file), self.folder / file.name
        name.parent.mkdir(parents=True, exist_ok=True)
        if self.part(file).exists():
            os.replace(self.part(file), target)
        if self.blobs is not None:
            link = name.with_name(f".{name.name}.{os.getpid()}")
            link.symlink_to(os.path.relpath(target, name.parent))
            os.replace(link, name)

    def free_bytes(self) -> int:
        """Return the free space of the disk that contains it."""
        place = self.folder
        while not place.exists():
            place = place.parent
        return shutil.disk_usage(place).free

    @contextlib.contextmanager
    def lock(self, waiting: Callable[[], None]) -> Iterator[None]:
        """Hold an exclusive lock among processes; the kernel releases it when a process ends. `waiting` is called
        repeatedly while another process has the lock, and may raise."""
        self.lock_file.parent.mkdir(parents=True, exist_ok=True)
        with self.lock_file.open("ab") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    waiting()
                    time.sleep(_POLL_S)
            yield
