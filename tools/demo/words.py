"""Repeating and reversing words: a list in its order or backwards, one word's letters backwards or apart."""

import random

from tools.demo.sample import Sample, ask, draw
from tools.demo.vocabulary import invented, word

REPEAT_WORD = (
    "Repeat the word {w}.", "Repeat: {w}", "Say {w}.", "Repeat the word '{w}'.", 'Repeat the word "{w}".',
    "Please repeat {w}", "Write the word {w}.", "Repeat after me: {w}", "Say the word {w}", "Echo {w}",
    "Can you repeat the word {w}?", "repeat {w}", "Just say {w}.", "Write {w}", "Repeat this word: {w}",
)  # fmt: skip
REPEAT_TIMES = (
    "Repeat the word {w} {n} times.", "Say {w} {n} times.", "Write {w} {n} times.",
    "Please repeat '{w}' {n} times.", 'Repeat "{w}" {n} times', "Write the word {w} {n} times.",
    "Can you say {w} {n} times?",
)  # fmt: skip
REPEAT_LIST = (
    "Repeat these words: {w}", "Repeat: {w}", "Repeat after me: {w}", "Say: {w}", "Please repeat the words {w}.",
    "Repeat the words {w}.", "Echo this: {w}", "Write these words again: {w}", "Repeat the following: {w}",
    'Repeat "{w}"', "Say the words: {w}", "Copy this: {w}", "Repeat exactly: {w}", "Can you repeat this? {w}",
)  # fmt: skip
REVERSE_LIST = (
    "Reverse these words: {w}", "Reverse the order of these words: {w}", "Reverse the list: {w}", "Reverse: {w}",
    "Write these words in reverse order: {w}", "Say these words backwards: {w}",
    "Put these words in reverse order: {w}", "Please reverse the words {w}.", "Reverse the words {w}.",
    "Reverse the following words: {w}", 'Reverse the words "{w}"', "List these words from last to first: {w}",
    "Can you reverse this list? {w}", "Turn this list around: {w}",
)  # fmt: skip
REVERSE_WORD = (
    "Reverse the word {w}.", "Reverse the word '{w}'.", 'Reverse the word "{w}".', "Reverse: {w}",
    "Spell {w} backwards.", "Write {w} backwards.", "Please reverse {w}", "Write the word {w} backwards.",
    "What is {w} backwards?", "Reverse {w}.", "Spell the word {w} backwards", "Reverse the letters of {w}.",
    "Can you reverse the word {w}?", "reverse {w}", "Write the letters of {w} in reverse order.",
    "What is {w} spelled backwards?",
)  # fmt: skip
SPELL = (
    "Spell {w}.", "Spell the word {w}.", "How do you spell {w}?", "Spell '{w}'", "Please spell {w}.",
    "Write the letters of {w}.", "Which letters are in {w}?", 'Spell the word "{w}"',
)  # fmt: skip
TIMES = {2: ("two", "2"), 3: ("three", "3"), 4: ("four", "4"), 5: ("five", "5")}


def _list(rng: random.Random) -> tuple[list[str], str]:
    """Return two to six words and their separators."""
    words = [word(rng) for _ in range(rng.choice((2, 3, 3, 4, 5, 6)))]
    return words, rng.choice((" ", " ", ", "))


def _styled(rng: random.Random) -> str:
    text = word(rng) if rng.random() < 0.8 else invented(rng)
    return text.capitalize() if rng.random() < 0.1 else text


def _repeat(rng: random.Random) -> Sample:
    kind = rng.random()
    if kind < 0.3:
        text = _styled(rng)
        return Sample(
            "repeat", f"word {text}", ask(rng.choice(REPEAT_WORD).format(w=text)), text, f"The word is {text}."
        )
    if kind < 0.5:
        text, count = _styled(rng), rng.randint(2, 5)
        question = rng.choice(REPEAT_TIMES).format(w=text, n=rng.choice(TIMES[count]))
        return Sample(
            "repeat", f"word {text}", ask(question), " ".join([text] * count), f"The word is {text}, {count} times."
        )
    words, between = _list(rng)
    text = between.join(words)
    return Sample(
        "repeat", f"list {' '.join(words)}", ask(rng.choice(REPEAT_LIST).format(w=text)), text, "The same words again."
    )


def _reverse_list(rng: random.Random) -> Sample:
    words, between = _list(rng)
    question = rng.choice(REVERSE_LIST).format(w=between.join(words))
    reply = between.join(reversed(words))
    return Sample(
        "reverse list",
        f"list {' '.join(words)}",
        ask(question),
        reply,
        f"The last word is {words[-1]}, so it comes first.",
    )


def _reverse_word(rng: random.Random) -> Sample:
    text = word(rng)
    thought = f"The letters are {' '.join(text)}."
    if rng.random() < 0.3:
        return Sample(
            "spell", f"letters {text}", ask(rng.choice(SPELL).format(w=text)), " ".join(text), thought, spelled=True
        )
    question = rng.choice(REVERSE_WORD).format(w=text)
    return Sample("reverse word", f"letters {text}", ask(question), text[::-1], thought, spelled=True)


def repeat(rng: random.Random, held_out: bool) -> Sample:
    """A word, a word several times, or a list of words, said again."""
    return draw(lambda: _repeat(rng), held_out)


def reverse_list(rng: random.Random, held_out: bool) -> Sample:
    """A list of words from last to first."""
    return draw(lambda: _reverse_list(rng), held_out)


def reverse_word(rng: random.Random, held_out: bool) -> Sample:
    """One word's letters from last to first, or one after another."""
    return draw(lambda: _reverse_word(rng), held_out)
