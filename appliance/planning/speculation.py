"""Reason, cost and expected gain of speculative decoding, for the plan."""

from collections.abc import Sequence

from appliance.config.manifest import Manifest
from appliance.constraints.rule import View
from appliance.constraints.speculation import draft_method_why
from appliance.planning.choice import Choice
from appliance.planning.derivation import Account, leading, number
from appliance.planning.memory import spell_bytes
from appliance.planning.roofline import DraftGain, StepSeconds
from appliance.planning.workspace import StepSize, logits_bytes
from engine.lowering.footprint import Holding
from engine.models.checkpoint import Checkpoint

ACCEPTANCE = (0.3, 0.5, 0.7, 0.9)  # probabilities that a draft token is accepted after accepted ones


def speculation(
    manifest: Manifest, checkpoint: Checkpoint, view: View, size: StepSize, holdings: Sequence[Holding] = ()
) -> Choice[str]:
    """Return the method with its reason, and its cost in memory and in steps. holdings: the weights of rank 0."""
    wanted, method = manifest.speculation, view.speculation
    if wanted.method == "off":
        why = "a draft that is rejected takes time; set it to auto if replies repeat their prompts or earlier replies"
        return Choice("off", "" if checkpoint.model.pooler is not None else why)
    if method == "off":
        return Choice("off", draft_method_why(view))
    bytes_ = spell_bytes(logits_bytes(checkpoint.model, size.draft_rows, view.kernels))
    drafts = {
        "ngram": f"up to {wanted.tokens} tokens that followed an earlier occurrence of the last {wanted.ngram_min}",
        "suffix": f"up to {wanted.tokens} tokens that followed most occurrences of the last {wanted.ngram_min} or more",
        "jump-ahead": "text that a grammar forces",
        "draft": f"up to {wanted.tokens} tokens of the draft model",
        "mtp": f"up to {wanted.tokens} tokens of the checkpoint's prediction head",
    }
    if checkpoint.draft is not None:
        return Choice(method, _of_model(drafts[method], bytes_, wanted.tokens, holdings))
    cost = f"drafts are {drafts[method]}; their logits take {bytes_}, and steps of such requests are not planned ahead"
    if wanted.method == "auto":
        cost = f"{draft_method_why(view)}; {cost}; drafts pause while they do not pay"
    return Choice(method, cost)


def draft_gains(
    steps: Sequence[tuple[StepSeconds, StepSeconds]], tokens: int
) -> tuple[tuple[DraftGain, ...], tuple[Account, ...]]:
    """Return the expected gain by the roofline for each number of rows, with its derivation. steps: times of a step
    without drafts, and with drafts of `tokens` tokens for each row."""
    gains, accounts = [], []
    for plain, drafted in steps:
        expected = tuple(
            (rate, sum(rate**n for n in range(tokens + 1)) * plain.seconds / drafted.seconds) for rate in ACCEPTANCE
        )
        gains.append(DraftGain(plain.rows, drafted.seconds / plain.seconds, expected))
        lines = [
            leading("step without drafts", plain.formula, plain.seconds, "s"),
            leading("step with drafts", drafted.formula, drafted.seconds, "s"),
            *(
                leading(
                    f"gain if {100 * rate:.0f} % are accepted",
                    f"{_accepted_length(rate, tokens)} × {number(plain.seconds)} / {number(drafted.seconds)}",
                    gain,
                    "×",
                )
                for rate, gain in expected
            ),
        ]
        what = "row" if plain.rows == 1 else "rows"
        title = f"the ceiling of the gain by drafts of {tokens} tokens for {plain.rows} {what}"
        accounts.append(Account(f"drafts:{plain.rows}", title, tuple(lines), "×", is_sum=False))
    return tuple(gains), tuple(accounts)


def _accepted_length(rate: float, tokens: int) -> str:
    """Return the formula of the mean number of tokens per step: 1 + p + p² + …"""
    formula = "1"
    for _ in range(tokens):
        formula = f"(1 + {number(rate)} × {formula})"
    return formula


def _of_model(drafts: str, logits: str, tokens: int, holdings: Sequence[Holding]) -> str:
    own = sum(one.bytes for one in holdings if one.part != "draft")
    draft = sum(one.bytes for one in holdings if one.part == "draft")
    gains = ", ".join(f"{speedup(own, draft, tokens, rate):.1f} at {rate:.0%}" for rate in ACCEPTANCE)
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
