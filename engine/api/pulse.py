"""An engine's signs of life: 24 bytes of a file that the engine maps and a watcher reads, without a lock or a call.

Layout, little-endian: process id (u64), state (u64), beats (u64). Each word is written whole; a watcher that reads
between two words sees one beat early or late, which changes nothing for it.
"""

import mmap
import os
import struct
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
class Beat:
    """What a pulse said when it was read: `beats` counts progress of a start, then finished steps and sleeps."""

    pid: int
    state: State
    beats: int


class Pulse:
    """The engine's side. An empty path is for engines that nobody watches."""

    def __init__(self, path: str) -> None:
        self.state = State.LOADING
        self._beats = 0
        if path:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            os.ftruncate(descriptor, _LAYOUT.size)
            self._map: mmap.mmap | bytearray = mmap.mmap(descriptor, _LAYOUT.size)
            os.close(descriptor)
        else:
            self._map = bytearray(_LAYOUT.size)
        _LAYOUT.pack_into(self._map, 0, os.getpid(), State.LOADING, 0)

    def beat(self, state: State) -> None:
        """Something was done, and this comes next. From one thread at a time."""
        self._beats += 1
        if state is not self.state:
            self.state = state
            _WORD.pack_into(self._map, _WORD.size, state)
        _WORD.pack_into(self._map, 2 * _WORD.size, self._beats)


def read_pulse(path: Path) -> Beat | None:
    """The last beat, or None where no engine has written one yet."""
    try:
        pid, state, beats = _LAYOUT.unpack(path.read_bytes())
        return Beat(pid, State(state), beats)
    except (OSError, struct.error, ValueError):
        return None
