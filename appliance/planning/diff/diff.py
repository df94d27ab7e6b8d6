"""Two manifests compared: changed keys, and what follows from them by the table of effects and by both plans."""

from collections.abc import Iterable
from dataclasses import dataclass

from appliance.config.effects import effect
from appliance.constraints.weights import ON_CPU
from appliance.planning.diff.clients import affected
from appliance.planning.diff.config_snapshot import Side, Value, unplanned
from appliance.planning.diff.numbers import Number, numbers

RESTARTS = {"none": (), "gateway": ("gateway",), "engine": ("engines",), "service": ("gateway", "engines")}


@dataclass(frozen=True)
class Change:
    """One key that differs. `acts` is false where both sides come to the same in the end, such as auto and what it was
    settled to."""

    key: str
    before: Value | None
    after: Value | None
    acts: bool


@dataclass(frozen=True)
class Diff:
    """`restart` names the programs that must start again for the change to act, `causes` the keys that want it,
    `live` those that a reload changes in place.
    `outputs` and `rounding`: keys by which the same request may get another reply, or by which only sums are rounded
    in another order. `numbers` are empty where one of the plans cannot be made."""

    before: Side
    after: Side
    changes: tuple[Change, ...]
    restart: tuple[str, ...]
    causes: tuple[str, ...]
    live: tuple[str, ...]
    outputs: tuple[str, ...]
    rounding: tuple[str, ...]
    caches: tuple[str, ...]
    numbers: tuple[Number, ...]
    clients: tuple[str, ...]


def compare(before: Side, after: Side) -> Diff:
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


def _changes(before: Side, after: Side) -> Iterable[Change]:
    for key in dict.fromkeys([*before.values, *after.values]):
        old, new = before.values.get(key), after.values.get(key)
        acts = old is None or new is None or old.effective != new.effective
        if acts or (old and new and old.written != new.written):
            yield Change(key, old, new, acts)


def _steady(before: Side, after: Side) -> bool:
    """Numbers of a request that depend neither on steps nor on threads, on both sides."""
    return all(side.plan is not None and side.plan.engines[0].invariant for side in (before, after))


def _caches(before: Side, after: Side, acting: Iterable[str], engines: bool) -> Iterable[str]:
    effects = [effect(key) for key in acting]
    if engines:
        yield "prefix cache: starts empty, as at every start of an engine"
    if any("weights" in one.caches for one in effects) and _rounds(after):
        cause = "a kept file no longer fits; they are rounded anew" if _rounds(before) else "they are rounded"
        yield f"rounded weights: {cause} at the next start, which takes longer, and kept{' again' * _rounds(before)}"
    if any(one.graphs for one in effects) and any(_on_gpu(side) for side in (before, after)):
        yield "CUDA graphs: others are captured, and kernels may be compiled, at the next start"


def _rounds(side: Side) -> bool:
    """Whether weights are rounded and kept; where nothing is planned, whether they are asked to be."""
    if side.plan is not None:
        return side.plan.engines[0].weight_cache is not None
    quantization = side.settings.manifest.quantization
    return quantization.weights in ON_CPU and quantization.keep


def _on_gpu(side: Side) -> bool:
    if side.plan is not None:
        return side.plan.engines[0].device == "cuda"
    return side.settings.manifest.hardware.device != "cpu"
