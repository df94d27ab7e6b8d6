"""Memory requirements: the requests that must fit (hardware.capacity, by default one), and the shortage."""

from dataclasses import dataclass

from appliance.config.manifest import Manifest
from appliance.hardware.machine import Machine
from appliance.planning.memory import pool_bytes
from appliance.planning.memory_budget import MemoryBudget


@dataclass(frozen=True)
class RequestedCapacity:
    """Requests that the cache of one engine must hold at the same time."""

    requests: int  # number of requests
    tokens: int  # tokens of each request
    each_whole: bool  # True: each request fills the context, whatever its length
    context: int  # minimum context length; at least one request of this length must fit

    def length(self, context: int) -> int:
        return context if self.each_whole else self.tokens


def requested_capacity(manifest: Manifest, engines: int, context: int = 2) -> RequestedCapacity:
    """Return the requests of one engine.

    `engines` is the number of engines that share hardware.capacity. `context` is the minimum context length if the
    manifest sets none.
    """
    capacity, wanted = manifest.hardware.capacity, manifest.model.max_context
    whole = capacity.tokens == "auto"
    tokens = 2 if capacity.tokens == "auto" else capacity.tokens
    least = max(context, tokens) if wanted == "auto" else wanted
    return RequestedCapacity(-(-capacity.requests // engines), tokens, whole, least)


def needed(budget: MemoryBudget, requested: RequestedCapacity, context: int) -> int:
    """Return the cache bytes for the requested capacity and for at least one request of the full context."""
    step = budget.size.tokens
    several = pool_bytes(budget.pages, requested.length(context), requested.requests, step)
    return max(several, pool_bytes(budget.pages, context, 1, step))


def available_cache(manifest: Manifest, budget: MemoryBudget, context: int) -> int:
    """Return the bytes available to the cache: kv_cache_memory, or the remaining memory if that is auto or less."""
    given, left = manifest.hardware.kv_cache_memory, budget.left(context)
    return left if given == "auto" else min(given, left)


@dataclass(frozen=True)
class Need:
    """Memory requirement of one rank, in bytes."""

    needed: int  # total at the same time
    usable: int  # budget of the rank
    lacks: int  # shortage; larger than the difference if kv_cache_memory or the memory of a GPU's host is too small


def need_of(manifest: Manifest, machine: Machine, budget: MemoryBudget, requested: RequestedCapacity) -> Need:
    """Return the requirement at the minimum context length."""
    context, given = requested.context, manifest.hardware.kv_cache_memory
    cache, usable = needed(budget, requested, context), budget.usable.bytes
    taken = usable - budget.left(context)
    total = max(taken + (cache if given == "auto" else max(cache, given)), budget.loading)
    lacks = [total - usable]
    if given != "auto":
        lacks.append(cache - given)
    if budget.view.device == "cuda":
        lacks.append(budget.host.total - machine.memory_free)
    return Need(total, usable, max(0, *lacks))
