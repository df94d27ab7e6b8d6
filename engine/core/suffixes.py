"""Drafts by suffix matching: the likely continuations of the last tokens in the request and in recent replies.

Oliaro et al., SuffixDecoding, 2024. Occurrences of the last tokens are the leaves below one node of a suffix tree. The
tree is not stored: a hash chain (engine/core/drafts.py) lists the latest occurrences, and a draft descends to the child
with most of them. It ends where too few occurrences agree, and a longer match allows a longer draft.

Replies are kept by scope, which is the cache salt and the LoRA adapter, as for the prefix cache. No request reads the
replies of another scope.
"""

from collections import OrderedDict
from collections.abc import Iterable

import msgspec

from engine.core.drafts import MAX_MATCH, TOKENS_PER_MATCHED, NgramIndex

MAX_REPLY_TOKENS = 32_768  # of all scopes of an engine; about 6 MB
MAX_OCCURRENCES = 8  # of each text that a draft compares
MIN_SHARE = 0.4  # of the occurrences that must have continued like the draft
SEPARATOR = -1  # between replies; no token has this id

Scope = tuple[str, int]  # (cache salt, version of the LoRA adapter)


class RepliesState(msgspec.Struct, array_like=True):
    """Replies of one scope, for a recording."""

    salt: str
    adapter: int
    ids: list[int]


class RecentReplies:
    """Recent replies by scope, at most MAX_REPLY_TOKENS in total. The least recently used scope is shortened first.

    shortest: minimum number of last tokens that must occur earlier."""

    def __init__(self, shortest: int) -> None:
        self._shortest = shortest
        self._scopes: OrderedDict[Scope, _Text] = OrderedDict()
        self.tokens = 0  # kept tokens, including separators

    def add(self, scope: Scope, reply: list[int]) -> None:
        """Keep a reply, and drop old ones if there are too many."""
        reply = reply[-MAX_REPLY_TOKENS // 4 :]
        if len(reply) <= self._shortest:
            return
        text = self._scopes.setdefault(scope, _Text(self._shortest))
        self._scopes.move_to_end(scope)
        text.append(reply)
        self.tokens += len(reply) + 1
        while self.tokens > MAX_REPLY_TOKENS:
            oldest = next(iter(self._scopes))
            self.tokens -= self._scopes[oldest].drop_half()
            if not self._scopes[oldest].ids:
                del self._scopes[oldest]

    def text(self, scope: Scope) -> "_Text | None":
        """Return the replies of a scope."""
        return self._scopes.get(scope)

    def clear(self) -> None:
        """Drop all replies."""
        self._scopes.clear()
        self.tokens = 0

    def state(self) -> list[RepliesState]:
        return [RepliesState(salt, adapter, text.ids) for (salt, adapter), text in self._scopes.items()]

    def restore(self, state: Iterable[RepliesState]) -> None:
        for each in state:
            self._scopes[each.salt, each.adapter] = _Text(self._shortest, each.ids)
            self.tokens += len(each.ids)


class _Text:
    """Replies of one scope, each followed by a separator, with their index."""

    def __init__(self, shortest: int, ids: list[int] | None = None) -> None:
        self._shortest = shortest
        self.ids = ids or []
        self.index = NgramIndex(shortest)
        self.index.extend(self.ids)

    def append(self, reply: list[int]) -> None:
        self.ids += [*reply, SEPARATOR]
        self.index.extend(self.ids)

    def drop_half(self) -> int:
        """Drop the older half. Return the number of dropped tokens."""
        half = (len(self.ids) + 1) // 2
        self.ids = self.ids[half:]
        self.index = NgramIndex(self._shortest)
        self.index.extend(self.ids)
        return half


def propose(index: NgramIndex, ids: list[int], replies: _Text | None, count: int) -> tuple[int, ...]:
    """Return up to `count` tokens that may follow `ids`. index: of `ids`. replies: of the request's scope."""
    found = [(length, ids, end) for length, end in index.matches(ids, ids, MAX_OCCURRENCES)]
    if replies is not None:
        found += [
            (length, replies.ids, end) for length, end in replies.index.matches(ids, replies.ids, MAX_OCCURRENCES)
        ]
    if not found:
        return ()
    found.sort(key=lambda one: -one[0])  # stable: the request before replies, the latest before earlier ones
    longest = found[0][0]
    # A much shorter match predicts the next token less well.
    live = [(text, end) for length, text, end in found if 2 * length > longest]
    draft: list[int] = []
    occurrences, size = len(live), len(ids)
    limit = count if longest >= MAX_MATCH else min(count, TOKENS_PER_MATCHED * longest)
    while len(draft) < limit and live:
        votes: dict[int, int] = {}
        next_tokens = [_token(text, end, ids, draft, size) for text, end in live]
        for token in next_tokens:
            votes[token] = votes.get(token, 0) + 1
        best = max(votes, key=votes.__getitem__)  # the first of equal ones, which has the longest match
        if best == SEPARATOR or votes[best] < MIN_SHARE * occurrences:
            break
        draft.append(best)
        live = [(text, end + 1) for (text, end), token in zip(live, next_tokens, strict=True) if token == best]
    return tuple(draft)


def _token(text: list[int], end: int, ids: list[int], draft: list[int], size: int) -> int:
    """Return the token at `end`. A match that reaches the end of the request is continued with the draft."""
    return draft[end - size] if text is ids and end >= size else text[end]
