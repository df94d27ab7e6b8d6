"""How the memory of one engine is divided: what is usable, what weights and workspace take, and what the cache gets.

Refused is what cannot hold one request of the wanted length, with the size it needs and the key to change.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from appliance import exits
from appliance.declare.settings import Settings
from appliance.manifest import Manifest
from appliance.plan.choice import Choice, refuse
from appliance.plan.machine import Machine
from appliance.plan.memory import (
    CPU_CACHE_BYTES,
    Memory,
    graph_bytes,
    logits_bytes,
    longest_sequence,
    pool_bytes,
    rank_weight_bytes,
    spell_bytes,
    workspace_bytes,
)
from engine.api.config import WeightBits
from engine.kv.layout import Layout
from engine.models.checkpoint import Checkpoint, weight_bytes

Device = Literal["cpu", "cuda"]
MAX_RUNNING = 256
LOGITS_PART = 8  # of the usable memory, the most that logits of running requests may take before auto takes fewer


@dataclass(frozen=True)
class Room:
    """Bytes that one engine has: free, allowed to use, and taken by what is not cache."""

    free: int
    budget: int
    weights: int
    workspace: int
    limited_by: str

    @property
    def left(self) -> int:
        return self.budget - self.weights - self.workspace

    def __str__(self) -> str:
        return (
            f"{spell_bytes(self.budget)} are usable ({self.limited_by}), weights take {spell_bytes(self.weights)} "
            f"and workspace {spell_bytes(self.workspace)}"
        )


def batch_limit(manifest: Manifest, checkpoint: Checkpoint, machine: Machine, device: Device) -> Choice[int]:
    """The most requests in a step: auto takes MAX_RUNNING, or fewer where the logits of so many would take more than a
    part of the memory that the cache needs."""
    wanted = manifest.engine.scheduling.max_running
    if wanted != "auto":
        return Choice(wanted)
    free = machine.gpus[0].free if device == "cuda" else machine.memory_free
    budget = int(free * manifest.hardware.memory_share) // manifest.parallelism.data
    rows = MAX_RUNNING
    while rows > 1 and logits_bytes(checkpoint.model, rows) > budget // LOGITS_PART:
        rows //= 2
    if rows == MAX_RUNNING:
        return Choice(
            rows, f"the most that auto takes; logits take {spell_bytes(logits_bytes(checkpoint.model, rows))}"
        )
    taken, most = spell_bytes(logits_bytes(checkpoint.model, MAX_RUNNING)), spell_bytes(budget // LOGITS_PART)
    return Choice(rows, f"logits of {MAX_RUNNING} would take {taken}, and {most} are an eighth of what is usable")


def measure(
    settings: Settings,
    checkpoint: Checkpoint,
    machine: Machine,
    *,
    device: Device,
    element_bytes: int,
    step_tokens: int,
    rows: int,
    compiled: bool,
    bits: WeightBits,
    graph_sizes: Sequence[int],
    ranks: int = 1,
) -> Room:
    """Of one rank. `compiled`: kernels of a CPU, which keep bf16 weights as they are. `bits`: what weights are rounded
    to. `graph_sizes`: of the steps captured on a GPU, whose memory counts as workspace."""
    manifest = settings.manifest
    engines, share = manifest.parallelism.data, manifest.hardware.memory_share
    free, source = machine.memory_free, machine.memory_from
    among = f" among {engines} engines" if engines > 1 else ""
    if device == "cuda":
        free, source = machine.gpus[0].free, machine.gpus[0].name
    if device == "cuda" and ranks > 1:  # a GPU each
        used = machine.gpus[: engines * ranks]
        free, engines, among = min((gpu.free for gpu in used), default=free), 1, f" on each of {len(used)} GPUs"
    elif ranks > 1:
        engines *= ranks
        among = f" among {engines} ranks"
    return Room(
        free=free // engines,
        budget=int(free * share) // engines,
        weights=rank_weight_bytes(
            checkpoint, weight_bytes(checkpoint, element_bytes, compiled=compiled, bits=bits), ranks
        ),
        workspace=workspace_bytes(
            checkpoint.model,
            device=device,
            step_tokens=step_tokens,
            rows=rows,
            element_bytes=element_bytes,
        )
        + graph_bytes(checkpoint.model, sizes=graph_sizes, element_bytes=element_bytes),
        limited_by=f"memory_share {share:g} of {spell_bytes(free)} free by {source}{among}",
    )


def share_out(
    settings: Settings, checkpoint: Checkpoint, room: Room, pages: Layout, device: Device, rows: int
) -> tuple[Choice[int], Choice[int], Memory]:
    """The context, the KV memory and the whole balance. Refuses what cannot hold one request."""
    manifest = settings.manifest
    wanted, supported = manifest.model.max_context, checkpoint.model.max_context
    if wanted != "auto" and wanted > supported:
        message = f"{wanted}: the checkpoint supports {supported} tokens; use at most {supported}, or auto"
        refuse(settings, "model.max_context", message, instead=str(supported))
    least = 2 if wanted == "auto" else wanted
    available = _available(settings, room, pages, least)
    blocks = pages.blocks(available)
    if pages.blocks_for(least) >= blocks:
        needed = spell_bytes(pool_bytes(pages, least))
        key = "hardware.kv_cache_memory" if manifest.hardware.kv_cache_memory != "auto" else "model.max_context"
        message = (
            f"a request of {least} tokens needs {needed} of cache, and {spell_bytes(available)} are there "
            f"({room}); lower model.max_context, or raise hardware.{_more(manifest)}"
        )
        refuse(settings, key, message, exits.MEMORY)
    max_context = _context(wanted, supported, longest_sequence(pages, blocks, supported))
    cache = _cache_bytes(manifest, available, pages, max_context.value, device, rows)
    blocks = pages.blocks(cache.value)
    memory = Memory(
        free=room.free,
        budget=room.budget,
        weights=room.weights,
        workspace=room.workspace,
        cache=cache.value,
        block_bytes=pages.block_bytes,
        blocks=blocks,
        tokens=longest_sequence(pages, blocks, (blocks + 1) * pages.block_tokens),
        whole_contexts=(blocks - 1) // pages.blocks_for(max_context.value),
    )
    return max_context, cache, memory


def _more(manifest: Manifest) -> str:
    return "memory_share" if manifest.hardware.kv_cache_memory == "auto" else "kv_cache_memory"


def _available(settings: Settings, room: Room, pages: Layout, least: int) -> int:
    """Bytes that the cache may take. Refuses where weights, workspace and the least of cache do not fit."""
    asked = settings.manifest.hardware.kv_cache_memory
    if asked != "auto":
        if asked > room.left:
            total = spell_bytes(room.weights + room.workspace + asked)
            message = (
                f"{spell_bytes(asked)} make {total} in all, and {room}; use at most {spell_bytes(max(0, room.left))}"
            )
            refuse(settings, "hardware.kv_cache_memory", message, exits.MEMORY)
        return asked
    if room.left < 2 * pages.block_bytes:
        needed = spell_bytes(room.weights + room.workspace + pool_bytes(pages, least))
        message = (
            f"no memory for one block of cache: {room}; {needed} are needed; raise it, free memory, "
            "lower engine.scheduling.max_step_tokens, or choose a smaller model.dtype or model"
        )
        refuse(settings, "hardware.memory_share", message, exits.MEMORY)
    return room.left


def _context(wanted: int | Literal["auto"], supported: int, longest: int) -> Choice[int]:
    if wanted != "auto":
        return Choice(wanted)
    if longest < supported:
        return Choice(longest, f"what the cache can hold; the checkpoint supports {supported}")
    return Choice(supported, "what the checkpoint supports")


def _cache_bytes(
    manifest: Manifest, available: int, pages: Layout, max_context: int, device: Device, rows: int
) -> Choice[int]:
    if manifest.hardware.kv_cache_memory != "auto":
        return Choice(available)
    most = pool_bytes(pages, max_context, rows)
    if most <= available and (device == "cuda" or most <= CPU_CACHE_BYTES):
        return Choice(most, f"{spell_bytes(most)}, all that max_running requests of max_context need")
    one = max(CPU_CACHE_BYTES, pool_bytes(pages, max_context))
    if device == "cpu" and one < available:
        return Choice(one, f"{spell_bytes(one)}, the most that auto takes on a CPU")
    return Choice(available, f"{spell_bytes(available)}, what memory_share leaves after weights and workspace")
