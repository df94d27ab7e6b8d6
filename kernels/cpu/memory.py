"""Memory for weights that every step reads from one end to the other: in large pages, where the system has them.

A page of 4 KiB costs a walk through the page tables every 4 KiB; in pages of 2 MiB the same reads reach 10 to 25 % more
of the memory's bandwidth (docs/performance.md). Transparent huge pages are asked for; where there are none it is
ordinary memory.
"""

import mmap
from contextlib import suppress

import torch
from torch import Tensor

HUGE = 2 << 20  # bytes of a large page
REGION = 64 << 20  # bytes that are asked for at once; what is never written takes no memory
LINE = 64  # bytes to which every tensor is aligned


class Arena:
    """Tensors one after another, which live as long as any of them is held."""

    def __init__(self) -> None:
        self._room = torch.empty(0, dtype=torch.uint8)

    def copy(self, tensor: Tensor) -> Tensor:
        """The same numbers, shape and type, contiguous."""
        size = -(-tensor.nbytes // LINE) * LINE
        if size > len(self._room):
            self._room = region(max(size, REGION))
        place, self._room = self._room[: tensor.nbytes], self._room[size:]
        return place.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def region(size: int) -> Tensor:
    """[at least size] uint8, zeros, from the start of a large page on."""
    memory = mmap.mmap(-1, -(-size // HUGE) * HUGE + HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return whole[-whole.data_ptr() % HUGE :][: -(-size // HUGE) * HUGE]
