"""Text and JSON output of `slipway check` and `slipway plan`. Secrets appear by name only."""

import json
from typing import Any

import msgspec

from appliance.checkpoints.lockfile import lock_path
from appliance.config.fingerprint import graphs_hash
from appliance.config.gateway import encode
from appliance.config.keys import find
from appliance.config.spelling import spell
from appliance.config.stores import is_temporary, storage_line
from appliance.planning.estimate import DISK_BYTES_S, NETWORK_BYTES_S
from appliance.planning.memory import spell_bytes
from appliance.planning.plan import Effective, Plan, resolved_values
from appliance.planning.roofline import Roofline
from appliance.planning.self_test import describe_self_test
from engine.api.config import EngineConfig


def summary(plan: Plan) -> str:
    """Return one line with model, device, context and memory."""
    engine, gateway, memory = plan.engines[0], plan.gateway, plan.memory
    engines = f"{len(plan.engines)} engines" if len(plan.engines) > 1 else "one engine"
    ranks = engine.parallelism.tensor
    if ranks > 1:
        engines += f" of {ranks} ranks" + (" each" if len(plan.engines) > 1 else "")
    return (
        f"{gateway.names[0]} ({plan.architecture}, {_numbers(engine)}, {engine.hardware.device}, {engines}), "
        f"context {engine.model.max_context}, {spell_bytes(memory.total)} {'a rank' if ranks > 1 else 'an engine'}"
        f"{f', planned for {plan.machine.described}' if plan.machine.described else ''}"
    )


def unchecked(plan: Plan) -> str:
    """Return a line for `slipway check` that lists unchecked assumptions, or "" if everything was compared."""
    if not plan.assumed:
        return ""
    return f"not checked, because {plan.engines[0].model.path} has no weights: {'; '.join(plan.assumed)}"


def storage(plan: Plan) -> str:
    """Return a line for `slipway check` if stored data is lost when the service restarts, else ""."""
    stored = storage_line(plan.gateway)
    return f"storage: {stored}" if stored and is_temporary(plan.gateway) else ""


def _numbers(engine: EngineConfig) -> str:
    numbers = (
        engine.model.dtype
        if engine.quantization.weights == "stored"
        else f"{engine.quantization.weights} weights, {engine.model.dtype}"
    )
    return f"{numbers}, products in bfloat16" if engine.hardware.matmul_precision == "bfloat16" else numbers


def as_text(plan: Plan) -> str:
    checkpoint = f"checkpoint: {plan.origin}" + (f", tokenizer {plan.tokenizer}" if plan.tokenizer else "")
    lines = [f"{plan.path}", *(f"  {layer}" for layer in plan.layers), summary(plan), checkpoint, *_assumed(plan), ""]
    lines += _table([_row(effective) for effective in plan.effective], ("key", "value", "from"))
    skipped = plan.gateway.pooled is not None or plan.gateway.speech is not None
    self_test = describe_self_test(plan.engines[0], lock_path(plan.path).name, skipped=skipped)
    stored = storage_line(plan.gateway)
    lines += ["", self_test, *([f"storage: {stored}"] if stored else []), "", *_memory(plan), "", *_outlook(plan)]
    return "\n".join(lines)


def _assumed(plan: Plan) -> list[str]:
    if not plan.assumed:
        return []
    return ["assumed, because there are no weights:", *(f"  {one}" for one in plan.assumed)]


def _row(effective: Effective) -> tuple[str, str, str]:
    key = find(tuple(effective.key.split(".")))
    form = key.form if key else ""
    value, origin = spell(effective.value, form), effective.origin
    if effective.reason:
        resolved = spell_bytes(effective.resolved) if form == "size" else spell(effective.resolved, form)
        value = f"{value} → {resolved}" if effective.value == "auto" else resolved
        origin = f"{origin}: {effective.reason}"
    return effective.key, value, origin


def _table(rows: list[tuple[str, str, str]], head: tuple[str, str, str]) -> list[str]:
    widths = [min(44, max(len(row[column]) for row in (head, *rows))) for column in (0, 1)]
    return [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}".rstrip() for a, b, c in (head, *rows)]


