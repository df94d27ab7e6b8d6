"""Choice of kernels and data types by machine, manifest and checkpoint.

The rules, and the values that `auto` prefers, are declared in `appliance/constraints`. This module converts a manifest
into a `Situation`, and its solution into choices with reasons.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from appliance.config.problems import Refused
from appliance.config.settings import Settings
from appliance.constraints.facts import model_facts
from appliance.constraints.messages import problems, reason
from appliance.constraints.rule import TRITON, Facts, Variable, View, is_compiled
from appliance.constraints.rules import RULES
from appliance.constraints.solve import Situation, solve
from appliance.constraints.variables import LANES, MOST_RANKS, VARIABLES
from appliance.hardware.machine import Machine
from appliance.planning.choice import Choice
from appliance.planning.diagnostics import Suggestions
from appliance.planning.memory import spell_bytes
from appliance.planning.memory_budget import MemoryBudget
from appliance.planning.ranks import RankBudgets, suggestions
from engine.api.config import Dtype
from engine.formats.native import E4M3
from engine.kv.layout import Layout
from engine.lowering.footprint import Holder, weight_bytes
from engine.models.checkpoint import Checkpoint
from kernels.cpu.library import VARIANTS, Tiling


@dataclass(frozen=True)
class Resolved:
    """Solution of the constraints for one manifest."""

    view: View  # the resolved value of each variable
    choices: Mapping[str, Choice[Any]]  # the same values by key, with reasons
    budget: MemoryBudget  # memory budget of these choices
    suggestions: Suggestions  # returns alternatives that fit if the memory is too small


def resolve(settings: Settings, checkpoint: Checkpoint, machine: Machine) -> Resolved:
    """Resolve kernels and data types. Raise Refused with a minimal set of conflicting keys."""
    requested, rank_budgets = written(settings), RankBudgets(settings, checkpoint, machine)
    quantization = settings.manifest.quantization
    facts = Facts(
        model_facts(checkpoint),
        machine,
        None if "tensor" in requested else rank_budgets.lacks,
        group_size=0 if quantization.group_size == "auto" else quantization.group_size,
        head=quantization.head,
        embedding="stored" if quantization.embedding == "auto" else quantization.embedding,
        precision=settings.manifest.hardware.matmul_precision,
    )
    situation = Situation(facts, requested)
    view = solve(situation) or _without_memory(situation)
    if view is None:
        raise Refused(problems(settings, situation))
    choices = {one.key: _choice(situation, view, one, checkpoint) for one in VARIABLES}
    budget = rank_budgets.budget(view)
    choices["quantization.kv_cache"] = _with_bytes(choices["quantization.kv_cache"], view, budget.pages)
    return Resolved(view, choices, budget, lambda: list(suggestions(rank_budgets, situation, view)))


def _with_bytes(choice: Choice[Any], view: View, pages: Layout) -> Choice[Any]:
    """Add to the reason of pages in 16 bits what a token takes."""
    if not choice.reason or view.device != "cpu" or view.kv_cache == "float32" or not pages.groups:
        return choice
    each = "each rank " if view.tensor > 1 else ""
    return Choice(choice.value, f"{choice.reason}; a token takes {each}{pages.token_bytes:,} B")


def _without_memory(situation: Situation) -> View | None:
    """Return the view with the most ranks if memory is the only conflict; the planner then reports the shortage."""
    if situation.facts.lacks is None:
        return None
    rest = [rule for rule in RULES if rule.name != "memory"]
    views = (solve(situation.with_values(tensor=size), rules=rest) for size in range(1, MOST_RANKS + 1))
    return max((view for view in views if view is not None), key=lambda view: view.tensor, default=None)


def written(settings: Settings) -> dict[str, Any]:
    """Return the variables that the manifest sets to a value other than auto."""
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
    explanation = "" if variable.name in situation.written else reason(situation, view, variable)
    match variable.name:
        case "kernels" if is_compiled(view.kernels):
            explanation = "; ".join(filter(None, (explanation, _by_torch(situation.facts))))
        case "weights" if explanation and situation.facts.model.quantized:
            explanation = _as_quantized(checkpoint, situation.facts, view)
        case "block_tokens" if not explanation and value % LANES.get(view.kernels, 1):
            explanation = f"slower: not a multiple of {LANES[view.kernels]}, the vector width of {view.kernels} kernels"
    return Choice(value, explanation)


def _by_torch(facts: Facts) -> str:
    """Describe the operations that compiled kernels delegate to torch, and the cost."""
    parts = ", ".join(facts.model.by_torch)
    return f"torch computes {parts} on one thread, with two additional barriers per operation" if parts else ""


def _as_quantized(checkpoint: Checkpoint, facts: Facts, view: View) -> str:
    """Describe the type and size of the weights of a quantized checkpoint in memory."""
    model = facts.model
    if is_compiled(view.kernels):
        count = len(checkpoint.quantization.formats) if checkpoint.quantization is not None else 0
        multiplied = "bfloat16" if view.multiplies_bf16 else view.activations
        rest = f", {model.restored} of {count} matrices restored to {multiplied}" if model.restored else ""
        return f"the checkpoint's {model.quantized}{rest}"
    if model.held_on_gpu and view.kernels == TRITON:
        return _as_stored(checkpoint, facts, view)
    text = f"the checkpoint's {model.quantized}, restored to {view.dtype} for {view.kernels}: "
    there = spell_bytes(_held(checkpoint, view.dtype, None))
    if model.held and view.device == "cpu":
        held = _held(checkpoint, view.dtype, VARIANTS[0].tiling)
        return f"{text}{there} instead of {spell_bytes(held)} with compiled kernels of a CPU"
    if model.held_on_gpu:
        held = _held(checkpoint, view.dtype, None, triton=True)
        return f"{text}{there} instead of {spell_bytes(held)} with Triton kernels of a GPU"
    return f"{text}{there}; no kernels multiply by this format"


def _as_stored(checkpoint: Checkpoint, facts: Facts, view: View) -> str:
    """Describe the type and size of quantized weights that Triton kernels multiply by."""
    own, there = facts.model.quantized, _held(checkpoint, view.dtype, None)
    held = _held(checkpoint, view.dtype, None, triton=True)
    formats = () if checkpoint.quantization is None else checkpoint.quantization.formats.values()
    gpus, count = facts.machine.gpus, sum(one.is_quantized for one in formats)
    text = f"the checkpoint's {own}: {spell_bytes(held)} instead of {spell_bytes(there)} in {view.dtype}"
    if rest := count - facts.model.held_on_gpu:
        text += f", {rest} of {count} matrices restored to {view.dtype}"
    fp8 = any(isinstance(one.native, E4M3) for one in formats)
    if fp8 and gpus and not gpus[0].has_fp8:
        text += (
            f"; {gpus[0].name} has no fp8 matmul: weights are converted when they are read, activations are not "
            "quantized"
        )
    return text


def _held(checkpoint: Checkpoint, dtype: Dtype, tiling: Tiling | None, *, triton: bool = False) -> int:
    holder = Holder(dtype=dtype, tiling=tiling, triton=triton)
    return weight_bytes(checkpoint.model, checkpoint.tensors, checkpoint.quantization, holder)
