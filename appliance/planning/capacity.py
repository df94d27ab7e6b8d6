"""Division of one rank's memory: usable bytes, weights, workspace and KV cache.

A configuration that cannot hold the requested number and length of requests is refused
(appliance/planning/diagnostics.py).
"""

from typing import Literal

from appliance.config.manifest import Manifest
from appliance.config.settings import Settings
from appliance.hardware.machine import Machine
from appliance.planning.breakdown import balance
from appliance.planning.choice import Choice, refuse
from appliance.planning.derivation import Account, leading, number
from appliance.planning.diagnostics import Ways, check_memory
from appliance.planning.memory import CPU_CACHE_BYTES, Memory, largest, pool_bytes, spell_bytes
from appliance.planning.memory_budget import Room, source_step
from appliance.planning.requirements import Asked, asked_of, cache_room, need_of, needed
from engine.models.checkpoint import Checkpoint


def share_out(
    settings: Settings, checkpoint: Checkpoint, machine: Machine, room: Room, ways: Ways
) -> tuple[Choice[int], Choice[int], Memory]:
    """Return the context length, the KV cache size and the memory breakdown.

    Raise Refused if the memory cannot hold the requested capacity. The message then lists the alternatives from `ways`.
    """
    manifest = settings.manifest
    wanted, supported = manifest.model.max_context, checkpoint.model.max_context
    _check_asked(settings, room, supported)
    _check_sources(settings, checkpoint, room)
    asked = asked_of(manifest, room.view.data)
    check_memory(settings, machine, room, asked, ways)
    most = _most(settings, room, supported)
    longest = largest(most, lambda tokens: needed(room, asked, tokens) <= cache_room(manifest, room, tokens))
    assert longest >= asked.context, f"{need_of(manifest, machine, room, asked)} was found to fit"
    max_context = _context(wanted, supported, longest, asked, most)
    cache = _cache_bytes(manifest, room, asked, max_context.value)
    account = _context_account(manifest, room, asked, max_context.value, most)
    return max_context, cache, balance(room, cache, max_context.value, account)


def _most(settings: Settings, room: Room, supported: int) -> int:
    """Return the largest request length to try, before the memory limit.

    Raise Refused if model.max_context exceeds a step and the model computes each prompt in a single step.
    """
    manifest = settings.manifest
    wanted, step = manifest.model.max_context, room.step.value
    most = supported if wanted == "auto" else wanted
    if room.pages.groups:
        return most
    if wanted != "auto" and wanted > step:
        message = (
            f"{wanted}: the model reads a prompt both ways, in one step, and engine.scheduling.max_step_tokens is "
            f"{step}; use at most {step}, or raise that to {wanted}"
        )
        refuse(settings, "model.max_context", message, instead=str(step))
    return min(most, step)


def _check_asked(settings: Settings, room: Room, supported: int) -> None:
    """Raise Refused if hardware.capacity exceeds the limits that other keys set."""
    manifest = settings.manifest
    capacity, engines, most = manifest.hardware.capacity, manifest.parallelism.data, room.running.value
    each = -(-capacity.requests // engines)
    among = f" in each of {engines} engines" if engines > 1 else ""
    if each > most:
        message = (
            f"{capacity.requests}: engine.scheduling.max_running lets {most} run at once{among}; "
            f"use at most {most * engines}, or raise that to {each}"
        )
        refuse(settings, "hardware.capacity.requests", message, instead=str(most * engines))
    wanted = manifest.model.max_context
    limit = supported if wanted == "auto" else wanted
    if capacity.tokens != "auto" and capacity.tokens > limit:
        whose = "the checkpoint supports" if wanted == "auto" else "model.max_context allows"
        message = f"{capacity.tokens}: {whose} {limit} tokens; use at most {limit}, or auto"
        refuse(settings, "hardware.capacity.tokens", message, instead=str(limit))


def _check_sources(settings: Settings, checkpoint: Checkpoint, room: Room) -> None:
    """Raise Refused if a step cannot hold the longest encoder input."""
    step, running = room.step.value, room.running.value
    needed = source_step(settings.manifest, checkpoint, running)
    if step < needed:
        message = (
            f"{step}: a source is read in one step, the longest has {needed - running} tokens, and each of "
            f"engine.scheduling.max_running, {running}, has one beside; use at least {needed}, or auto, or lower "
            "engine.scheduling.max_running or model.max_context"
        )
        refuse(settings, "engine.scheduling.max_step_tokens", message, instead=str(needed))


def _context(wanted: int | Literal["auto"], supported: int, longest: int, asked: Asked, most: int) -> Choice[int]:
    if wanted != "auto":
        return Choice(wanted)
    if longest == most < supported:
        return Choice(most, f"one step, in which a prompt is read both ways; the checkpoint supports {supported}")
    if longest == supported:
        return Choice(supported, "what the checkpoint supports")
    beside = "what the cache can hold"
    if asked.requests > 1:
        length = "of it" if asked.each_whole else f"of {asked.tokens} tokens"
        beside = f"the longest with which {asked.requests} requests {length} fit at once"
    return Choice(longest, f"{beside}; the checkpoint supports {supported}")


def _context_account(manifest: Manifest, room: Room, asked: Asked, context: int, most: int) -> Account:
    """Return the bytes needed and available for this context length, and for one token more."""
    steps, pages = [], room.pages
    for tokens in sorted({context, min(context + 1, most)}):
        length = asked.length(tokens)
        there, step = cache_room(manifest, room, tokens), room.size.tokens
        several = f"{number(asked.requests)} × {number(pages.blocks_for(length, step))}"
        formula = f"(max({several}, {number(pages.blocks_for(tokens, step))}) + 1) × {number(pages.block_bytes)}"
        steps.append(leading(f"needed with {tokens} tokens", formula, needed(room, asked, tokens)))
        steps.append(leading(f"there with {tokens} tokens", number(there), there))
    what = f"{asked.requests} requests at once" if asked.requests > 1 else "one request"
    meaning = f"the longest context, {context} tokens, whose cache for {what} is not more than what is there"
    last = leading("context", f"min({number(context)}, {number(most)})", context, "tokens")
    return Account("context", meaning, (*steps, last), "tokens", is_sum=False)


def _cache_bytes(manifest: Manifest, room: Room, asked: Asked, context: int) -> Choice[int]:
    if not room.pages.groups:
        return Choice(0, "none: the model reads its prompts both ways and keeps nothing of them")
    available = cache_room(manifest, room, context)
    if manifest.hardware.kv_cache_memory != "auto":
        return Choice(available)
    device, most = room.view.device, pool_bytes(room.pages, context, room.running.value, room.size.tokens)
    if most <= available and (device == "cuda" or most <= CPU_CACHE_BYTES):
        return Choice(most, f"{spell_bytes(most)}, all that max_running requests of max_context need")
    enough = max(CPU_CACHE_BYTES, needed(room, asked, context))
    if device == "cpu" and enough < available:
        why = "the most that auto takes on a CPU" if enough == CPU_CACHE_BYTES else "what was asked to be held at once"
        return Choice(enough, f"{spell_bytes(enough)}, {why}")
    return Choice(available, f"{spell_bytes(available)}, what memory_share leaves after weights and workspace")
