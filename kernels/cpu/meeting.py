"""Shared memory in which the ranks of one model on one host exchange data. meeting.h describes the protocol."""

import mmap
import os

import torch
from torch import Tensor

from kernels.cpu.library import load


class Abandoned(RuntimeError):
    """Another rank is lost."""


class Meeting:
    """One rank's side of the exchange. All ranks make the same calls in the same order, one at a time."""

    def __init__(self, variant: str, file: int, rank: int, size: int, floats: int) -> None:
        """file: descriptor of the same empty file in every rank, for example from memfd_create. floats: maximum size of
        a rank's data in one exchange, the same in every rank. Unused parts take no memory."""
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
        """Return x of every rank, [size, ...]. All ranks pass the same shape. Raise Abandoned."""
        x = x.contiguous()
        out = x.new_empty((self.size, *x.shape))
        if self._library.slipway_gather(self.handle, x.data_ptr(), out.data_ptr(), x.nbytes):
            raise Abandoned("another rank of the model is gone")
        return out

    def abandon(self) -> None:
        """Make every rank that waits now or later raise Abandoned. May be called from any thread."""
        self._library.slipway_abandon(self.handle)

    def __del__(self) -> None:
        if handle := getattr(self, "handle", None):
            self._library.slipway_leave(handle)
