"""How the memory of one engine is divided: what is usable, what weights and workspace take, and what the cache gets.

Refused is what cannot hold the wanted requests of the wanted length (hardware.capacity; without it one request), with
the size it needs, the nearest values that fit and the key to change.
"""

from dataclasses import dataclass
from typing import Literal, NoReturn

from appliance import exits
from appliance.declare.settings import Settings
from appliance.manifest import Manifest
from appliance.plan.account import Account, leading, number
from appliance.plan.balance import balance
from appliance.plan.choice import Choice, refuse
from appliance.plan.memory import CPU_CACHE_BYTES, Memory, largest, pool_bytes, spell_bytes
from appliance.plan.room import Device, Room, measure
from engine.kv.layout import Layout
from engine.models.checkpoint import Checkpoint


def share_out(
    settings: Settings, checkpoint: Checkpoint, room: Room, pages: Layout
) -> tuple[Choice[int], Choice[int], Memory]:
    """The context, the KV memory and the whole balance. Refuses what cannot hold the wanted requests."""
    manifest = settings.manifest
    wanted, supported = manifest.model.max_context, checkpoint.model.max_context
    if wanted != "auto" and wanted > supported:
        message = f"{wanted}: the checkpoint supports {supported} tokens; use at most {supported}, or auto"
        refuse(settings, "model.max_context", message)
    asked = _asked(settings, supported)
    _check_least(settings, room, pages)
    context = asked.tokens if wanted == "auto" else wanted
    most = supported if wanted == "auto" else wanted

    def fits(tokens: int) -> bool:
        return _needed(pages, room, asked, tokens) <= _cache_room(manifest, room, pages, tokens)

    longest = largest(most, fits)
    if longest < context:
        _refuse_capacity(settings, room, pages, asked, context)
    max_context = _context(wanted, supported, longest, asked)
    if room.loading > room.budget:
        _refuse_loading(settings, room)
    cache = _cache_bytes(manifest, room, pages, asked, max_context.value)
    account = _context_account(manifest, room, pages, asked, max_context.value, most)
    return max_context, cache, balance(room, pages, cache, max_context.value, account)


@dataclass(frozen=True)
class Asked:
    """What the cache of one engine must hold at once: `requests` of `tokens` each (`each_whole`: of whatever the
    context becomes)."""

    requests: int
    tokens: int
    each_whole: bool

    def length(self, context: int) -> int:
        return context if self.each_whole else self.tokens


