"""Division of one rank's memory: usable bytes, weights, workspace and KV cache.

A configuration that cannot hold the requested number and length of requests is refused
(appliance/planning/diagnostics.py).
"""

from typing import Literal

from appliance.config.manifest import Manifest
from appliance.config.settings import Settings
from appliance.hardware.machine import Machine
from appliance.planning.breakdown import breakdown
from appliance.planning.choice import Choice, refuse
from appliance.planning.derivation import Account, leading, number
from appliance.planning.diagnostics import Suggestions, check_memory
from appliance.planning.memory import CPU_CACHE_BYTES, Memory, largest, pool_bytes, spell_bytes
from appliance.planning.memory_budget import MemoryBudget, source_step
from appliance.planning.requirements import RequestedCapacity, available_cache, need_of, needed, requested_capacity
from engine.models.checkpoint import Checkpoint
from engine.models.parts import is_bidirectional


def size_cache(
    settings: Settings, checkpoint: Checkpoint, machine: Machine, budget: MemoryBudget, suggestions: Suggestions
) -> tuple[Choice[int], Choice[int], Memory]:
    """Return the context length, the KV cache size and the memory breakdown.

    Raise Refused if the memory cannot hold the requested capacity. The message then lists the alternatives from `ways`.
    """
    manifest = settings.manifest
    wanted, supported = manifest.model.max_context, checkpoint.max_context
    whose = "draft model" if checkpoint.limited_by_draft else "checkpoint"
    _check_asked(settings, budget, supported, whose)
    _check_sources(settings, checkpoint, budget)
    requested = requested_capacity(manifest, budget.view.data)
    check_memory(settings, machine, budget, requested, suggestions)
    most = _most(settings, budget, supported)
    longest = largest(
        most, lambda tokens: needed(budget, requested, tokens) <= available_cache(manifest, budget, tokens)
    )
    assert longest >= requested.context, f"{need_of(manifest, machine, budget, requested)} was found to fit"
    max_context = _context(wanted, supported, longest, requested, most, whose)
    cache = _cache_bytes(manifest, budget, requested, max_context.value)
    account = _context_account(manifest, budget, requested, max_context.value, most)
    return max_context, cache, breakdown(budget, cache, max_context.value, account)


def _most(settings: Settings, budget: MemoryBudget, supported: int) -> int:
    """Return the largest request length to try, before the memory limit.

    Raise Refused if model.max_context exceeds a step and the model computes each prompt in a single step.
    """
    manifest = settings.manifest
    wanted, step = manifest.model.max_context, budget.step.value
    most = supported if wanted == "auto" else wanted
    if not is_bidirectional(budget.model) or budget.model.encoder_only:
        return most
    if wanted != "auto" and wanted > step:
        message = (
            f"{wanted}: the model has bidirectional attention and reads a prompt in one step, but "
            f"engine.scheduling.max_step_tokens is {step}; use at most {step}, or raise max_step_tokens to {wanted}"
        )
        refuse(settings, "model.max_context", message, instead=str(step))
    return min(most, step)


