"""Where the ranks of one model on one host meet: memory that their processes share. meeting.h says how."""

import mmap
import os

import torch
from torch import Tensor

from kernels.cpu.library import load


class Abandoned(RuntimeError):
    """Another rank will not come."""


class Meeting:
    """One rank's view. All ranks take part in everything, in the same order, one call at a time."""

    def __init__(self, variant: str, file: int, rank: int, size: int, floats: int) -> None:
        """file: descriptor of the same empty file in every rank, such as one of memfd_create. floats: room for what a
        rank brings at once, the same in every rank; memory is only taken for what is used of it."""
        self.rank, self.size, self.floats = rank, size, floats
        self._library = load(variant)
        length = self._library.slipway_meeting_bytes(size, floats)
        os.ftruncate(file, length)
        memory = mmap.mmap(file, length)
        self._memory = torch.frombuffer(memory, dtype=torch.uint8)
        self.handle = self._library.slipway_meeting(self._memory.data_ptr(), rank, size, floats)
        if not self.handle:
            raise MemoryError("no memory for a meeting of ranks")

    def gather(self, x: Tensor) -> Tensor:
        """[size, ...]: x of every rank, which have equal shapes. Raises Abandoned."""
        x = x.contiguous()
        out = x.new_empty((self.size, *x.shape))
        if self._library.slipway_gather(self.handle, x.data_ptr(), out.data_ptr(), x.nbytes):
            raise Abandoned("another rank of the model is gone")
        return out

    def abandon(self) -> None:
        """From any thread: every rank that waits, or comes to wait, raises Abandoned."""
        self._library.slipway_abandon(self.handle)

    def __del__(self) -> None:
        if handle := getattr(self, "handle", None):
            self._library.slipway_leave(handle)
