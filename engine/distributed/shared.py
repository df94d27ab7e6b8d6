"""A World of processes on one host with collectives over shared memory, for the compiled CPU kernels.

Within a step, the kernels themselves run collectives (kernels/cpu/shm_collective.h). This World is for operations in
torch.
"""

from dataclasses import dataclass

from torch import Tensor

from engine.distributed.group import in_order
from kernels.cpu.shm_collective import ShmCollective


@dataclass(frozen=True)
class Shared:
    collective: ShmCollective

    @property
    def rank(self) -> int:
        return self.collective.rank

    @property
    def size(self) -> int:
        return self.collective.size

    def all_reduce(self, x: Tensor) -> Tensor:
        return in_order(self.all_gather(x)).to(x.dtype)

    def all_gather(self, x: Tensor) -> Tensor:
        return self.collective.gather(x)


def open_shared(variant: str, memory: int, rank: int, size: int, floats: int) -> Shared:
    """Join the ranks. memory: descriptor of a file that all ranks have (see ShmCollective). floats: buffer size per
    rank."""
    return Shared(ShmCollective(variant, memory, rank, size, floats))
