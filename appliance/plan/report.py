"""A plan in words: what `slipway check` and `slipway plan` print. Secrets appear as names only."""

import json
from typing import Any

import msgspec

from appliance.declare.fingerprint import graphs_hash
from appliance.declare.keys import find, spell
from appliance.plan.memory import spell_bytes
from appliance.plan.plan import Effective, Plan, settled
from engine.api.config import EngineConfig


def summary(plan: Plan) -> str:
    """One line: model, device, context, memory."""
    engine, gateway, memory = plan.engines[0], plan.gateway, plan.memory
    engines = f"{len(plan.engines)} engines" if len(plan.engines) > 1 else "one engine"
    if engine.tensor > 1:
        engines += f" of {engine.tensor} ranks" + (" each" if len(plan.engines) > 1 else "")
    return (
        f"{gateway.names[0]} ({plan.architecture}, {_numbers(engine)}, {engine.device}, {engines}), "
        f"context {engine.max_context}, {spell_bytes(memory.total)} {'a rank' if engine.tensor > 1 else 'an engine'}"
    )


def _numbers(engine: EngineConfig) -> str:
    return engine.dtype if engine.weights == "stored" else f"{engine.weights} weights, {engine.dtype}"


def as_text(plan: Plan) -> str:
    lines = [f"{plan.path}", summary(plan), f"checkpoint: {plan.origin}", ""]
    lines += _table([_row(effective) for effective in plan.effective], ("key", "value", "from"))
    lines += ["", *_memory(plan)]
    return "\n".join(lines)


def _row(effective: Effective) -> tuple[str, str, str]:
    key = find(tuple(effective.key.split(".")))
    form = key.form if key else ""
    value, origin = spell(effective.value, form), effective.origin
    if effective.reason:
        resolved = spell(effective.resolved, form)
        value = f"{value} → {resolved}" if effective.value == "auto" else resolved
        origin = f"{origin}: {effective.reason}"
    return effective.key, value, origin


def _table(rows: list[tuple[str, str, str]], head: tuple[str, str, str]) -> list[str]:
    widths = [min(44, max(len(row[column]) for row in (head, *rows))) for column in (0, 1)]
    return [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}".rstrip() for a, b, c in (head, *rows)]


def _memory(plan: Plan) -> list[str]:
    memory, engine = plan.memory, plan.engines[0]
    parts = [
        ("weights", memory.weights, ""),
        ("workspace", memory.workspace, ""),
        ("KV cache", memory.cache, f"{memory.blocks} blocks of {engine.block_tokens} tokens, {memory.block_bytes:,} B"),
        ("together", memory.total, f"of {spell_bytes(memory.budget)} usable, {spell_bytes(memory.free)} free"),
    ]
    each = " of each rank" if engine.tensor > 1 else " of each engine" if len(plan.engines) > 1 else ""
    lines = [f"memory{each}"]
    lines += [f"  {name:<10} {spell_bytes(count):>10}  {text}".rstrip() for name, count, text in parts]
    requests = "request" if memory.whole_contexts == 1 else "requests"
    lines.append(f"  the cache holds {memory.whole_contexts} {requests} of {engine.max_context} tokens at once")
    return lines


def as_json(plan: Plan) -> str:
    """The same for programs: effective keys, configurations, memory."""
    value: dict[str, Any] = {
        "manifest": str(plan.path),
        "sha256": plan.sha256,
        "outputs_sha256": plan.gateway.outputs_sha256,
        "graphs_sha256": graphs_hash(settled(plan.effective)),
        "architecture": plan.architecture,
        "checkpoint": plan.origin,
        "effective": [msgspec.to_builtins(effective) for effective in plan.effective],
        "engines": [msgspec.to_builtins(engine) for engine in plan.engines],
        "gateway": msgspec.to_builtins(plan.gateway),
        "memory": {**msgspec.to_builtins(plan.memory), "total": plan.memory.total},
        "machine": msgspec.to_builtins(plan.machine),
    }
    return json.dumps(value, indent=1, ensure_ascii=False)
