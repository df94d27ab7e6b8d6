"""Messages of `slipway reload`: changes in effect, and pending changes with the cost of their restart."""

import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

from appliance.config.effects import effect
from appliance.config.problems import Refused
from appliance.planning.diff.diff import Change
from appliance.planning.diff.pending_changes import Step
from appliance.planning.diff.text import table
from appliance.runtime.gateway_control import Answer

# Cost of each kind of restart (appliance/config/effects.py).
_COSTS = {
    "engine": "engines restart: `slipway reload --restart` replaces them; requests are queued{measured} and resume",
    "gateway": "the gateway restarts: stop `slipway serve` (open requests have {drain}) and start it again",
    "service": "everything restarts: stop `slipway serve` (open requests have {drain}) and start it again",
}


def refused(error: Refused, manifest: Path) -> str:
    problems = "\n".join(map(str, error.problems))
    return f"{manifest} is not valid, so nothing was changed:\n{textwrap.indent(problems, '  ')}"


def unswappable(found: Step) -> str:
    """Return why restarting only the engines is not enough."""
    more = [change for change in found.waiting if effect(change.key).restart in ("gateway", "service")]
    lines = ["nothing was changed: this manifest needs more than a restart of the engines", *_rows(more)]
    return "\n".join([*lines, _costs(found, effect(more[0].key).restart, "")])


def describe(found: Step, manifest: Path, answer: Answer, *, restart: bool) -> Iterator[str]:
    """Yield the report lines after the gateway has applied the change."""
    acting = (*found.at_once, *found.silent)
    keys = f"; {answer.keys} API key{'s' * (answer.keys != 1)}" if answer.keys else ""
    waiting = " is in effect" if not found.waiting and not restart else ""
    changed = f"{_count(acting)} changed without a restart" if acting else "no change without a restart"
    yield f"{manifest}{waiting}: {changed}{keys}"
    yield from _rows(acting)
    if restart:
        yield "engines are restarted" + (f" for {_count(found.swapped)}:" if found.swapped else ":")
        yield from _rows(found.swapped)
        return
    measured = f" about {max(answer.start_s):.0f} s" if any(answer.start_s) else ""
    for cost in ("engine", "gateway", "service"):
        rows = [change for change in found.waiting if effect(change.key).restart == cost]
        if rows:
            yield f"not in effect: {_costs(found, cost, measured)}"
            yield from _rows(rows)


def _costs(found: Step, cost: str, measured: str) -> str:
    return _COSTS[cost].format(drain=f"{found.gateway.drain_s:g} s", measured=measured)


def _count(changes: Iterable[Change]) -> str:
    count = len(tuple(changes))
    return f"{count} key{'s' * (count != 1)}"


def _rows(changes: Iterable[Change]) -> list[str]:
    rows = tuple(changes)
    return [f"  {line}" for line in table(rows)] if rows else []
