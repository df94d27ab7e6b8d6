"""Rules for speculative decoding."""

from collections.abc import Callable

from appliance.constraints.rule import Facts, Rule, View
from engine.api.config import SpeculationMethod

OFF: SpeculationMethod = "off"

AVAILABLE: tuple[tuple[SpeculationMethod, Callable[[Facts], bool], str], ...] = (
    ("mtp", lambda facts: facts.model.predicts, "the checkpoint has a prediction head"),
    ("suffix", lambda facts: not facts.model.pools, "lookup needs no draft model"),
    (OFF, lambda facts: True, "the model has no speculative decoding"),
)
"""Methods that `auto` may select, best first: name, whether a checkpoint has it, and the reason to select it."""


def draft_methods(view: View) -> tuple[str, ...]:
    """Return the methods of `auto`, best first."""
    return tuple(method for method, has, _ in AVAILABLE if has(view.facts))


def draft_method_why(view: View) -> str:
    """Return the reason for a method that `auto` selected."""
    return next(reason for method, _, reason in AVAILABLE if method == view.speculation)


RULES = (
    Rule(
        name="speculation-pools",
        keys=("speculation",),
        facts=("model.pools",),
        holds=lambda view: view.speculation == OFF or not view.facts.model.pools,
        text="pooling models have no speculative decoding, because they generate no tokens",
    ),
)
