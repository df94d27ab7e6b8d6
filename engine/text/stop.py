"""Stop strings in streamed text: the earliest completed match ends the reply, regardless of tokenization.

A match counts only if it ends in text of tokens after the first `min_tokens`. The match that ends first wins, ties are
resolved by list order, so the result does not depend on tokenization. Text is held back while it may be part of a
match:
the length of the longest stop string minus one.
"""

from collections.abc import Sequence

import msgspec


class Stopped(msgspec.Struct, frozen=True):
    """Result of one token's text."""

    text: str  # may be sent now
    stop: str | None = None  # stop string that ended the reply


class StopStrings:
    """Matches stop strings in one reply. After a match, nothing more must be pushed."""

    def __init__(self, stops: Sequence[str], *, include: bool = False, min_tokens: int = 0) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._min_tokens = min_tokens
        self._reach = max(map(len, self._stops), default=1) - 1
        self._tokens = 0
        self._kept = ""  # text that is held back, or (include) already sent but possibly part of a match
        self._sent = 0  # number of characters of `_kept` that were already sent

    def push(self, text: str) -> Stopped:
        """Add the text that one token completed (may be "") and return the text that can be sent."""
        self._tokens += 1
        if not self._stops:
            return Stopped(text)
        before = len(self._kept)
        self._kept += text
        if text and self._tokens > self._min_tokens:
            match = self._match(before)
            if match is not None:
                start, stop = match
                end = start + len(stop) if self._include else start
                return Stopped(self._kept[self._sent : end], stop)
        return Stopped(self._release())

    def flush(self) -> str:
        """Return the text that was held back, after the reply has ended without a stop string."""
        text, self._kept, self._sent = self._kept[self._sent :], "", 0
        return text

    def _match(self, before: int) -> tuple[int, str] | None:
        """Return start and string of the match that ends first in the new text, which begins at `before`."""
        found = (
            (start + len(stop), rank, start)
            for rank, stop in enumerate(self._stops)
            if (start := self._kept.find(stop, max(0, before - len(stop) + 1))) >= 0
        )
        best = min(found, default=None)
        return None if best is None else (best[2], self._stops[best[1]])

    def _release(self) -> str:
        safe = len(self._kept) if self._include else len(self._kept) - self._reach
        text = self._kept[self._sent : safe] if safe > self._sent else ""
        self._sent = max(self._sent, safe)
        drop = max(0, len(self._kept) - self._reach)
        self._kept = self._kept[drop:]
        self._sent = max(0, self._sent - drop)
        return text
