"""What must fit into a room: the requests that are asked for (hardware.capacity; without it one), and what lacks."""

from dataclasses import dataclass

from appliance.config.manifest import Manifest
from appliance.hardware.machine import Machine
from appliance.planning.memory import pool_bytes
from appliance.planning.memory_budget import Room


@dataclass(frozen=True)
class Asked:
    """What the cache of one engine must hold at once: `requests` of `tokens` each (`each_whole`: of whatever the
    context becomes), and one request of `context` tokens at least."""

    requests: int
    tokens: int
    each_whole: bool
    context: int

    def length(self, context: int) -> int:
        return context if self.each_whole else self.tokens


def asked_of(manifest: Manifest, engines: int, context: int = 2) -> Asked:
    """engines: that share the requests. context: the least that the service must have, if the manifest says nothing."""
    capacity, wanted = manifest.hardware.capacity, manifest.model.max_context
    whole = capacity.tokens == "auto"
    tokens = 2 if capacity.tokens == "auto" else capacity.tokens
    least = max(context, tokens) if wanted == "auto" else wanted
    return Asked(-(-capacity.requests // engines), tokens, whole, least)


def needed(room: Room, asked: Asked, context: int) -> int:
    """Bytes of a cache with which an engine of this context holds what is asked, and one request of the context."""
    step = room.size.tokens
    several = pool_bytes(room.pages, asked.length(context), asked.requests, step)
    return max(several, pool_bytes(room.pages, context, 1, step))


def cache_room(manifest: Manifest, room: Room, context: int) -> int:
    """Bytes that the cache may have: what kv_cache_memory says, or what is left."""
    given, left = manifest.hardware.kv_cache_memory, room.left(context)
    return left if given == "auto" else min(given, left)


@dataclass(frozen=True)
class Need:
    """Bytes of one rank: all that must be there at once, and what it may use. `lacks` is more than the difference where
    the cache that was given, or the host of a GPU, is what is too small."""

    needed: int
    usable: int
    lacks: int


def need_of(manifest: Manifest, machine: Machine, room: Room, asked: Asked) -> Need:
    """With the shortest context that will do."""
    context, given = asked.context, manifest.hardware.kv_cache_memory
    cache, usable = needed(room, asked, context), room.budget.bytes
    taken = usable - room.left(context)
    total = max(taken + (cache if given == "auto" else max(cache, given)), room.loading)
    lacks = [total - usable]
    if given != "auto":
        lacks.append(cache - given)
    if room.view.device == "cuda":
        lacks.append(room.host.total - machine.memory_free)
    return Need(total, usable, max(0, *lacks))
