"""Which kernels compute, on which types: what the machine, the manifest and the checkpoint allow together.

The rules and what `auto` prefers are declared in `appliance/rules`; here a manifest becomes a situation, and its
solution becomes choices with reasons.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from appliance import exits
from appliance.declare.problems import Refused
from appliance.declare.settings import Settings
from appliance.plan.choice import Choice, refuse
from appliance.plan.machine import Machine
from appliance.plan.memory import ELEMENT_BYTES, spell_bytes
from appliance.plan.ranks import rank_lacks
from appliance.rules.facts import Facts, model_facts
from appliance.rules.rule import TRITON, Variable, View, is_compiled
from appliance.rules.rules import RULES
from appliance.rules.solve import Situation, solve
from appliance.rules.variables import LANES, MOST_RANKS, VARIABLES
from appliance.rules.words import problems, reason
from engine.api.config import graph_ladder
from engine.models.checkpoint import Checkpoint, weight_bytes


@dataclass(frozen=True)
class Resolved:
    """`view` has every value; `choices` the same by key, with reasons."""

    view: View
    choices: Mapping[str, Choice[Any]]


def resolve(settings: Settings, checkpoint: Checkpoint, machine: Machine) -> Resolved:
    """Raises Refused with the least that is in conflict."""
    asked = written(settings)
    lacks = None if "tensor" in asked else rank_lacks(settings, checkpoint, machine)
    situation = Situation(Facts(model_facts(checkpoint), machine, lacks), asked)
    view = solve(situation)
    if view is None:
        _refuse_memory(settings, situation)
        raise Refused(problems(settings, situation))
    return Resolved(view, {one.key: _choice(situation, view, one, checkpoint) for one in VARIABLES})


def _refuse_memory(settings: Settings, situation: Situation) -> None:
    """Refuses with what is missing where all but memory would allow some number of ranks."""
    lacks, rest = situation.facts.lacks, [rule for rule in RULES if rule.name != "memory"]
    sizes = range(1, MOST_RANKS + 1) if lacks is not None else ()
    views = [solve(situation.but(tensor=size), rules=rest) for size in sizes]
    most = max((view for view in views if view is not None), key=lambda view: view.tensor, default=None)
    if lacks is not None and most is not None:
        message = f"{most.tensor} ranks are the most that are possible, and each lacks {lacks(most)} for weights, "
        message += "workspace and the cache of one request; use more or larger GPUs, or fewer bits"
        refuse(settings, "hardware.memory_share", message, exits.MEMORY)


def written(settings: Settings) -> dict[str, Any]:
    """What the manifest says of the variables: all that is not auto."""
    values, found = settings.manifest.model_dump(), {}
    for variable in VARIABLES:
        path = tuple(variable.key.split("."))
        value: Any = values
        for part in path:
            value = value[part]
        if value != "auto":
            found[variable.name] = value
    return found


def _choice(situation: Situation, view: View, variable: Variable, checkpoint: Checkpoint) -> Choice[Any]:
    value = getattr(view, variable.name)
    told = "" if variable.name in situation.written else reason(situation, view, variable)
    match variable.name:
        case "kernels" if is_compiled(view.kernels):
            told = "; ".join(filter(None, (told, _by_torch(situation.facts))))
        case "weights" if told and situation.facts.model.quantized:
            told = _as_quantized(checkpoint, situation.facts, view)
        case "block_tokens" if not told and value % LANES.get(view.kernels, 1):
            told = f"slower: no multiple of the {LANES[view.kernels]} lanes of {view.kernels} kernels"
    return Choice(value, told)


def _by_torch(facts: Facts) -> str:
    """What compiled kernels leave to torch, and what that costs."""
    parts = ", ".join(facts.model.by_torch)
    return f"torch computes {parts}, on one thread and with two more waits for the team each time" if parts else ""


def _as_quantized(checkpoint: Checkpoint, facts: Facts, view: View) -> str:
    """What becomes of a quantized checkpoint's weights, and what it costs."""
    own, size = facts.model.quantized, ELEMENT_BYTES[view.dtype]
    if not is_compiled(view.kernels):
        there, held = weight_bytes(checkpoint, size), weight_bytes(checkpoint, size, compiled=True)
        return (
            f"the checkpoint's {own}, restored to {view.dtype} for {view.kernels}: {spell_bytes(there)} instead of the "
            f"{spell_bytes(held)} that they take with compiled kernels of a CPU"
        )
    count = len(checkpoint.quantization.schemes) if checkpoint.quantization is not None else 0
    restored = facts.model.restored
    rest = f", {restored} of {count} matrices restored to {view.dtype}" if restored else ""
    return f"the checkpoint's {own}{rest}"


def graph_sizes(view: View, max_running: int) -> tuple[int, ...]:
    """Rows of the decode steps to capture."""
    return graph_ladder(max_running) if view.graphs and view.kernels == TRITON else ()
