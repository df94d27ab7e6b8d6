"""The heartbeat file of an engine: 24 bytes that the engine maps and a monitor reads, without locks or system calls.

Layout, little-endian: process id (u64), state (u64), beats (u64). Each word is written atomically. A monitor that reads
between two writes sees one beat early or late, which is harmless.

The launcher allocates the file before the first engine starts, and later engines reuse it. A write to a mapped page
that the file system cannot allocate raises SIGBUS, so the file must be allocated before it is mapped.
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
    TESTING = 4  # golden prompts at the start


@dataclass(frozen=True)
class Heartbeat:
    """Content of a heartbeat file."""

    pid: int
    state: State
    count: int  # progress of the start, then finished steps and idle wake-ups


class HeartbeatWriter:
    """Writes the heartbeat. An empty path is for engines without a monitor. If the file cannot be allocated, as on a
    full file system, the engine runs without it: the file is removed, so that the monitor does not expect beats."""

    def __init__(self, path: str) -> None:
        self.state = State.LOADING
        self._count = 0
        self._map: mmap.mmap | bytearray = _mapped(path) if path else bytearray(_LAYOUT.size)
        _LAYOUT.pack_into(self._map, 0, os.getpid(), State.LOADING, 0)

    def write(self, state: State) -> None:
        """Report progress and the next state. Must be called from one thread at a time."""
        self._count += 1
        if state is not self.state:
            self.state = state
            _WORD.pack_into(self._map, _WORD.size, state)
        _WORD.pack_into(self._map, 2 * _WORD.size, self._count)


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
        pid, state, count = _LAYOUT.unpack(path.read_bytes())
        return Heartbeat(pid, State(state), count)
    except (OSError, struct.error, ValueError):
        return None
