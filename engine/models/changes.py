"""Whether the files of a served checkpoint were changed since they were read.

Weights may be read in their mapped files for as long as an engine serves: who writes into such a file changes what
the model computes, from one step to the next. A look costs one `stat` a file; contents are compared, at a sample of
pages, only where size or modification time have changed.
"""

import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SUFFIXES = (".safetensors", ".gguf")
PAGE = 4096
PAGES = 256
"""Compared pages of a file: its first and last, and others at equal distances."""


@dataclass(frozen=True)
class Change:
    """`overwritten`: the file that is mapped has other contents; else another file has its name, or only its
    modification time differs. `what` says it in words."""

    file: Path
    overwritten: bool
    what: str


@dataclass(frozen=True)
class _Stamp:
    inode: tuple[int, int]
    size: int
    modified_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> "_Stamp":
        return cls((found.st_dev, found.st_ino), found.st_size, found.st_mtime_ns)


class WeightFiles:
    """The weights of a checkpoint: a folder, or one file. Keeps an open descriptor of none of them."""

    def __init__(self, checkpoint: Path) -> None:
        files = sorted(checkpoint.glob("*")) if checkpoint.is_dir() else [checkpoint]
        names = [file.resolve() for file in files if file.suffix in SUFFIXES and file.is_file()]
        self._stamps = {file: _Stamp.of(file.stat()) for file in names}
        self._samples = {file: _sample(file) for file in names}

    def changes(self) -> Iterator[Change]:
        """Yield each change once. A file that is gone is none: what is mapped of it stays."""
        for file, before in self._stamps.items():
            try:
                now = _Stamp.of(file.stat())
            except OSError:
                continue
            if now != before:
                self._stamps[file] = now
                yield self._change(file, before, now)

    def _change(self, file: Path, before: _Stamp, now: _Stamp) -> Change:
        if now.inode != before.inode:
            return Change(file, False, "was replaced by another file")
        if now.size != before.size:
            return Change(file, True, f"was changed in place from {before.size:,} to {now.size:,} bytes")
        try:
            same = _sample(file) == self._samples[file]
        except OSError as error:
            return Change(file, False, f"has another modification time and cannot be read: {error.strerror}")
        what = "has another modification time, and the same contents in a sample of pages"
        return Change(file, False, what) if same else Change(file, True, "was overwritten in place")


def _sample(file: Path) -> int:
    """Return the CRC-32 of the sampled pages. Raises OSError."""
    found = 0
    with file.open("rb", buffering=0) as opened:
        last = max(0, os.fstat(opened.fileno()).st_size - PAGE)
        for number in range(PAGES):
            opened.seek(last * number // (PAGES - 1))
            found = zlib.crc32(opened.read(PAGE), found)
    return found
