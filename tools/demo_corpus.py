"""The seeded corpus of the demo model: an endless stream of training conversations, and held-out ones of each skill.

`python tools/demo_corpus.py [--seed N] [--count N]` prints some. Facts about manifest keys come from
`appliance.config.manifest`, so after a change of the schema a new run of `tools/train_demo.py` learns the new keys.
"""

import argparse
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.demo.arithmetic import arithmetic, several
from tools.demo.calls import after, call, offered, refuse, scene, unneeded
from tools.demo.keys import keys
from tools.demo.objects import objects
from tools.demo.sample import THINKING_SHARE, Message, Sample, Skill
from tools.demo.talk import talk
from tools.demo.template import prompt
from tools.demo.words import repeat, reverse_list, reverse_word

SYSTEM = (
    "You are a helpful assistant.", "You are a helpful assistant.", "You are Slipway's demo model.",
    "Answer briefly.", "Be helpful.", "You are an assistant.", "You are a friendly assistant. Be short.",
    "Be concise.",
)  # fmt: skip
HISTORY_SHARE, SYSTEM_SHARE = 0.12, 0.2


OTHER: tuple[Skill, ...] = (talk, talk, keys, reverse_list, repeat, objects)


def no_tool(rng: random.Random, held_out: bool) -> Sample:
    """A question of another skill while tools that do not fit it are offered."""
    return unneeded(rng.choice(OTHER)(rng, held_out), offered(rng))


SKILLS: dict[str, Skill] = {
    "arithmetic": arithmetic,
    "several": several,
    "repeat": repeat,
    "reverse list": reverse_list,
    "reverse word": reverse_word,
    "keys": keys,
    "json": objects,
    "call": call,
    "after": after,
    "refuse": refuse,
    "no tool": no_tool,
    "talk": talk,
}
WEIGHTS = {
    "arithmetic": 7.0, "several": 1.0, "repeat": 1.5, "reverse list": 1.5, "reverse word": 3.5, "keys": 4.0,
    "json": 3.5, "talk": 0.8,
}  # fmt: skip
SCENES = {"scene": 1.0}
SHORT = (arithmetic, talk, repeat, reverse_list, keys, talk, arithmetic)


def _history(rng: random.Random) -> tuple[Message, ...]:
    """One or two earlier questions and answers of other skills."""
    turns: list[Message] = []
    for _ in range(rng.choice((1, 1, 2))):
        earlier = rng.choice(SHORT)(rng, False)
        turns += [*earlier.messages, {"role": "assistant", "content": earlier.reply}]
    return tuple(turns)


def _in_context(rng: random.Random, samples: tuple[Sample, ...]) -> tuple[Sample, ...]:
    """Samples as they may be met in a chat: with a system message, after other turns, with thinking on, or just so."""
    system: tuple[Message, ...] = ()
    if rng.random() < SYSTEM_SHARE:
        system = ({"role": "system", "content": rng.choice(SYSTEM)},)
    met = []
    for sample in samples:
        history = _history(rng) if rng.random() < HISTORY_SHARE else ()
        messages = (*system, *history, *sample.messages)
        thinking = sample.thinking if sample.skill == "arithmetic" else rng.random() < THINKING_SHARE
        met.append(replace(sample, messages=messages, thinking=thinking))
    return tuple(met)


def training_groups(seed: int, weights: dict[str, float]) -> Iterator[tuple[Sample, ...]]:
    """The endless training stream of a seed, in groups with one system turn; no held-out problem is in it."""
    rng = random.Random(seed)
    while True:
        chosen = rng.choices(list(weights), list(weights.values()))[0]
        if chosen == "scene":
            group = scene(rng, rng.choice(OTHER)(rng, False))
        else:
            group = (SKILLS[chosen](rng, False),)
        if group:
            yield _in_context(rng, group)


def training_samples(seed: int) -> Iterator[Sample]:
    """The same stream with all skills, sample by sample."""
    return chain.from_iterable(training_groups(seed, WEIGHTS | {"scene": 3.0}))


def held_out_samples(skill: str, count: int, seed: int = 1, *, thinking: bool = False) -> list[Sample]:
    """Test conversations of one skill: plain ones, whose problems are never in training, with thinking off or on."""
    rng, samples = random.Random(f"{skill} {seed}"), []
    while len(samples) < count:
        sample = SKILLS[skill](rng, True)
        if sample.skill != "arithmetic":
            sample = replace(sample, thinking=thinking)
        if sample.thinking == thinking:
            samples.append(sample)
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=10)
    arguments = parser.parse_args()
    for sample, _ in zip(training_samples(arguments.seed), range(arguments.count), strict=False):
        print(f"--- {sample.skill}\n{prompt(sample)}{sample.target}<|im_end|>")


if __name__ == "__main__":
    main()
