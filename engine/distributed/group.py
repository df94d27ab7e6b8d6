"""A World of processes: collectives of torch.distributed, gloo between CPUs of one host, nccl between GPUs.

The process group is a value here too: it is made from a store of its own and never becomes torch's default group.

What a sum over ranks comes out as must not depend on how many rows are summed beside it. Both libraries cut a message
into pieces by its size, and each piece is added up beginning at another rank: of three ranks and more, the same numbers
come out otherwise in a larger message. So on a CPU, and on GPUs where invariance is asked for, the ranks gather all
shares and add them in order of the ranks.
"""

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from engine.distributed.world import World

LOOPBACK = "127.0.0.1"  # all ranks are on one host, whose name may not resolve in a container


@dataclass(frozen=True)
class Group:
    """`ordered`: sums are added in order of the ranks."""

    rank: int
    size: int
    group: dist.ProcessGroup
    ordered: bool

    def all_reduce(self, x: Tensor) -> Tensor:
        if self.ordered:
            return in_order(self.all_gather(x)).to(x.dtype)
        x = x.contiguous()
        self.group.allreduce([x]).wait()
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        gathered = x.new_empty((self.size, *x.shape))
        self.group._allgather_base(gathered.view(-1), x.contiguous().view(-1)).wait()
        return gathered


def in_order(shares: Tensor) -> Tensor:
    """[ranks, ...] → their sum, added from rank 0 on, in float32 at least."""
    total = shares[0].to(torch.promote_types(shares.dtype, torch.float32), copy=True)
    for share in shares[1:]:
        total += share
    return total


def open_group(device: torch.device, store: Path, rank: int, size: int, *, ordered: bool, timeout_s: float) -> World:
    """Joins the ranks that meet in this file, which is new for each group. A collective that another rank does not
    join within `timeout_s` raises RuntimeError, on a CPU; so does one whose peer has ended."""
    limit = timedelta(seconds=timeout_s)
    meeting = dist.FileStore(str(store), size)
    meeting.set_timeout(limit)
    group: dist.ProcessGroup
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        group = dist.ProcessGroupNCCL(meeting, rank, size, options)
    else:
        options = dist.ProcessGroupGloo._Options()
        options._timeout = limit
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
        group = dist.ProcessGroupGloo(meeting, rank, size, options)
        ordered = True
    return Group(rank, size, group, ordered)
