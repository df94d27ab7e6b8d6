"""Comparison of two manifests: changed keys, and their effects by the effects table and by both plans."""

from collections.abc import Iterable
from dataclasses import dataclass

from appliance.config.effects import effect
from appliance.constraints.weights import INTEGERS
from appliance.planning.diff.clients import affected
from appliance.planning.diff.config_snapshot import ConfigSnapshot, Value, unplanned
from appliance.planning.diff.numbers import Number, numbers

RESTARTS = {"none": (), "gateway": ("gateway",), "engine": ("engines",), "service": ("gateway", "engines")}


@dataclass(frozen=True)
class Change:
    """One key that differs."""

    key: str
    before: Value | None
    after: Value | None
    acts: bool  # False if both sides resolve to the same value, for example auto and the value it resolves to


@dataclass(frozen=True)
class Diff:
    """Changed keys and their effects."""

    before: ConfigSnapshot
    after: ConfigSnapshot
    changes: tuple[Change, ...]
    restart: tuple[str, ...]  # programs that must restart for the change to take effect
    causes: tuple[str, ...]  # keys that require the restart
    live: tuple[str, ...]  # keys that a reload changes without a restart
    outputs: tuple[str, ...]  # keys that may change the reply to the same request
    rounding: tuple[str, ...]  # keys that only change the order of floating-point sums
    caches: tuple[str, ...]
    numbers: tuple[Number, ...]  # empty if either plan is missing
    clients: tuple[str, ...]


def compare(before: ConfigSnapshot, after: ConfigSnapshot) -> Diff:
    if before.plan is None or after.plan is None:
        before, after = unplanned(before), unplanned(after)
    changes = tuple(_changes(before, after))
    acting = {change.key: change for change in changes if change.acts}
    effects = {key: effect(key) for key in acting}
    wanted = {program for one in effects.values() for program in RESTARTS[one.restart]}
    return Diff(
        before=before,
        after=after,
        changes=changes,
        restart=tuple(program for program in ("gateway", "engines") if program in wanted),
        causes=tuple(key for key, one in effects.items() if one.restart != "none"),
        live=tuple(key for key, one in effects.items() if one.live),
        outputs=tuple(key for key, one in effects.items() if one.outputs == "yes"),
        rounding=tuple(key for key, one in effects.items() if one.outputs == "rounding" and not _steady(before, after)),
        caches=tuple(_caches(before, after, acting, "engines" in wanted)),
        numbers=tuple(numbers(before.plan, after.plan)) if before.plan and after.plan else (),
        clients=tuple(affected(before, after, {key: (one.before, one.after) for key, one in acting.items()})),
    )


def _changes(before: ConfigSnapshot, after: ConfigSnapshot) -> Iterable[Change]:
    for key in dict.fromkeys([*before.values, *after.values]):
        old, new = before.values.get(key), after.values.get(key)
        acts = old is None or new is None or old.effective != new.effective
        if acts or (old and new and old.written != new.written):
            yield Change(key, old, new, acts)


def _steady(before: ConfigSnapshot, after: ConfigSnapshot) -> bool:
    """Return whether both sides compute results that depend neither on batching nor on the number of threads."""
    return all(
        snapshot.plan is not None and snapshot.plan.engines[0].hardware.batch_invariant for snapshot in (before, after)
    )


def _caches(before: ConfigSnapshot, after: ConfigSnapshot, acting: Iterable[str], engines: bool) -> Iterable[str]:
    effects = [effect(key) for key in acting]
    if engines:
        yield "prefix cache: empty after the restart of an engine"
    if any("weights" in one.caches for one in effects) and _rounds(after):
        cause = (
            "the cached file no longer matches, so they are quantized again"
            if _rounds(before)
            else "they are quantized"
        )
        yield (
            f"quantized weights: {cause} at the next start, which takes longer, and cached{' again' * _rounds(before)}"
        )
    if any(one.graphs for one in effects) and any(_on_gpu(snapshot) for snapshot in (before, after)):
        yield "CUDA graphs: captured again at the next start; kernels may be compiled"


def _rounds(snapshot: ConfigSnapshot) -> bool:
    """Return whether quantized weights are cached; without a plan, whether the manifest enables that."""
    if snapshot.plan is not None:
        return snapshot.plan.engines[0].quantization.folder is not None
    quantization = snapshot.settings.manifest.quantization
    return (quantization.weights in INTEGERS or quantization.head in INTEGERS) and quantization.keep


def _on_gpu(snapshot: ConfigSnapshot) -> bool:
    if snapshot.plan is not None:
        return snapshot.plan.engines[0].hardware.device == "cuda"
    return snapshot.settings.manifest.hardware.device != "cpu"
