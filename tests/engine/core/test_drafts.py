"""Drafts by prompt lookup, compared with a search without an index."""

import random

import pytest

from engine.core.drafts import MAX_CANDIDATES, MAX_MATCH, TOKENS_PER_MATCHED, NgramIndex


def searched(ids, shortest, count):
    """Compare every earlier position, and continue behind the best one token by token."""
    if count < 1 or len(ids) <= shortest:
        return ()
    ends = [end for end in range(shortest, len(ids)) if ids[end - shortest : end] == ids[-shortest:]]
    lengths = {}
    for end in ends[::-1][:MAX_CANDIDATES]:
        longest = min(max(shortest, MAX_MATCH), end)
        lengths[end] = max(size for size in range(shortest, longest + 1) if ids[end - size : end] == ids[-size:])
    if not lengths:
        return ()
    best = max(lengths, key=lambda end: (lengths[end], end))
    text = list(ids)
    if lengths[best] < MAX_MATCH:  # a short match is often wrong after some tokens
        count = min(count, TOKENS_PER_MATCHED * lengths[best])
    for at in range(count):
        text.append(text[best + at])
    return tuple(text[len(ids) :])


@pytest.mark.parametrize("shortest", [1, 2, 3, 5])
@pytest.mark.parametrize("alphabet", [1, 2, 3, 20])
def test_drafts_are_those_of_a_search(alphabet, shortest):
    draw = random.Random(alphabet * 10 + shortest)
    for _ in range(20):
        index, ids = NgramIndex(shortest), []
        while len(ids) < 90:
            ids += [draw.randrange(alphabet) for _ in range(draw.choice([0, 1, 1, 2, 7]))]
            count = draw.randrange(20)
            assert index.propose(ids, count) == searched(ids, shortest, count), ids


def test_a_text_without_repeats_has_no_drafts():
    assert NgramIndex(2).propose(list(range(50)), 4) == ()


def test_a_period_is_continued_beyond_the_end():
    assert NgramIndex(2).propose([7, 1, 2, 1, 2], 5) == (1, 2, 1, 2, 1)
