"""A World of processes with collectives of torch.distributed: gloo between CPUs of one host, nccl between GPUs.

The process group is a value: it is created from its own store and never becomes torch's default group.

A sum over ranks must not depend on the number of rows that are summed together. Both libraries split a message by its
size and sum each part starting at another rank, so with three or more ranks, the same numbers give other sums in a
larger message. On a CPU, and on GPUs with batch invariance, the ranks therefore gather all addends and sum them in rank
order.
"""

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from engine.distributed.symmetric import FusedReduce, SymmetricMemory, TorchSymmetricMemory, open_symmetric
from engine.distributed.world import World

LOOPBACK = "127.0.0.1"  # all ranks are on one host, whose name may not resolve in a container


@dataclass(frozen=True)
class Group:
    """A process group. `ordered`: sums are computed in rank order."""

    rank: int
    size: int
    group: dist.ProcessGroup
    ordered: bool
    fused: FusedReduce | None = None

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
    """Return the sum over [ranks, ...], computed in rank order, in float32 or a wider type."""
    total = shares[0].to(torch.promote_types(shares.dtype, torch.float32), copy=True)
    for share in shares[1:]:
        total += share
    return total


def _symmetric_memory(
    group: dist.ProcessGroup, store: dist.Store, rank: int, size: int, device: torch.device
) -> SymmetricMemory:
    """Torch finds the group by a name, under which it is registered with its store."""
    from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory  # type: ignore[attr-defined]

    name = "slipway-ranks"
    _register_process_group(name, group)
    _SymmetricMemory.set_group_info(name, rank, size, dist.PrefixStore("symmetric", store))
    return TorchSymmetricMemory(name, device)


def _on_all_ranks(fused: FusedReduce | None, group: dist.ProcessGroup, device: torch.device) -> FusedReduce | None:
    """Return the fused sum if every rank has one, else None: all ranks must take part in its barriers."""
    have = torch.tensor([fused is not None], dtype=torch.int32, device=device)
    gathered = have.new_empty(group.size())
    group._allgather_base(gathered, have).wait()
    if bool(gathered.all()):
        return fused
    if fused is not None:
        fused.close()
    return None


def open_group(device: torch.device, store: Path, rank: int, size: int, *, ordered: bool, timeout_s: float) -> World:
    """Join the ranks that use this file, which must be new for each group.

    On a CPU, a collective raises RuntimeError if another rank does not join within `timeout_s` or has exited."""
    limit = timedelta(seconds=timeout_s)
    file_store = dist.FileStore(str(store), size)
    file_store.set_timeout(limit)
    group: dist.ProcessGroup
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        group = dist.ProcessGroupNCCL(file_store, rank, size, options)
        fused = open_symmetric(lambda: _symmetric_memory(group, file_store, rank, size, device))
        return Group(rank, size, group, ordered, _on_all_ranks(fused, group, device))
    else:
        options = dist.ProcessGroupGloo._Options()
        options._timeout = limit
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
        group = dist.ProcessGroupGloo(file_store, rank, size, options)
        ordered = True
    return Group(rank, size, group, ordered)
