"""Detect changes to the weight files of a served checkpoint.

An engine may read weights from memory-mapped files while it serves, so writing into such a file changes its outputs.
A check costs one `stat` per file. Contents are compared, in a sample of pages, when the modification time changed.
"""

import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.api.files import open_file, real_path

SUFFIXES = (".safetensors", ".gguf")
PAGE = 4096
PAGES = 256
"""Number of compared pages of a file: its first and last, and others at equal distances."""


@dataclass(frozen=True)
class Change:
    """A change of a weight file."""

    file: Path
    overwritten: bool  # contents changed in place; else the file was replaced or only its modification time changed
    what: str  # description


@dataclass(frozen=True)
class _Stamp:
    inode: tuple[int, int]
    size: int
    modified_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> "_Stamp":
        return cls((found.st_dev, found.st_ino), found.st_size, found.st_mtime_ns)


class WeightFiles:
    """The weight files of a checkpoint folder, or a single file. Files are not kept open."""

    def __init__(self, checkpoint: Path) -> None:
        files = sorted(checkpoint.glob("*")) if checkpoint.is_dir() else [checkpoint]
        names = [real_path(file) for file in files if file.suffix in SUFFIXES and file.is_file()]
        self._stamps = {file: _Stamp.of(file.stat()) for file in names}
        self._samples = {file: _sample(file) for file in names}

    def changes(self) -> Iterator[Change]:
        """Yield each change once. Removed files are ignored: their mapped pages stay valid."""
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
    with open_file(file) as opened:
        last = max(0, os.fstat(opened.fileno()).st_size - PAGE)
        for number in range(PAGES):
            opened.seek(last * number // (PAGES - 1))
            found = zlib.crc32(opened.read(PAGE), found)
    return found
