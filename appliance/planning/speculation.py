"""Reason, cost and expected gain of speculative decoding, for the plan."""

from collections.abc import Sequence
from dataclasses import dataclass

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
        "eagle": f"up to {wanted.tokens} tokens of the EAGLE head",
        "eagle3": f"up to {wanted.tokens} tokens of the EAGLE-3 head",
        "mtp": f"up to {wanted.tokens} tokens of the checkpoint's {_heads(len(checkpoint.drafts))}",
    }
    source = drafts[method]
    if checkpoint.draft is not None:
        weights = spell_bytes(sum(one.bytes for one in holdings if one.part == "draft"))
        one_head = len(checkpoint.drafts) == 1
        source = f"{source}, whose weights {f'of {weights} are read once for each' if one_head else f'take {weights}'}"
    cost = f"drafts are {source}; their logits take {bytes_}, and steps of such requests are not planned ahead"
    if wanted.method == "auto":
        cost = f"{draft_method_why(view)}; {cost}; drafts pause while they do not pay"
    return Choice(method, cost)


def _heads(count: int) -> str:
    return "prediction head" if count == 1 else f"{count} prediction heads"


@dataclass(frozen=True)
class DraftSteps:
    """Times at one number of rows."""

    plain: StepSeconds  # step without drafts
    verifying: StepSeconds  # step that verifies a draft of the largest length for each row
    passed: StepSeconds | None = None  # pass of the draft model, of which each draft token takes one


def draft_gains(steps: Sequence[DraftSteps], tokens: int) -> tuple[tuple[DraftGain, ...], tuple[Account, ...]]:
    """Return the expected gain by the roofline for each number of rows, with its derivation. tokens: of each draft.

    A step has 1 + rate + rate² + … tokens on average (Leviathan et al., Fast Inference from Transformers via
    Speculative Decoding, 2023)."""
    gains, accounts = [], []
    for one in steps:
        rows, plain = one.plain.rows, one.plain.seconds
        seconds, formula = one.verifying.seconds, number(one.verifying.seconds)
        lines = [
            leading("step without drafts", one.plain.formula, plain, "s"),
            leading("step with drafts", one.verifying.formula, seconds, "s"),
        ]
        if one.passed is not None:
            lines.append(leading("pass of the draft model", one.passed.formula, one.passed.seconds, "s"))
            seconds += tokens * one.passed.seconds
            formula = f"({formula} + {number(tokens)} × {number(one.passed.seconds)})"
        expected = tuple((rate, sum(rate**n for n in range(tokens + 1)) * plain / seconds) for rate in ACCEPTANCE)
        gains.append(DraftGain(rows, seconds / plain, expected))
        for rate, gain in expected:
            length = f"{_accepted_length(rate, tokens)} × {number(plain)} / {formula}"
            lines.append(leading(f"gain if {100 * rate:.0f} % are accepted", length, gain, "×"))
        title = f"the ceiling of the gain by drafts of {tokens} tokens for {rows} {'row' if rows == 1 else 'rows'}"
        accounts.append(Account(f"drafts:{rows}", title, tuple(lines), "×", is_sum=False))
    return tuple(gains), tuple(accounts)


def _accepted_length(rate: float, tokens: int) -> str:
    """Return the formula of the mean number of tokens per step: 1 + p + p² + …"""
    formula = "1"
    for _ in range(tokens):
        formula = f"(1 + {number(rate)} × {formula})"
    return formula
