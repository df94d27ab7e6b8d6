"""Costs of the engine's steps for the metrics of `observability.mfu_metrics`: terms of the roofline, by token and key.

They count what `slipway plan` counts: matrix products and attention of the text model, weights, keys and values.
"""

from collections import Counter

from appliance.config.gateway import HardwareLimits
from appliance.config.settings import Settings
from appliance.planning.choice import refuse
from appliance.planning.memory_budget import MemoryBudget
from appliance.planning.roofline import Limits, expert_bytes, matrix_bytes
from engine.api.config import StepCosts
from engine.lowering.lower import lower
from engine.lowering.measures import attends, attention_costs, multiplied, routes
from engine.lowering.operations import AttendLatent
from engine.models.checkpoint import Checkpoint
from engine.models.parts import is_bidirectional


def step_costs(settings: Settings, checkpoint: Checkpoint, budget: MemoryBudget) -> StepCosts | None:
    """Return the costs, or None if the manifest does not ask for them. Raise Refused for an encoder-decoder model."""
    model = checkpoint.model
    if not settings.manifest.observability.mfu_metrics:
        return None
    if model.encoder is not None:
        refuse(settings, "observability.mfu_metrics", "is not available for encoder-decoder models; set it to false")
    program, ranks = lower(model), budget.view.tensor
    held = [[one for one in holdings if one.part != "draft"] for holdings in budget.ranks]
    selected = {
        op.layer: op.selected.width for op in attends(program.ops) if isinstance(op, AttendLatent) and op.selected
    }
    state: Counter[int] = Counter()
    for group in budget.pages.groups:
        for layer in group.layers:
            limits = [limit for limit in (group.reach, selected.get(layer)) if limit]
            state[min(limits, default=0)] += ranks * budget.pages.layer_bytes(group)
    return StepCosts(
        token=2 * multiplied(program.ops),
        sample=0 if model.head is None else 2 * model.embed.vocab * model.embed.row_width,
        attention=attention_costs(program.ops),
        causal=not is_bidirectional(model),
        dense=sum(matrix_bytes(one, head=model.head is not None) for one in held),
        experts=sum(map(expert_bytes, held)),
        routes=routes(program),
        state=tuple(sorted(state.items())),
    )


def hardware_limits(limit: Limits | None) -> HardwareLimits | None:
    """Return the limits of all ranks of an engine, or None for an unknown device."""
    return None if limit is None else HardwareLimits(limit.ranks * limit.operations, limit.ranks * limit.bandwidth)
