"""Memory of all ranks that each rank can read, for the all-reduce that is fused with residual and norm.

The memory is torch's symmetric memory, over NVLink. Where torch or the devices lack it, `open_symmetric` returns None,
and sums of ranks are computed by the group and normalised afterwards.
"""

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels.reduce_norm import REDUCE_NORM

MAX_BYTES = 4 << 20  # of a rank's rows; larger sums take as long as the group's, which reads less


class SymmetricMemory(Protocol):
    """Memory that all ranks map."""

    @property
    def own(self) -> Tensor:
        """[bytes] uint8, the memory of this rank."""
        ...

    @property
    def addresses(self) -> Tensor:
        """[ranks] int64, the memory of each rank in the address space of this one."""
        ...

    def barrier(self) -> None:
        """Wait on the device until all ranks are here."""
        ...

    def close(self) -> None: ...


class FusedReduce:
    """Sum over the ranks, residual add and norm in one launch between two barriers."""

    def __init__(self, memory: SymmetricMemory) -> None:
        self._memory = memory
        self._closed = False

    def takes(self, x: Tensor) -> bool:
        return not self._closed and 0 < x.nbytes <= self._memory.own.numel()

    def reduce_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """x: [rows, size], this rank's addend → y and the residual, changed in place."""
        rows = self._memory.own[: x.nbytes].view(x.dtype).view(x.shape)
        rows.copy_(x)
        self._memory.barrier()
        result: tuple[Tensor, Tensor] = REDUCE_NORM(rows, self._memory.addresses, weight, eps, residual, scale)
        # The next sum writes to the same memory, also in another graph.
        self._memory.barrier()
        return result

    def close(self) -> None:
        """Release the memory once. Errors are ignored: the process exits or opens another one."""
        if not self._closed:
            self._closed = True
            with contextlib.suppress(Exception):
                self._memory.close()


class TorchSymmetricMemory:
    """torch.distributed._symmetric_memory over a process group that is registered under a name."""

    def __init__(self, group_name: str, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric

        self.own = symmetric.empty(MAX_BYTES, dtype=torch.uint8, device=device)
        self._handle: Any = symmetric.rendezvous(self.own, group_name)
        self.addresses = torch.tensor(self._handle.buffer_ptrs, dtype=torch.int64, device=device)

    def barrier(self) -> None:
        self._handle.barrier(channel=0)

    def close(self) -> None:
        self._handle = None


def open_symmetric(make: Callable[[], SymmetricMemory]) -> FusedReduce | None:
    """Return the fused sum, or None if its memory is not available."""
    try:
        return FusedReduce(make())
    except (ImportError, AttributeError, RuntimeError, TypeError):
        return None
