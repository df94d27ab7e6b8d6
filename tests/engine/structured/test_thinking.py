"""A thinking budget: which token is forced when, by the emitted ones alone, however the markers are cut into tokens."""

import random

import numpy as np
import pytest

from engine.api.messages import Thinking
from engine.structured.thinking import Budget

# Single letters, two markers that are one token each, and tokens that hold parts of markers.
TOKENS = [*"abcdefgh <>/tink", "<think>", "</think>", "g</", "thin", "k>", "\n"]
START, END = TOKENS.index("<think>"), TOKENS.index("</think>")
SPELLED = tuple(TOKENS.index(piece) for piece in ("<", "/", "thin", "k>"))
VOCAB = 70


def bytes_of(token: int) -> bytes:
    return TOKENS[token].encode() if token < len(TOKENS) else b"x"


def budget(tokens: int, *, begun=True, open=True, close: tuple[int, ...] = (END,), inner=None) -> Budget:
    limit = Thinking(tokens, close, ("<think>",), ("</think>",), begun=begun, open=open)
    return Budget(limit, bytes_of, VOCAB, inner)


def drawn(matcher: Budget, wanted: list[int]) -> list[int]:
    """Return the tokens that the matcher emits if the model samples `wanted`."""
    emitted = []
    for token in wanted:
        mask = matcher.mask()
        if mask is not None:
            allowed = [at for at in range(VOCAB) if mask[at // 32] >> np.uint32(at % 32) & 1]
            assert len(allowed) == 1
            token = allowed[0]
        emitted.append(token)
        matcher.advance(token)
    return emitted


@pytest.mark.parametrize("tokens", [0, 1, 2, 5])
def test_end_marker_is_forced_after_the_budget(tokens: int) -> None:
    free = [0, 1, 2, 3, 4, 5, 6, 7]
    assert drawn(budget(tokens), free) == [*free[:tokens], END, *free[tokens + 1 :]]
    asked = [START, *free]
    assert drawn(budget(tokens, begun=False), asked) == [START, *free[:tokens], END, *free[tokens + 1 :]]


def test_an_end_of_several_tokens_is_forced_one_by_one() -> None:
    assert drawn(budget(2, close=SPELLED), [0] * 9) == [0, 0, *SPELLED, 0, 0, 0]


@pytest.mark.parametrize("end", [(END,), SPELLED, (TOKENS.index("g</"), TOKENS.index("thin"), TOKENS.index("k>"))])
def test_finished_reasoning_is_not_changed(end: tuple[int, ...]) -> None:
    """The marker counts however it was cut into tokens."""
    free = [0, 1, *end, *([2] * 30)]
    assert drawn(budget(8), free) == free


def test_reply_without_reasoning_is_not_changed() -> None:
    for free in ([0] * 20, [TOKENS.index("\n"), 0, START, *([1] * 20)]):
        assert drawn(budget(3, begun=False), free) == free, "a marker behind the first content is content"


def test_a_start_that_the_model_repeats_does_not_count() -> None:
    """The start marker is not counted for models that may omit it."""
    assert drawn(budget(2, open=False), [START, 0, 1, 2, 3]) == [START, 0, 1, END, 3]
    spelled = [TOKENS.index(piece) for piece in ("<", "thin", "k>")]
    assert drawn(budget(1, open=False), [*spelled, 0, 1, 2]) == [*spelled, 0, END, 2]
    assert drawn(budget(2, open=False), [0, 1, 2, 3]) == [0, 1, END, 3]
    assert drawn(budget(0, open=False), [0, 1]) == [END, 1]


def test_budget_applies_to_each_channel() -> None:
    limit = Thinking(1, (END,), ("<think>",), ("</think>",), again=True)
    free = [0, START, 1, 2, 3, START, 4, 5, 6]
    assert drawn(Budget(limit, bytes_of, VOCAB), free) == [0, START, 1, END, 3, START, 4, END, 6]


def test_what_is_forced_depends_on_the_emitted_tokens_alone() -> None:
    """A matcher that replays the first tokens continues like the matcher that sampled them."""
    chance = random.Random(3)
    for _ in range(200):
        tokens, begun, is_open = chance.randint(0, 6), chance.random() < 0.5, chance.random() < 0.5
        close = chance.choice([(END,), SPELLED])

        def new(tokens: int = tokens, begun: bool = begun, is_open: bool = is_open, close=close) -> Budget:
            return budget(tokens, begun=begun, open=is_open, close=close)

        free = [chance.randrange(len(TOKENS)) for _ in range(24)]
        whole = drawn(new(), free)
        cut = chance.randrange(len(free))
        resumed = new()
        for token in whole[:cut]:
            resumed.advance(token)
        assert drawn(resumed, free[cut:]) == whole[cut:]


def test_free_tokens_never_decrease() -> None:
    chance = random.Random(4)
    forced = 0
    for _ in range(400):
        begun, is_open, again = (chance.random() < odds for odds in (0.6, 0.5, 0.3))
        close = chance.choice([(END,), SPELLED])
        limit = Thinking(
            chance.randint(0, 6), close, ("<think>",), ("</think>",), begun=begun, open=begun and is_open, again=again
        )
        matcher, free = Budget(limit, bytes_of, VOCAB), 0
        for at in range(40):
            assert matcher.free >= free
            free = matcher.free
            mask = matcher.mask()
            assert (mask is not None) == (at >= free)
            forced += mask is not None
            token = chance.choice([*range(len(TOKENS)), START, END])
            if mask is not None:
                token = int(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[0])
            matcher.advance(token)
    assert forced > 400


class Only:
    """A grammar that allows some tokens."""

    finished = False

    def __init__(self, allowed: set[int]) -> None:
        self.allowed, self.seen = allowed, list[int]()

    def mask(self) -> np.ndarray:
        mask = np.zeros(3, np.uint32)
        for token in self.allowed:
            mask[token // 32] |= np.uint32(1 << token % 32)
        return mask

    def advance(self, token: int) -> None:
        self.seen.append(token)


def test_a_grammar_holds_beside_the_budget() -> None:
    inner = Only({0, END})
    matcher = budget(1, inner=inner)
    assert matcher.mask()[0] == 1 | 1 << END
    matcher.advance(0)
    assert matcher.mask()[0] == 1 << END
    matcher.advance(END)
    assert matcher.mask()[0] == 1 | 1 << END
    assert inner.seen == [0, END]
    refusing = budget(0, inner=Only({0}))
    assert refusing.mask()[0] == 1, "where the grammar has no place for the marker, it has the last word"