def _check_asked(settings: Settings, budget: MemoryBudget, supported: int, supporter: str) -> None:
    """Raise Refused if hardware.capacity exceeds the limits that other keys set. supporter: of this many tokens."""
    manifest = settings.manifest
    capacity, engines, most = manifest.hardware.capacity, manifest.parallelism.data, budget.running.value
    each = -(-capacity.requests // engines)
    among = f" in each of {engines} engines" if engines > 1 else ""
    if each > most:
        message = (
            f"{capacity.requests}: engine.scheduling.max_running lets {most} run at once{among}; "
            f"use at most {most * engines}, or raise max_running to {each}"
        )
        refuse(settings, "hardware.capacity.requests", message, instead=str(most * engines))
    wanted = manifest.model.max_context
    limit = supported if wanted == "auto" else wanted
    if capacity.tokens != "auto" and capacity.tokens > limit:
        whose = f"the {supporter} supports" if wanted == "auto" else "model.max_context allows"
        message = f"{capacity.tokens}: {whose} {limit} tokens; use at most {limit}, or auto"
        refuse(settings, "hardware.capacity.tokens", message, instead=str(limit))


def _check_sources(settings: Settings, checkpoint: Checkpoint, budget: MemoryBudget) -> None:
    """Raise Refused if a step cannot hold the longest encoder input."""
    step, running = budget.step.value, budget.running.value
    needed = source_step(settings.manifest, checkpoint, running)
    if step < needed:
        message = (
            f"{step}: an encoder input is read in one step; the longest has {needed - running} tokens, and each of "
            f"engine.scheduling.max_running, {running}, adds one token. Use at least {needed}, or auto, or lower "
            "engine.scheduling.max_running or model.max_context"
        )
        refuse(settings, "engine.scheduling.max_step_tokens", message, instead=str(needed))


def _context(
    wanted: int | Literal["auto"],
    supported: int,
    longest: int,
    requested: RequestedCapacity,
    most: int,
    supporter: str,
) -> Choice[int]:
    if wanted != "auto":
        return Choice(wanted)
    if longest == most < supported:
        return Choice(
            most, f"one step, because the model has bidirectional attention; the checkpoint supports {supported}"
        )
    if longest == supported:
        return Choice(supported, f"maximum of the {supporter}")
    beside = "capacity of the cache"
    if requested.requests > 1:
        length = "of it" if requested.each_whole else f"of {requested.tokens} tokens"
        beside = f"longest context with which {requested.requests} requests {length} fit at the same time"
    return Choice(longest, f"{beside}; the {supporter} supports {supported}")


def _context_account(
    manifest: Manifest, budget: MemoryBudget, requested: RequestedCapacity, context: int, most: int
) -> Account:
    """Return the bytes needed and available for this context length, and for one token more."""
    steps, pages = [], budget.pages
    for tokens in sorted({context, min(context + 1, most)}):
        length = requested.length(tokens)
        there, step = available_cache(manifest, budget, tokens), budget.size.tokens
        several = f"{number(requested.requests)} × {number(pages.blocks_for(length, step))}"
        formula = f"(max({several}, {number(pages.blocks_for(tokens, step))}) + 1) × {number(pages.block_bytes)}"
        steps.append(leading(f"needed with {tokens} tokens", formula, needed(budget, requested, tokens)))
        steps.append(leading(f"available with {tokens} tokens", number(there), there))
    what = f"{requested.requests} requests at once" if requested.requests > 1 else "one request"
    meaning = f"longest context, {context} tokens, for which the cache of {what} fits into memory"
    last = leading("context", f"min({number(context)}, {number(most)})", context, "tokens")
    return Account("context", meaning, (*steps, last), "tokens", is_sum=False)


def _cache_bytes(manifest: Manifest, budget: MemoryBudget, requested: RequestedCapacity, context: int) -> Choice[int]:
    if not budget.pages.groups:
        if budget.states.layers:
            return Choice(0, "none: the model has no attention; its recurrent state is part of the workspace")
        return Choice(0, "none: a model with bidirectional attention keeps no KV cache")
    available = available_cache(manifest, budget, context)
    if manifest.hardware.kv_cache_memory != "auto":
        return Choice(available)
    device, most = budget.view.device, pool_bytes(budget.pages, context, budget.running.value, budget.size.tokens)
    if most <= available and (device == "cuda" or most <= CPU_CACHE_BYTES):
        return Choice(most, f"{spell_bytes(most)}, enough for max_running requests of max_context")
    enough = max(CPU_CACHE_BYTES, needed(budget, requested, context))
    if device == "cpu" and enough < available:
        why = "the maximum of auto on a CPU" if enough == CPU_CACHE_BYTES else "hardware.capacity"
        return Choice(enough, f"{spell_bytes(enough)}, {why}")
    return Choice(available, f"{spell_bytes(available)}, the rest of memory_share after weights and workspace")
