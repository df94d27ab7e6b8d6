"""Refusals when the memory is too small: bytes needed, bytes available, and the nearest values that fit."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from appliance.config import exits
from appliance.config.settings import Settings
from appliance.hardware.machine import Machine
from appliance.planning.choice import refuse
from appliance.planning.memory import largest, pool_bytes, spell_bytes
from appliance.planning.memory_budget import Room
from appliance.planning.requirements import Asked, cache_room, need_of, needed


@dataclass(frozen=True)
class Way:
    """A key that could be changed to make the configuration fit."""

    key: str
    value: str  # first value that fits, as YAML text
    words: str  # all values that fit, as message text


Ways = Callable[[], Sequence[Way]]
MIB = 2**20
SHARE = "hardware.memory_share"


def check_memory(settings: Settings, machine: Machine, room: Room, asked: Asked, ways: Ways) -> None:
    """Raise Refused if the requested capacity does not fit, exactly when `need_of` reports a shortage."""
    manifest = settings.manifest
    if need_of(manifest, machine, room, asked).lacks == 0:
        return
    if room.view.device == "cuda" and room.host.total > machine.memory_free:
        _refuse_host(settings, machine, room)
    given, left, found = manifest.hardware.kv_cache_memory, room.left(asked.context), ways()
    told, share = _told(found), next((way.value for way in found if way.key == SHARE), "")
    if given != "auto" and given > left:
        total = spell_bytes(room.budget.bytes - left + given)
        message = (
            f"{spell_bytes(given)} make {total} in all, and {room.taken(asked.context)}; "
            f"use at most {spell_bytes(max(0, left))}{told}"
        )
        instead = f"{left // MIB}MiB" if left >= needed(room, asked, asked.context) + MIB else ""
        refuse(settings, "hardware.kv_cache_memory", message, exits.MEMORY, instead)
    least = pool_bytes(room.pages, 2, 1, room.size.tokens)
    if room.left(2) < least:
        message = (
            f"no memory for one block of cache: {room.taken(2)}; "
            f"{spell_bytes(room.budget.bytes - room.left(2) + least)} are needed; raise it, free memory, lower "
            f"engine.scheduling.max_step_tokens, or choose a smaller model{told}"
        )
        refuse(settings, SHARE, message, exits.MEMORY, share)
    if needed(room, asked, asked.context) > cache_room(manifest, room, asked.context):
        _refuse_capacity(settings, room, asked, told)
    message = (
        f"loading takes {spell_bytes(room.loading)} at once, while the largest matrix is made, and "
        f"{spell_bytes(room.budget.bytes)} are usable ({room.budget.limited_by}); raise it, free memory, or choose a "
        f"smaller model{told}"
    )
    refuse(settings, SHARE, message, exits.MEMORY, share)


def _told(ways: Sequence[Way]) -> str:
    """Return the suffix of a message that lists the alternatives, or "" if there are none.

    Example: `; it fits with quantization.weights: int8 (needs 3.1 GiB) or with hardware.memory_share: 0.93`
    """
    return f"; it fits with {' or with '.join(f'{way.key}: {way.words}' for way in ways)}" if ways else ""


def _refuse_capacity(settings: Settings, room: Room, asked: Asked, told: str) -> NoReturn:
    """Raise Refused with the shortage, and with the largest request count and length that fit."""
    manifest, context = settings.manifest, asked.context
    there, wanted = cache_room(manifest, room, context), needed(room, asked, context)
    given = manifest.hardware.kv_cache_memory
    more = "raise hardware.kv_cache_memory"
    if given == "auto":
        more = "raise hardware.memory_share" if room.budget.is_shared else "give the service more memory"
    length = asked.length(context)
    what = f"{asked.requests} requests" if asked.requests > 1 else "a request"
    message = (
        f"{what} of {length} tokens {'need' if asked.requests > 1 else 'needs'} {spell_bytes(wanted)} of cache, "
        f"and {spell_bytes(max(0, there))} are there ({room.taken(context)})"
    )
    shorter, fewer = _nearest(settings, room, asked, there)
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
        key = lower if given == "auto" else "hardware.kv_cache_memory"
    nearest = fewer * room.view.data if asked.requests > 1 else shorter if key == lower else 0
    instead = str(nearest) if nearest else ""
    refuse(settings, key, f"{message}; lower {lower}, or {more}{told}", exits.MEMORY, instead)


def _nearest(settings: Settings, room: Room, asked: Asked, there: int) -> tuple[int, int]:
    """Return the longest length for this number of requests, and the largest number of requests of this length."""
    manifest, context, step = settings.manifest, asked.context, room.size.tokens
    length, shrinks = asked.length(context), asked.each_whole or manifest.model.max_context == "auto"

    def fits(tokens: int) -> bool:
        most = cache_room(manifest, room, tokens if shrinks else context)
        return pool_bytes(room.pages, tokens, asked.requests, step) <= most

    shorter = largest(length, fits)
    fewer = largest(asked.requests, lambda count: pool_bytes(room.pages, length, count, step) <= there)
    return shorter, fewer


def _refuse_host(settings: Settings, machine: Machine, room: Room) -> NoReturn:
    """Raise Refused because the host of a GPU has too little memory for the processes that run on it."""
    message = (
        f"the host needs {spell_bytes(room.host.total)} for the appliance, the engines' processes and loading, and "
        f"{spell_bytes(machine.memory_free)} are free by {machine.memory_from}; give it more memory"
    )
    key = "parallelism.data" if settings.manifest.parallelism.data > 1 else "hardware.device"
    refuse(settings, key, f"{message}{', or fewer engines' if key == 'parallelism.data' else ''}", exits.MEMORY)
