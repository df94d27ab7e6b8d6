"""The heartbeat file of an engine: 24 bytes that the engine maps and a monitor reads, without locks or system calls.

Layout, little-endian: process id (u64), state (u64), beats (u64). Each word is written whole; a monitor that reads
between two words sees one beat early or late, which changes nothing for it.

The launcher allocates the file before the first engine starts, and every later engine uses it again: a write to a
mapped page that the file system cannot allocate is a SIGBUS, so a file must never be mapped before it is allocated.
"""

import contextlib
import mmap
import os
import struct
import sys
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

_WORD = struct.Struct("<Q")
_LAYOUT = struct.Struct("<QQQ")


class State(IntEnum):
    LOADING = 1
    IDLE = 2
    BUSY = 3
    TESTING = 4  # the golden prompts of a start


@dataclass(frozen=True)
class Heartbeat:
    """What a pulse said when it was read: `beats` counts progress of a start, then finished steps and sleeps."""

    pid: int
    state: State
    beats: int


class HeartbeatWriter:
    """The engine's side. An empty path is for engines without a monitor. Where the file cannot be allocated, as on a
    full file system, the engine runs without it: the file is removed, which tells the monitor not to expect one."""

    def __init__(self, path: str) -> None:
        self.state = State.LOADING
        self._beats = 0
        self._map: mmap.mmap | bytearray = _mapped(path) if path else bytearray(_LAYOUT.size)
        _LAYOUT.pack_into(self._map, 0, os.getpid(), State.LOADING, 0)

    def beat(self, state: State) -> None:
        """Something was done, and this comes next. From one thread at a time."""
        self._beats += 1
        if state is not self.state:
            self.state = state
            _WORD.pack_into(self._map, _WORD.size, state)
        _WORD.pack_into(self._map, 2 * _WORD.size, self._beats)


def allocate_heartbeat(path: Path) -> None:
    """Allocate the file on disk, so that engines can map it later, also on a full file system. Raises OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, _LAYOUT.size)
    finally:
        os.close(descriptor)


def _mapped(path: str) -> mmap.mmap | bytearray:
    """Return the mapped file, or private memory where the file cannot be allocated."""
    try:
        allocate_heartbeat(Path(path))
        with open(path, "r+b") as file:
            return mmap.mmap(file.fileno(), _LAYOUT.size)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(path)
        without = "the engine runs without a heartbeat file, so it is not restarted if it hangs"
        print(f"slipway engine: {path}: {error.strerror}; {without}", file=sys.stderr, flush=True)
        return bytearray(_LAYOUT.size)


def read_heartbeat(path: Path) -> Heartbeat | None:
    """Return the last beat, or None where no engine has written one yet."""
    try:
        pid, state, beats = _LAYOUT.unpack(path.read_bytes())
        return Heartbeat(pid, State(state), beats)
    except (OSError, struct.error, ValueError):
        return None
