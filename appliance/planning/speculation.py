"""Reason and cost of speculative decoding, for the plan."""

from collections.abc import Sequence

from appliance.config.manifest import Manifest
from appliance.constraints.rule import View
from appliance.planning.choice import Choice
from appliance.planning.memory import spell_bytes
from appliance.planning.workspace import StepSize, logits_bytes
from engine.lowering.footprint import Holding
from engine.models.checkpoint import Checkpoint

RATES = (0.5, 0.7, 0.9)  # probabilities that a draft token is accepted, for which the plan states the gain


def speculation(
    manifest: Manifest, checkpoint: Checkpoint, view: View, size: StepSize, holdings: Sequence[Holding] = ()
) -> Choice[str]:
    """Return the method with its reason, and its cost in memory and in steps. holdings: the weights of rank 0."""
    wanted = manifest.speculation
    if wanted.method == "off":
        why = "a draft that is rejected takes time; set it to ngram if replies repeat their prompts"
        return Choice("off", "" if checkpoint.model.pooler is not None else why)
    bytes_ = spell_bytes(logits_bytes(checkpoint.model, size.draft_rows, view.kernels))
    drafts = {
        "ngram": f"up to {wanted.tokens} tokens that followed an earlier occurrence of the last {wanted.ngram_min}",
        "jump-ahead": "text that a grammar forces",
        "draft": f"up to {wanted.tokens} tokens of the draft model",
        "mtp": f"up to {wanted.tokens} tokens of the checkpoint's prediction head",
    }
    if checkpoint.draft is not None:
        return Choice(wanted.method, _of_model(drafts[wanted.method], bytes_, wanted.tokens, holdings))
    return Choice(
        wanted.method,
        f"drafts are {drafts[wanted.method]}; their logits take {bytes_}, and steps of such requests are not planned "
        "ahead",
    )


def _of_model(drafts: str, logits: str, tokens: int, holdings: Sequence[Holding]) -> str:
    own = sum(one.bytes for one in holdings if one.part != "draft")
    draft = sum(one.bytes for one in holdings if one.part == "draft")
    gains = ", ".join(f"{speedup(own, draft, tokens, rate):.1f} at {rate:.0%}" for rate in RATES)
    return (
        f"drafts are {drafts}, whose weights of {spell_bytes(draft)} are read once for each; their logits take "
        f"{logits}. By the bytes of both models, a single reply is this many times as fast at these rates of "
        f"acceptance: {gains}"
    )


def speedup(target: int, draft: int, tokens: int, rate: float) -> float:
    """Return how many times as fast a single reply is, if reading weights takes all of the time.

    A step reads the target once and the draft model `tokens` times. It has 1 + rate + rate² + … tokens on average
    (Leviathan et al., Fast Inference from Transformers via Speculative Decoding, 2023)."""
    length = sum(rate**number for number in range(tokens + 1))
    return length * target / (target + tokens * draft)
