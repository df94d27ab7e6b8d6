"""Shared memory in which the ranks of one model on one host exchange data. shm_collective.h describes the protocol."""

import mmap
import os

import torch
from torch import Tensor

from kernels.cpu.library import load


class CollectiveAborted(RuntimeError):
    """Another rank is lost."""


class ShmCollective:
    """One rank's side of the exchange. All ranks make the same calls in the same order, one at a time."""

    def __init__(self, variant: str, file: int, rank: int, size: int, floats: int) -> None:
        """file: descriptor of the same empty file in every rank, for example from memfd_create. floats: maximum size of
        a rank's data in one exchange, the same in every rank. Unused parts take no memory."""
        self.rank, self.size, self.floats = rank, size, floats
        self._library = load(variant)
        length = self._library.slipway_collective_bytes(size, floats)
        os.ftruncate(file, length)
        memory = mmap.mmap(file, length)
        self._memory = torch.frombuffer(memory, dtype=torch.uint8)
        self.handle = self._library.slipway_collective_open(self._memory.data_ptr(), rank, size, floats)
        if not self.handle:
            raise MemoryError("not enough memory for the shared-memory collective of the ranks")

    def gather(self, x: Tensor) -> Tensor:
        """Return x of every rank, [size, ...]. All ranks pass the same shape. Raise CollectiveAborted."""
        x = x.contiguous()
        out = x.new_empty((self.size, *x.shape))
        if self._library.slipway_collective_gather(self.handle, x.data_ptr(), out.data_ptr(), x.nbytes):
            raise CollectiveAborted("another rank of the model has exited")
        return out

    def abort(self) -> None:
        """Make every rank that waits now or later raise CollectiveAborted. May be called from any thread."""
        self._library.slipway_collective_abort(self.handle)

    def __del__(self) -> None:
        if handle := getattr(self, "handle", None):
            self._library.slipway_collective_close(handle)
