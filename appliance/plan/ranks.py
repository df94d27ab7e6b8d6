"""How many ranks hold a model: what one of so many lacks."""

from collections.abc import Callable

from appliance.declare.settings import Settings
from appliance.plan.capacity import batch_limit, measure
from appliance.plan.machine import Machine
from appliance.plan.memory import ELEMENT_BYTES, pool_bytes, spell_bytes
from appliance.rules.rule import View, is_compiled
from engine.kv.layout import SCALE_BYTES, layout
from engine.models.checkpoint import Checkpoint

STEP_TOKENS = {"cpu": 512, "cuda": 8192}


def rank_lacks(settings: Settings, checkpoint: Checkpoint, machine: Machine) -> Callable[[View], str]:
    """What each rank of a choice lacks to hold its share of the weights, its workspace and the cache of one request;
    empty where that fits. All of a choice counts, so answers are kept by its values."""
    known: dict[tuple[object, ...], str] = {}

    def lacks(view: View) -> str:
        choice = (view.device, view.dtype, view.weights, view.kernels, view.kv_cache, view.block_tokens)
        key = (*choice, view.max_context, view.tensor)
        if key not in known:
            known[key] = _lacks(settings, checkpoint, machine, view)
        return known[key]

    return lacks


def _lacks(settings: Settings, checkpoint: Checkpoint, machine: Machine, view: View) -> str:
    manifest = settings.manifest
    if view.device == "cuda" and not machine.gpus:
        return "a GPU"
    asked = manifest.engine.scheduling.max_step_tokens
    room = measure(
        settings,
        checkpoint,
        machine,
        device=view.device,
        element_bytes=ELEMENT_BYTES[view.dtype],
        step_tokens=STEP_TOKENS[view.device] if asked == "auto" else asked,
        rows=batch_limit(manifest, checkpoint, machine, view.device).value,
        compiled=is_compiled(view.kernels),
        bits=view.weights,
        graph_sizes=(),
        ranks=view.tensor,
    )
    pages = layout(
        checkpoint.model,
        block_tokens=view.block_tokens,
        element_bytes=ELEMENT_BYTES[view.kv_cache],
        scale_bytes=SCALE_BYTES.get(view.kv_cache, 0),
        ranks=view.tensor,
    )
    needed = room.weights + room.workspace + pool_bytes(pages, view.max_context)
    return "" if needed <= room.budget else spell_bytes(needed - room.budget)
