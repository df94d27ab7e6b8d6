"""Text and usage of a chat reply do not depend on how many tokens arrive at a time."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.output_formats.declaration import OutputFormat
from appliance.output_formats.events import joined
from appliance.output_formats.formats import HERMES, REASONINGS
from appliance.server.chat.parsed import ChatPlan, Prompt, Reading
from appliance.server.chat.stream import ChatChoice
from engine.api.messages import Delta
from engine.text import Tokenizer

TOKENIZER = Tokenizer(Path(__file__).parents[4] / "manifests" / "demo")
THINK = next(reasoning for reasoning in REASONINGS if reasoning.name == "think")
OPEN, CLOSE = TOKENIZER.convert_tokens_to_ids(["<think>", "</think>"])
THOUGHT = TOKENIZER.encode("17 + 25: 7 + 5 = 12.")
SAID = (OPEN, *THOUGHT, CLOSE, *TOKENIZER.encode("It is 42 🧮."))
READING = Reading((), False, 0, skip_special_tokens=True, shown_ids=frozenset((OPEN, CLOSE)))


def cuts(ids: tuple[int, ...]) -> list[list[tuple[int, ...]]]:
    """Split the tokens: all at once, one by one, in two at every position, and at random."""
    found = [[ids], [(token,) for token in ids], *([ids[:at], ids[at:]] for at in range(1, len(ids)))]
    dice = random.Random(3)
    for _ in range(30):
        places = [0, *sorted(dice.sample(range(1, len(ids)), 5)), len(ids)]
        found.append([ids[start:end] for start, end in zip(places, places[1:], strict=False)])
    return found


@pytest.mark.parametrize("stops", [(), ("It is",), ("42",), ("12",), ("25: 7",)], ids=lambda stops: "".join(stops))
def test_the_count_of_thoughts_is_the_same_for_every_cut(stops: tuple[str, ...]) -> None:
    plan = ChatPlan((Prompt((1, 2), ()),), replace(READING, stops=stops), output_format=OutputFormat(THINK, HERMES))
    found = set()
    for parts in cuts(SAID):
        choice = ChatChoice(TOKENIZER, plan)
        events = []
        for at, part in enumerate(parts):
            taken = choice.take(Delta("r", part, finish="length" if at == len(parts) - 1 else None))
            events += taken.events
            if choice.choice.stopped:
                break
        found.add((choice.reasoning_tokens, choice.choice.tokens, tuple(joined(events))))
    assert len(found) == 1, found
    if not stops:
        assert found.pop()[0] == len(THOUGHT)
