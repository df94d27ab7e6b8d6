"""The load that `benchmarks.serve` sends: a seeded mix of prompt lengths, output lengths and start times.

Lengths are lognormal, with medians and spreads similar to the ShareGPT conversations (prompts: median about 100 tokens,
long tail; replies: median about 180). Prompts consist of words, so a tokenizer reads text and not noise. All prompts
differ from their first words on, so that a prefix cache has no effect.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

CONSONANTS, VOWELS = "bcdfghklmnprstvz", "aeiou"
TOKENS_A_WORD = 2.0
"""Estimated tokens of an invented word of two syllables in a byte-pair vocabulary. A reply's usage has the count."""


@dataclass(frozen=True)
class Shape:
    """Lognormal lengths: `median` in tokens, `sigma` of the logarithm, cut at `most`."""

    median: float
    sigma: float
    most: int

    def draw(self, random_: random.Random) -> int:
        return max(1, min(self.most, round(random_.lognormvariate(math.log(self.median), self.sigma))))


@dataclass(frozen=True)
class LoadRequest:
    """One request of the load. `start_s` counts from the beginning; 0 in a closed loop: a free client takes it."""

    index: int
    prompt: str
    max_tokens: int
    seed: int
    start_s: float


def word(random_: random.Random) -> str:
    return "".join(random_.choice(CONSONANTS) + random_.choice(VOWELS) for _ in range(random_.randint(1, 3)))


def text(random_: random.Random, tokens: int) -> str:
    """Words of about this many tokens, at least one."""
    return " ".join(word(random_) for _ in range(max(1, round(tokens / TOKENS_A_WORD))))


def make_load(*, requests: int, seed: int, prompt: Shape, output: Shape, rate: float | None) -> Iterator[LoadRequest]:
    """The requests of one run. With a `rate` in requests a second, arrivals are a Poisson process (open loop)."""
    start_s = 0.0
    for index in range(requests):
        random_ = random.Random(f"{seed}:{index}")
        if rate is not None and index:
            start_s += random_.expovariate(rate)
        words = text(random_, prompt.draw(random_))
        yield LoadRequest(index, words, output.draw(random_), random_.getrandbits(31), start_s)
