"""Stop strings over streamed text: the earliest completed match ends the reply, however tokens cut it.

Rule (C.5): a match counts only if it ends in text of tokens after the first `min_tokens`; the one that ends first wins,
ties go by list order, so the cut does not depend on how tokens divide the text. Text is held back as long as it may
still become part of a match: the longest stop string's length less one.
"""

from collections.abc import Sequence

import msgspec


class Stopped(msgspec.Struct, frozen=True):
    """What one token's text led to: `text` may be sent now; `stop` is the string that ended the reply, if one did."""

    text: str
    stop: str | None = None


class StopStrings:
    """Watches the text of one reply. After a match nothing more is to be pushed."""

    def __init__(self, stops: Sequence[str], *, include: bool = False, min_tokens: int = 0) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._min_tokens = min_tokens
        self._reach = max(map(len, self._stops), default=1) - 1
        self._tokens = 0
        self._kept = ""  # text that may be needed: held back, or (include) already sent but still part of a match
        self._sent = 0  # characters of `_kept` that were sent already

    def push(self, text: str) -> Stopped:
        """Takes the text that one token completed (maybe "") and gives what is safe to send."""
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
        """What was held back, once the reply ended without a stop string."""
        text, self._kept, self._sent = self._kept[self._sent :], "", 0
        return text

    def _match(self, before: int) -> tuple[int, str] | None:
        """Start and string of the match that ends first among those ending in the new text, which begins at
        `before`."""
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
