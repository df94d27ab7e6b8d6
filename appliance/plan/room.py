"""What one engine has of a device's memory, and what of it is taken before the cache gets anything."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from appliance import exits
from appliance.declare.settings import Settings
from appliance.manifest import Manifest
from appliance.plan.account import Account, Step, number, summed
from appliance.plan.choice import refuse
from appliance.plan.host import host_memory
from appliance.plan.machine import Machine
from appliance.plan.memory import Host, spell_bytes
from appliance.plan.workspace import StepSize, attention_partials, graphs, pinned_bytes, tables, workspace
from engine.api.config import Dtype, WeightBits
from engine.kv.layout import Layout
from engine.models.checkpoint import Checkpoint
from engine.models.footprint import Holder, Holding, footprint, loading_bytes, part_bytes, temporary_bytes
from kernels.cpu.library import tiling

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Room:
    """What one engine has: bytes free and allowed to use, and what is taken by what is neither cache nor tables, which
    grow with the context. `is_shared`: memory_share limits it, and not what the appliance needs beside."""

    free: int
    budget: int
    limited_by: str
    is_shared: bool
    budget_account: Account
    holdings: tuple[Holding, ...]
    fixed: tuple[Step, ...]
    graphs: tuple[Step, ...]
    size: StepSize
    device: Device
    compiled: bool
    host: Host
    host_account: Account

    @property
    def weights(self) -> int:
        return sum(part_bytes(self.holdings).values())

    @property
    def loading(self) -> int:
        """The most that the engine takes while it is loaded."""
        on_device = loading_bytes(self.holdings) if self.device == "cpu" else self.weights
        return int(self.fixed[0].value) + on_device

    def tables(self, pages: Layout, context: int) -> int:
        return summed(tables(pages, device=self.device, size=self.size, max_context=context))

    def left(self, pages: Layout, context: int) -> int:
        """Bytes for the cache of an engine with this context."""
        return self.budget - self.weights - summed(self.fixed) - summed(self.graphs) - self.tables(pages, context)

    def taken(self, pages: Layout, context: int) -> str:
        rest = summed(self.fixed) + summed(self.graphs) + self.tables(pages, context)
        return (
            f"{spell_bytes(self.budget)} are usable ({self.limited_by}), weights take {spell_bytes(self.weights)} "
            f"and workspace {spell_bytes(rest)}"
        )


def measure(
    settings: Settings,
    checkpoint: Checkpoint,
    machine: Machine,
    *,
    device: Device,
    dtype: Dtype,
    kernels: str,
    bits: WeightBits,
    step_tokens: int,
    graph_sizes: Sequence[int],
    pages: Layout,
    threads: int = 1,
    tensor: int = 1,
) -> Room:
    """kernels: torch, triton or a compiled variant. bits: what weights are rounded to. graph_sizes: of the steps
    captured on a GPU. tensor: ranks that share each engine; counted is the rank that holds most."""
    manifest, model = settings.manifest, checkpoint.model
    engines, share = manifest.parallelism.data, manifest.hardware.memory_share
    size = StepSize(step_tokens, manifest.engine.scheduling.max_running)
    holdings = rank_holdings(checkpoint, device=device, dtype=dtype, kernels=kernels, bits=bits, ranks=tensor)
    holder = Holder(dtype=dtype)
    host, host_account = host_memory(
        device=device,
        engines=engines * tensor,
        vocab=model.embed.vocab,
        pinned=pinned_bytes(size=size, max_context=_table_context(manifest, checkpoint)),
        loading=temporary_bytes(holdings),
    )
    free, source = machine.memory_free, machine.memory_from
    beside = host.appliance
    if device == "cuda":
        free, source, beside = machine.gpus[0].free, machine.gpus[0].name, 0
        _check_host(settings, machine, host)
    usable = max(0, min(math.floor(free * share), free - beside))
    among = f" among {engines} engines" if engines > 1 else ""
    limit = f"memory_share {share:g} of {spell_bytes(free)} free by {source}{among}"
    if free - beside < math.floor(free * share):
        limit = f"{spell_bytes(free)} free by {source}, less {spell_bytes(beside)} for the appliance itself{among}"
    fixed = workspace(
        model, device=device, kernels=kernels, size=size, element_bytes=holder.element_bytes, threads=threads
    )
    compiled, budget = tiling(kernels) is not None, usable // engines
    parts = (attention_partials(model, size, pages.block_tokens * pages.blocks(budget)),) if compiled else ()
    return Room(
        free=free // engines,
        budget=budget,
        limited_by=limit,
        is_shared=free - beside >= math.floor(free * share),
        budget_account=_budget(free, share, beside, engines, budget, source),
        holdings=holdings,
        fixed=(*fixed, *parts),
        graphs=graphs(model, sizes=graph_sizes, element_bytes=holder.element_bytes),
        size=size,
        device=device,
        compiled=compiled,
        host=host,
        host_account=host_account,
    )


def rank_holdings(
    checkpoint: Checkpoint, *, device: Device, dtype: Dtype, kernels: str, bits: WeightBits, ranks: int = 1
) -> tuple[Holding, ...]:
    """Of the rank that holds most: shares of the vocabulary differ by a row."""
    every = []
    for rank in sorted({0, ranks - 1}):
        holder = Holder(
            dtype=dtype,
            device=device,
            tiling=tiling(kernels),
            matrix_tiles=kernels == "amx",
            bits=bits,
            rank=rank,
            ranks=ranks,
        )
        every.append(footprint(checkpoint.model, checkpoint.tensors, checkpoint.quantization, holder))
    return max(every, key=lambda held: sum(part_bytes(held).values()))


def _table_context(manifest: Manifest, checkpoint: Checkpoint) -> int:
    wanted = manifest.model.max_context
    return checkpoint.model.max_context if wanted == "auto" else wanted


def _check_host(settings: Settings, machine: Machine, host: Host) -> None:
    """Raises Refused where the host of a GPU is too small for what runs on it."""
    if host.total > machine.memory_free:
        message = (
            f"the host needs {spell_bytes(host.total)} for the appliance, the engines' processes and loading, and "
            f"{spell_bytes(machine.memory_free)} are free by {machine.memory_from}; give it more memory"
        )
        key = "parallelism.data" if settings.manifest.parallelism.data > 1 else "hardware.device"
        refuse(settings, key, f"{message}{', or fewer engines' if key == 'parallelism.data' else ''}", exits.MEMORY)


def _budget(free: int, share: float, beside: int, engines: int, budget: int, source: str) -> Account:
    formula = f"⌊min({number(share)} × {number(free)}, {number(free)} − {number(beside)}) / {number(engines)}⌋"
    return Account(
        "budget",
        f"what one engine may use: hardware.memory_share of what is free by {source}, and the appliance beside it",
        (Step("budget", formula, budget),),
    )
