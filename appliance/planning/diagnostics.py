"""Refusals when the memory is too small: bytes needed, bytes available, and the nearest values that fit."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from appliance.config import exits
from appliance.config.settings import Settings
from appliance.hardware.machine import Machine
from appliance.planning.choice import refuse
from appliance.planning.memory import largest, pool_bytes, spell_bytes
from appliance.planning.memory_budget import MemoryBudget
from appliance.planning.requirements import RequestedCapacity, available_cache, need_of, needed


@dataclass(frozen=True)
class Suggestion:
    """A key that could be changed to make the configuration fit."""

    key: str
    value: str  # first value that fits, as YAML text
    text: str  # all values that fit, as message text


Suggestions = Callable[[], Sequence[Suggestion]]
MIB = 2**20
SHARE = "hardware.memory_share"


def check_memory(
    settings: Settings, machine: Machine, budget: MemoryBudget, requested: RequestedCapacity, suggestions: Suggestions
) -> None:
    """Raise Refused if the requested capacity does not fit, exactly when `need_of` reports a shortage."""
    manifest = settings.manifest
    if need_of(manifest, machine, budget, requested).lacks == 0:
        return
    if budget.view.device == "cuda" and budget.host.total > machine.memory_free:
        _refuse_host(settings, machine, budget)
    given, left, found = manifest.hardware.kv_cache_memory, budget.left(requested.context), suggestions()
    suggestion_text = _suggestion_text(found)
    share = next((suggestion.value for suggestion in found if suggestion.key == SHARE), "")
    if given != "auto" and given > left:
        total = spell_bytes(budget.usable.bytes - left + given)
        message = (
            f"{spell_bytes(given)} make {total} in all, and {budget.taken(requested.context)}; "
            f"use at most {spell_bytes(max(0, left))}{suggestion_text}"
        )
        instead = f"{left // MIB}MiB" if left >= needed(budget, requested, requested.context) + MIB else ""
        refuse(settings, "hardware.kv_cache_memory", message, exits.MEMORY, instead)
    least = pool_bytes(budget.pages, 2, 1, budget.size.tokens)
    if budget.left(2) < least:
        message = (
            f"no memory for one block of cache: {budget.taken(2)}; "
            f"{spell_bytes(budget.usable.bytes - budget.left(2) + least)} are needed; raise it, free memory, lower "
            f"engine.scheduling.max_step_tokens, or choose a smaller model{suggestion_text}"
        )
        refuse(settings, SHARE, message, exits.MEMORY, share)
    if needed(budget, requested, requested.context) > available_cache(manifest, budget, requested.context):
        _refuse_capacity(settings, budget, requested, suggestion_text)
    message = (
        f"loading takes {spell_bytes(budget.loading)} at the same time, for the largest matrix, but only "
        f"{spell_bytes(budget.usable.bytes)} are usable ({budget.usable.limited_by}); raise it, free memory, or "
        f"choose a smaller model{suggestion_text}"
    )
    refuse(settings, SHARE, message, exits.MEMORY, share)


def _suggestion_text(suggestions: Sequence[Suggestion]) -> str:
    """Return the suffix of a message that lists the alternatives, or "" if there are none.

    Example: `; it fits with quantization.weights: int8 (needs 3.1 GiB) or with hardware.memory_share: 0.93`
    """
    options = " or with ".join(f"{suggestion.key}: {suggestion.text}" for suggestion in suggestions)
    return f"; it fits with {options}" if suggestions else ""


def _refuse_capacity(
    settings: Settings, budget: MemoryBudget, requested: RequestedCapacity, suggestion_text: str
) -> NoReturn:
    """Raise Refused with the shortage, and with the largest request count and length that fit."""
    manifest, context = settings.manifest, requested.context
    there, wanted = available_cache(manifest, budget, context), needed(budget, requested, context)
    given = manifest.hardware.kv_cache_memory
    more = "raise hardware.kv_cache_memory"
    if given == "auto":
        more = "raise hardware.memory_share" if budget.usable.is_shared else "give the service more memory"
    length = requested.length(context)
    what = f"{requested.requests} requests" if requested.requests > 1 else "a request"
    message = (
        f"{what} of {length} tokens {'need' if requested.requests > 1 else 'needs'} {spell_bytes(wanted)} of cache, "
        f"and {spell_bytes(max(0, there))} are there ({budget.taken(context)})"
    )
    shorter, fewer = _nearest(settings, budget, requested, there)
    options = [f"{requested.requests} of {shorter} tokens"] if shorter else []
    options += [f"{fewer} of {length}"] if 0 < fewer < requested.requests else []
    if options:
        message += f"; it holds {' or '.join(options)}"
    if requested.requests > 1:
        key = "hardware.capacity.requests"
        lower = "hardware.capacity.requests or " + (
            "model.max_context" if requested.each_whole else "hardware.capacity.tokens"
        )
    else:
        lower = (
            "model.max_context" if requested.each_whole or context > requested.tokens else "hardware.capacity.tokens"
        )
        key = lower if given == "auto" else "hardware.kv_cache_memory"
    nearest = fewer * budget.view.data if requested.requests > 1 else shorter if key == lower else 0
    instead = str(nearest) if nearest else ""
    refuse(settings, key, f"{message}; lower {lower}, or {more}{suggestion_text}", exits.MEMORY, instead)


def _nearest(settings: Settings, budget: MemoryBudget, requested: RequestedCapacity, there: int) -> tuple[int, int]:
    """Return the longest length for this number of requests, and the largest number of requests of this length."""
    manifest, context, step = settings.manifest, requested.context, budget.size.tokens
    length, shrinks = requested.length(context), requested.each_whole or manifest.model.max_context == "auto"

    def fits(tokens: int) -> bool:
        most = available_cache(manifest, budget, tokens if shrinks else context)
        return pool_bytes(budget.pages, tokens, requested.requests, step) <= most

    shorter = largest(length, fits)
    fewer = largest(requested.requests, lambda count: pool_bytes(budget.pages, length, count, step) <= there)
    return shorter, fewer


def _refuse_host(settings: Settings, machine: Machine, budget: MemoryBudget) -> NoReturn:
    """Raise Refused because the host of a GPU has too little memory for the processes that run on it."""
    message = (
        f"the host needs {spell_bytes(budget.host.total)} for the appliance, the engines' processes and loading, and "
        f"{spell_bytes(machine.memory_free)} are free by {machine.memory_from}; give it more memory"
    )
    key = "parallelism.data" if settings.manifest.parallelism.data > 1 else "hardware.device"
    refuse(settings, key, f"{message}{', or fewer engines' if key == 'parallelism.data' else ''}", exits.MEMORY)
