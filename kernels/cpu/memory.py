"""Memory for weights that every step reads sequentially: in large pages, if the system supports them.

Pages of 4 KiB cost a page table walk every 4 KiB; with pages of 2 MiB the same reads reach 10 to 25 % more of the
memory bandwidth (docs/performance.md). The allocation requests transparent huge pages and falls back to ordinary
memory.
"""

import math
import mmap
from contextlib import suppress

import torch
from torch import Tensor

HUGE = 2 << 20  # bytes of a large page
REGION = 64 << 20  # bytes of one allocation; pages that are never written take no memory
LINE = 64  # alignment of every tensor in bytes


class Arena:
    """Allocator that places tensors one after another. Their memory is freed when all tensors of a region are."""

    def __init__(self) -> None:
        self._room = torch.empty(0, dtype=torch.uint8)

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a contiguous copy of the tensor in the arena."""
        return self.empty(tuple(tensor.shape), tensor.dtype).copy_(tensor)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor in the arena, to be filled."""
        wanted = math.prod(shape) * dtype.itemsize
        size = -(-wanted // LINE) * LINE
        if size > len(self._room):
            self._room = region(max(size, REGION))
        place, self._room = self._room[:wanted], self._room[size:]
        return place.view(dtype).view(shape)


def region(size: int) -> Tensor:
    """Allocate at least `size` zero bytes as a uint8 tensor that starts at a large page."""
    memory = mmap.mmap(-1, -(-size // HUGE) * HUGE + HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return whole[-whole.data_ptr() % HUGE :][: -(-size // HUGE) * HUGE]
