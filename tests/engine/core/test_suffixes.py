"""Drafts by suffix matching, compared with a search of all positions, and the replies that they come from."""

import random

import pytest

from engine.core import suffixes
from engine.core.drafts import MAX_MATCH, TOKENS_PER_MATCHED, NgramIndex
from engine.core.suffixes import MAX_OCCURRENCES, MIN_SHARE, RecentReplies, propose


def occurrences(ids, text, shortest):
    """(length, end) of each occurrence of the last tokens, the latest first."""
    found = []
    for end in range(len(text) - 1, shortest - 1, -1):
        if len(ids) >= shortest and text[end - shortest : end] == ids[-shortest:]:
            sizes = range(shortest, min(max(shortest, MAX_MATCH), end, len(ids)) + 1)
            found.append((max(size for size in sizes if text[end - size : end] == ids[-size:]), end))
    return found[:MAX_OCCURRENCES]


def searched(ids, replies, shortest, count):
    """Vote token by token among complete continuations."""
    found = [(length, ids[end:], True) for length, end in occurrences(ids, ids, shortest)]
    found += [(length, replies[end:], False) for length, end in occurrences(ids, replies, shortest)]
    if not found:
        return ()
    longest = max(length for length, _, _ in found)
    live = sorted((one for one in found if 2 * one[0] > longest), key=lambda one: -one[0])
    draft, total = [], len(live)
    while len(draft) < (count if longest >= MAX_MATCH else min(count, TOKENS_PER_MATCHED * longest)):
        nexts = [([*text, *draft] if own else text)[len(draft)] for _, text, own in live]
        best = max(nexts, key=nexts.count)
        if best == suffixes.SEPARATOR or nexts.count(best) < MIN_SHARE * total:
            break
        draft.append(best)
        live = [one for one, token in zip(live, nexts, strict=True) if token == best]
    return tuple(draft)


@pytest.mark.parametrize("shortest", [1, 2, 3])
@pytest.mark.parametrize("alphabet", [1, 2, 3, 20])
def test_drafts_are_those_of_a_search(alphabet, shortest):
    draw = random.Random(alphabet * 10 + shortest)
    for _ in range(15):
        replies = RecentReplies(shortest)
        for _ in range(draw.randrange(4)):
            replies.add(("", -1), [draw.randrange(alphabet) for _ in range(draw.randrange(30))])
        text = replies.text(("", -1))
        index, ids = NgramIndex(shortest), []
        while len(ids) < 60:
            ids += [draw.randrange(alphabet) for _ in range(draw.choice([0, 1, 1, 2, 7]))]
            count = draw.randrange(9)
            index.extend(ids)
            expected = searched(ids, [] if text is None else text.ids, shortest, count)
            assert propose(index, ids, text, count) == expected, ids


def drafts(replies, scope, ids, count=4):
    index = NgramIndex(2)
    index.extend(ids)
    return propose(index, ids, replies.text(scope), count)


def test_a_draft_continues_an_earlier_reply_of_the_same_scope_only():
    replies = RecentReplies(2)
    replies.add(("salt", 3), [1, 2, 3, 4, 5, 6])
    assert drafts(replies, ("salt", 3), [9, 2, 3]) == (4, 5, 6)
    for scope in (("", 3), ("salt", -1), ("other", 3)):
        assert drafts(replies, scope, [9, 2, 3]) == ()


def test_a_draft_follows_most_occurrences_and_ends_where_they_disagree():
    replies = RecentReplies(2)
    for last in ([5, 6], [5, 6], [7, 8]):
        replies.add(("", -1), [1, 2, 3, *last])
    assert drafts(replies, ("", -1), [1, 2, 3]) == (5, 6)
    for last in ([9, 9], [8, 8], [4, 4]):
        replies.add(("", -1), [1, 2, 3, *last])
    assert drafts(replies, ("", -1), [1, 2, 3]) == ()


def test_a_longer_match_allows_a_longer_draft():
    replies = RecentReplies(2)
    replies.add(("", -1), list(range(100)))
    assert drafts(replies, ("", -1), [99, 10, 11], 12) == tuple(range(12, 18))
    assert drafts(replies, ("", -1), [9, 10, 11], 12) == tuple(range(12, 21))
    assert drafts(replies, ("", -1), list(range(20)), 12) == tuple(range(20, 32))


def test_kept_replies_are_bounded_and_the_least_recent_scope_is_shortened_first(monkeypatch):
    monkeypatch.setattr(suffixes, "MAX_REPLY_TOKENS", 60)
    replies = RecentReplies(2)
    for number in range(50):
        replies.add((str(number % 4), -1), [number] * 9)
        kept = sum(len(one.ids) for one in replies.state())
        assert kept == replies.tokens <= 60
    assert replies.text(("1", -1)) is not None, "of the last reply"
    replies.add(("long", -1), list(range(1000)))
    assert replies.text(("long", -1)).ids[-2:] == [999, suffixes.SEPARATOR] and replies.tokens <= 60


def test_replies_of_a_recording_give_the_same_drafts(monkeypatch):
    monkeypatch.setattr(suffixes, "MAX_REPLY_TOKENS", 300)
    draw, replies = random.Random(1), RecentReplies(2)
    for _ in range(40):
        replies.add((draw.choice("ab"), -1), [draw.randrange(4) for _ in range(draw.randrange(40))])
    again = RecentReplies(2)
    again.restore(replies.state())
    assert again.tokens == replies.tokens and again.state() == replies.state()
    for _ in range(50):
        ids, scope = [draw.randrange(4) for _ in range(12)], (draw.choice("ab"), -1)
        assert drafts(again, scope, ids) == drafts(replies, scope, ids)
