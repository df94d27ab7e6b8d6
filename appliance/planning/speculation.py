"""Reason and cost of speculative decoding, for the plan."""

from appliance.config.manifest import Manifest
from appliance.constraints.rule import View
from appliance.planning.choice import Choice
from appliance.planning.memory import spell_bytes
from appliance.planning.workspace import StepSize, logits_bytes
from engine.models.checkpoint import Checkpoint


def speculation(manifest: Manifest, checkpoint: Checkpoint, view: View, size: StepSize) -> Choice[str]:
    """Return the method with its reason, and its cost in memory and in steps."""
    wanted = manifest.speculation
    if wanted.method == "off":
        why = "a draft that is rejected takes time; set it to ngram if replies repeat their prompts"
        return Choice("off", "" if checkpoint.model.pooler is not None else why)
    bytes_ = spell_bytes(logits_bytes(checkpoint.model, size.draft_rows, view.kernels))
    drafts = {
        "ngram": f"up to {wanted.tokens} tokens that followed an earlier occurrence of the last {wanted.ngram_min}",
        "jump-ahead": "text that a grammar forces",
    }
    return Choice(
        wanted.method,
        f"drafts are {drafts[wanted.method]}; their logits take {bytes_}, and steps of such requests are not planned "
        "ahead",
    )