def _memory(plan: Plan) -> list[str]:
    memory, engine = plan.memory, plan.engines[0]
    mapped = f"without {spell_bytes(memory.mapped)} mapped from the file" if memory.mapped else ""
    parts = [
        ("weights", memory.weights, mapped),
        *((f"  {part}", count, "") for part, count in memory.parts.items() if count),
        ("workspace", memory.workspace, "process, largest step, tables, graphs, mapped weights"),
        ("KV cache", memory.cache, _cache(plan)),
        ("together", memory.total, f"of {spell_bytes(memory.budget)} usable, {spell_bytes(memory.free)} free"),
        ("loading", memory.loading, "maximum, before the cache is allocated"),
        ("host", memory.host.total, _host(plan)),
    ]
    each = " of each rank" if engine.parallelism.tensor > 1 else " of each engine" if len(plan.engines) > 1 else ""
    lines = [f"memory{each}"]
    lines += [f"  {name:<12} {spell_bytes(count):>10}  {text}".rstrip() for name, count, text in parts]
    for state in memory.state:
        reach = f"the last {state.reach} tokens" if state.reach else "all tokens"
        lines.append(
            f"  a token needs {state.token_bytes:,} B in {state.layers} layers ({state.kind}, {reach}); "
            f"a request of {engine.model.max_context} at most {spell_bytes(state.request_bytes)}"
        )
    if memory.states:
        slots = engine.scheduling.slots
        own = slots * (2 if engine.speculation.enabled else 1)
        drafts = " (with a copy for the time of a draft)" if own > slots else ""
        lines.append(
            f"  a request needs {memory.state_slot_bytes:,} B of recurrent state{drafts}; there are {own} slots for "
            f"requests and {memory.state_slots - own - 1} for snapshots, {spell_bytes(memory.states)} of the workspace"
        )
    fits = [f"{one.requests} of {one.tokens}" for one in memory.concurrency]
    if not memory.state and memory.states:
        lines.append(f"  concurrent requests: {memory.concurrency[-1].requests}, of any length")
        return lines
    if not memory.state:
        lines.append(f"  concurrent prompts of one step, by length in tokens: {', '.join(fits)}")
        return lines
    lines.append(f"  concurrent requests in the cache, by length in tokens: {', '.join(fits)}")
    return lines


def _cache(plan: Plan) -> str:
    memory = plan.memory
    if not memory.state:
        return "none"
    return f"{memory.blocks} blocks of {plan.engines[0].cache.block_tokens} tokens, {memory.block_bytes:,} B"


def _host(plan: Plan) -> str:
    host = plan.memory.host
    if plan.engines[0].hardware.device == "cpu":
        return "launcher, supervisord, gateway; not the engines"
    return (
        f"appliance {spell_bytes(host.appliance)}, engine processes {spell_bytes(host.engines)}, page-locked "
        f"{spell_bytes(host.pinned)}, loading {spell_bytes(host.loading)}"
    )


def _outlook(plan: Plan) -> list[str]:
    estimate = plan.estimate
    disk, network = f"{DISK_BYTES_S / 1e9:g} GB/s", f"{NETWORK_BYTES_S / 1e6:g} MB/s"
    lines = [
        "expect",
        f"  the weight files, {estimate.file_bytes:,} B, are read in {_span(estimate.load_s)} at {disk} from disk; "
        f"a download takes {_span(estimate.download_s)} at {network}",
    ]
    made = estimate.roofline
    if made is None and plan.manifest.model.media.encoder_only:
        return [*lines, "  no ceilings: there is no decoder, and the time of the towers depends on the items"]
    if made is None:
        name = plan.machine.gpus[0].name
        return [*lines, f"  no ceilings: {name} is not in the device table (appliance/hardware/devices.py)"]
    decode = ", ".join(f"{one.rows} {'row' if one.rows == 1 else 'rows'} {one.tokens_s:,.0f}" for one in made.decode)
    bound = made.prefill.limited_by
    return [
        *lines,
        f"  ceilings in tokens per second ({made.source}); a real service is slower",
        *([f"    decode at {made.length} tokens each: {decode}"] if made.decode else []),
        f"    prefill: {made.prefill.tokens_s:,.0f}, limited by {bound}",
        *([] if made.media_s is None else [f"    towers: {_span(made.media_s)} or more for the media of a step"]),
        *(f"    {line}" for line in _draft_gains(made)),
    ]


def _draft_gains(made: Roofline) -> list[str]:
    """Return the expected gain by drafts at several rates of acceptance."""
    lines = []
    for one in made.drafts:
        gains = ", ".join(f"{100 * rate:.0f} % {gain:.2f}" for rate, gain in one.gains)
        rows = "1 row" if one.rows == 1 else f"{one.rows} rows"
        lines.append(f"drafts, {rows}: a step takes {one.step:.2f} times as long; gain by acceptance: {gains}")
    return lines


def _span(seconds: float) -> str:
    """Format a duration, for example `0.4 s`, `16 s` or `3 min`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def as_json(plan: Plan) -> str:
    """Return the plan as JSON: effective keys, configurations, memory and estimates (docs/memory.md has the fields)."""
    value: dict[str, Any] = {
        "manifest": str(plan.path),
        "layers": plan.layers,
        "sha256": plan.sha256,
        "outputs_sha256": plan.gateway.outputs_sha256,
        "graphs_sha256": graphs_hash(resolved_values(plan.effective)),
        "architecture": plan.architecture,
        "checkpoint": plan.origin,
        "tokenizer": plan.tokenizer,
        "assumed": plan.assumed,
        "effective": [msgspec.to_builtins(effective) for effective in plan.effective],
        "engines": [msgspec.to_builtins(engine) for engine in plan.engines],
        "gateway": msgspec.json.decode(encode(plan.gateway)),
        "memory": {**msgspec.to_builtins(plan.memory), "total": plan.memory.total},
        "storage": storage_line(plan.gateway),
        "outlook": msgspec.to_builtins(plan.estimate),
        "machine": msgspec.to_builtins(plan.machine),
    }
    return json.dumps(value, indent=1, ensure_ascii=False)
