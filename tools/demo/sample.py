"""One training or test conversation, and the rule that keeps test problems out of training.

A problem (``17+25``, a word list, a phrase about a key) is held out if its hash says so, so the split needs no stored
list and does not depend on the order of generation.
"""

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

HELD_OUT_SHARE = 16  # one in 16 problems
THINKING_SHARE = 0.2  # of the training conversations
ALWAYS_HELD_OUT = frozenset({"17+25", "25+17"})  # the question of the quick start

Message = dict[str, Any]
Skill = Callable[[random.Random, bool], "Sample"]


@dataclass(frozen=True)
class Sample:
    """A conversation up to the turn that is answered, and the answer."""

    skill: str
    problem: str
    messages: tuple[Message, ...]
    reply: str
    thought: str
    tools: tuple[dict[str, Any], ...] = ()
    thinking: bool = False
    spelled: bool = False  # the reply is trained as single bytes: letters are reversed, not tokens

    @property
    def target(self) -> str:
        """The text that follows the generation prompt."""
        return f"<think>\n{self.thought}\n</think>\n\n{self.reply}" if self.thinking else self.reply


def is_held_out(problem: str) -> bool:
    """Return true if a problem belongs to the test set."""
    if problem in ALWAYS_HELD_OUT:
        return True
    return hashlib.blake2b(problem.encode(), digest_size=2).digest()[0] % HELD_OUT_SHARE == 0


def ask(content: str) -> tuple[Message, ...]:
    """A conversation of one user turn."""
    return ({"role": "user", "content": content},)


def draw(make: Callable[[], Sample], held_out: bool) -> Sample:
    """The first sample whose problem is on the wanted side of the split."""
    while True:
        sample = make()
        if is_held_out(sample.problem) == held_out:
            return sample


def listed(items: Sequence[str]) -> str:
    """``a, b and c``."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
