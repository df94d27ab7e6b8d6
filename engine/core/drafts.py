"""Drafts by prompt lookup: the tokens that followed an earlier occurrence of the last tokens of a sequence.

Saxena, Prompt Lookup Decoding, 2023. Occurrences are found with a hash chain as in LZ77: a dictionary has the latest
end of each n-gram of the minimum length, and an array links each end to the one before.
"""

from array import array
from collections.abc import Iterator

MAX_MATCH = 16  # last tokens that are compared, to choose the best of several occurrences
TOKENS_PER_MATCHED = 3
"""Maximum length of a draft, relative to the length of the match. A match of `MAX_MATCH` tokens has no limit."""
MAX_CANDIDATES = 32  # occurrences that are compared, latest first: bounds the time for highly repetitive texts


class NgramIndex:
    """Index of one sequence, whose tokens are only appended.

    shortest: minimum number of last tokens that must occur earlier."""

    __slots__ = ("_indexed", "_latest", "_longest", "_previous", "_shortest")

    def __init__(self, shortest: int) -> None:
        self._shortest, self._longest = shortest, max(shortest, MAX_MATCH)
        self._latest: dict[tuple[int, ...], int] = {}  # n-gram of the minimum length: position after its latest end
        self._previous = array("q")  # by position: position after the preceding end of the same n-gram, or 0
        self._indexed = 0  # number of indexed positions

    def propose(self, ids: list[int], count: int) -> tuple[int, ...]:
        """Return up to `count` tokens that may follow `ids`, which begins with the ids of the previous call.

        The longest match is used, and the latest one of equally long ones. A match that overlaps the end is continued
        periodically."""
        self.extend(ids)
        if count < 1:
            return ()
        best = best_length = 0
        for length, end in self.matches(ids, ids, MAX_CANDIDATES):
            if length > best_length:
                best, best_length = end, length
                if length == self._longest:
                    break
        if not best:
            return ()
        if best_length < MAX_MATCH:
            count = min(count, TOKENS_PER_MATCHED * best_length)
        period = len(ids) - best
        return tuple(ids[best + at % period] for at in range(count))

    def matches(self, ids: list[int], text: list[int], count: int) -> Iterator[tuple[int, int]]:
        """Yield (length, end) of occurrences of the last tokens of `ids`, the latest first, at most `count`. `text` has
        the indexed tokens, and its token at `end` followed the occurrence."""
        if len(ids) < self._shortest:
            return
        end = self._latest.get(tuple(ids[-self._shortest :]), 0)
        for _ in range(count):
            if not end:
                return
            yield self._match_length(ids, text, end), end
            end = self._previous[end]

    def extend(self, ids: list[int]) -> None:
        """Index all n-grams that end before the last token."""
        size, latest, previous = self._shortest, self._latest, self._previous
        for end in range(self._indexed, len(ids)):
            if end < size:
                previous.append(0)
                continue
            key = tuple(ids[end - size : end])
            previous.append(latest.get(key, 0))
            latest[key] = end
        self._indexed = max(self._indexed, len(ids))

    def _match_length(self, ids: list[int], text: list[int], end: int) -> int:
        """Return how many tokens of `text` before `end` equal the last tokens of `ids`, at most `longest`."""
        last, length = len(ids), self._shortest
        limit = min(self._longest, end, last)
        while length < limit and text[end - 1 - length] == ids[last - 1 - length]:
            length += 1
        return length