def _asked(settings: Settings, supported: int) -> Asked:
    manifest = settings.manifest
    capacity, engines = manifest.hardware.capacity, manifest.parallelism.data
    most = manifest.engine.scheduling.max_running
    each = -(-capacity.requests // engines)
    among = f" in each of {engines} engines" if engines > 1 else ""
    if each > most:
        message = (
            f"{capacity.requests}: engine.scheduling.max_running lets {most} run at once{among}; "
            f"use at most {most * engines}, or raise that to {each}"
        )
        refuse(settings, "hardware.capacity.requests", message)
    wanted = manifest.model.max_context
    if capacity.tokens == "auto":
        return Asked(each, 2, True)
    limit = supported if wanted == "auto" else wanted
    if capacity.tokens > limit:
        whose = "the checkpoint supports" if wanted == "auto" else "model.max_context allows"
        message = f"{capacity.tokens}: {whose} {limit} tokens; use at most {limit}, or auto"
        refuse(settings, "hardware.capacity.tokens", message)
    return Asked(each, capacity.tokens, False)


def _needed(pages: Layout, room: Room, asked: Asked, context: int) -> int:
    """Bytes of a cache with which an engine of this context holds what is asked, and one request of the context."""
    step = room.size.tokens
    several = pool_bytes(pages, asked.length(context), asked.requests, step)
    return max(several, pool_bytes(pages, context, 1, step))


def _cache_room(manifest: Manifest, room: Room, pages: Layout, context: int) -> int:
    """Bytes that the cache may have: what kv_cache_memory says, or what is left."""
    given, left = manifest.hardware.kv_cache_memory, room.left(pages, context)
    return left if given == "auto" else min(given, left)


def _check_least(settings: Settings, room: Room, pages: Layout) -> None:
    """Raises Refused where weights, workspace and one block do not fit, or not beside the cache that was given."""
    given, left = settings.manifest.hardware.kv_cache_memory, room.left(pages, 2)
    if given != "auto" and given > left:
        total = spell_bytes(room.budget - left + given)
        message = (
            f"{spell_bytes(given)} make {total} in all, and {room.taken(pages, 2)}; "
            f"use at most {spell_bytes(max(0, left))}"
        )
        refuse(settings, "hardware.kv_cache_memory", message, exits.MEMORY)
    least = pool_bytes(pages, 2, 1, room.size.tokens)
    if given == "auto" and left < least:
        needed = spell_bytes(room.budget - left + least)
        message = (
            f"no memory for one block of cache: {room.taken(pages, 2)}; {needed} are needed; raise it, free memory, "
            "lower engine.scheduling.max_step_tokens, or choose a smaller model.dtype or model"
        )
        refuse(settings, "hardware.memory_share", message, exits.MEMORY)


def _refuse_capacity(settings: Settings, room: Room, pages: Layout, asked: Asked, context: int) -> NoReturn:
    """What does not fit, and the nearest requests and lengths that do."""
    manifest, step = settings.manifest, room.size.tokens
    there, needed = _cache_room(manifest, room, pages, context), _needed(pages, room, asked, context)
    more = "raise hardware.kv_cache_memory"
    if manifest.hardware.kv_cache_memory == "auto":
        more = "raise hardware.memory_share" if room.is_shared else "give the service more memory"
    length = asked.length(context)
    what = f"{asked.requests} requests" if asked.requests > 1 else "a request"
    message = (
        f"{what} of {length} tokens {'need' if asked.requests > 1 else 'needs'} {spell_bytes(needed)} of cache, "
        f"and {spell_bytes(max(0, there))} are there ({room.taken(pages, context)})"
    )

    shrinks = asked.each_whole or manifest.model.max_context == "auto"

    def fits(tokens: int) -> bool:
        most = _cache_room(manifest, room, pages, tokens if shrinks else context)
        return pool_bytes(pages, tokens, asked.requests, step) <= most

    shorter = largest(length, fits)
    fewer = largest(asked.requests, lambda count: pool_bytes(pages, length, count, step) <= there)
    options = [f"{asked.requests} of {shorter} tokens"] if shorter else []
    options += [f"{fewer} of {length}"] if 0 < fewer < asked.requests else []
    if options:
        message += f"; it holds {' or '.join(options)}"
    if asked.requests > 1:
        key = "hardware.capacity.requests"
        lower = "hardware.capacity.requests or " + (
            "model.max_context" if asked.each_whole else "hardware.capacity.tokens"
        )
    else:
        lower = "model.max_context" if asked.each_whole or context > asked.tokens else "hardware.capacity.tokens"
        key = lower if manifest.hardware.kv_cache_memory == "auto" else "hardware.kv_cache_memory"
    refuse(settings, key, f"{message}; lower {lower}, or {more}", exits.MEMORY)


def _refuse_loading(settings: Settings, room: Room) -> NoReturn:
    message = (
        f"loading takes {spell_bytes(room.loading)} at once, while the largest matrix is made, and "
        f"{spell_bytes(room.budget)} are usable ({room.limited_by}); raise it, free memory, or choose a smaller model"
    )
    refuse(settings, "hardware.memory_share", message, exits.MEMORY)


def _context(wanted: int | Literal["auto"], supported: int, longest: int, asked: Asked) -> Choice[int]:
    if wanted != "auto":
        return Choice(wanted)
    if longest == supported:
        return Choice(supported, "what the checkpoint supports")
    beside = "what the cache can hold"
    if asked.requests > 1:
        length = "of it" if asked.each_whole else f"of {asked.tokens} tokens"
        beside = f"the longest with which {asked.requests} requests {length} fit at once"
    return Choice(longest, f"{beside}; the checkpoint supports {supported}")


def _context_account(manifest: Manifest, room: Room, pages: Layout, asked: Asked, context: int, most: int) -> Account:
    """What is needed and what is there, with this context and with a token more."""
    steps = []
    for tokens in sorted({context, min(context + 1, most)}):
        length = asked.length(tokens)
        there, step = _cache_room(manifest, room, pages, tokens), room.size.tokens
        several = f"{number(asked.requests)} × {number(pages.blocks_for(length, step))}"
        needed = f"(max({several}, {number(pages.blocks_for(tokens, step))}) + 1) × {number(pages.block_bytes)}"
        steps.append(leading(f"needed with {tokens} tokens", needed, _needed(pages, room, asked, tokens)))
        steps.append(leading(f"there with {tokens} tokens", number(there), there))
    what = f"{asked.requests} requests at once" if asked.requests > 1 else "one request"
    meaning = f"the longest context, {context} tokens, whose cache for {what} is not more than what is there"
    last = leading("context", f"min({number(context)}, {number(most)})", context, "tokens")
    return Account("context", meaning, (*steps, last), "tokens", is_sum=False)


def _cache_bytes(manifest: Manifest, room: Room, pages: Layout, asked: Asked, context: int) -> Choice[int]:
    available = _cache_room(manifest, room, pages, context)
    if manifest.hardware.kv_cache_memory != "auto":
        return Choice(available)
    most = pool_bytes(pages, context, manifest.engine.scheduling.max_running, room.size.tokens)
    if most <= available and (room.device == "cuda" or most <= CPU_CACHE_BYTES):
        return Choice(most, f"{spell_bytes(most)}, all that max_running requests of max_context need")
    enough = max(CPU_CACHE_BYTES, _needed(pages, room, asked, context))
    if room.device == "cpu" and enough < available:
        why = "the most that auto takes on a CPU" if enough == CPU_CACHE_BYTES else "what was asked to be held at once"
        return Choice(enough, f"{spell_bytes(enough)}, {why}")
    return Choice(available, f"{spell_bytes(available)}, what memory_share leaves after weights and workspace")


__all__ = ["Device", "Room", "measure", "share_out"]
