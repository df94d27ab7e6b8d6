"""Limit on reasoning tokens: once the budget is used up, the tokens of the end marker are forced.

The forced tokens depend only on the limit and the emitted ids, so a request that is resumed or preempted gets the same
tokens. Reasoning is recognised by its text, as in the parser of the reply: markers may be tokenized in any way.

Most tokens need no mask: each token counts at most once, so a budget of 100 with 40 used leaves 60 tokens that can be
sampled before they are known (`free`). After the reasoning, all tokens are free.
"""

from collections.abc import Callable
from copy import copy
from typing import Any, Final, Generic, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from engine.api.messages import Thinking

ALL: Final = 1 << 62  # more tokens than any reply has
_SPACE = b" \t\n\r"
_WORD_BITS = 32


class GrammarMatcher(Protocol):
    """The matcher of a grammar."""

    @property
    def finished(self) -> bool: ...

    def mask(self) -> NDArray[np.uint32]: ...

    def advance(self, token: int) -> None: ...

    def fork(self) -> Any: ...

    def forced(self) -> tuple[int, ...]: ...


MatcherT = TypeVar("MatcherT", bound=GrammarMatcher)


class Budget(Generic[MatcherT]):
    """Reasoning state of one sequence. bytes_of: returns the bytes of a token. vocab: number of the model's logits.
    inner: a grammar to enforce as well; it has precedence if it does not allow the end marker."""

    def __init__(
        self, limit: Thinking, bytes_of: Callable[[int], bytes], vocab: int, inner: MatcherT | None = None
    ) -> None:
        self._limit, self._bytes_of, self._vocab, self.inner = limit, bytes_of, vocab, inner
        self._starts = [start.strip().encode() for start in limit.starts]
        self._ends = [end.encode() for end in limit.ends]
        self._keep = max(map(len, [*self._ends, *self._starts]), default=1) - 1
        self._state: Literal["before", "inside", "after"] = "inside" if limit.begun else "before"
        self._may_start = limit.begun and not limit.open  # the reply may still contain the start marker, uncounted
        self._text = b""  # end of the current section, as long as a marker
        self._seen = 0  # tokens
        self._count = 0  # reasoning tokens
        self._closing = 0  # number of the latest tokens that match the beginning of `close`

    @property
    def finished(self) -> bool:
        return self.inner is not None and self.inner.finished

    @property
    def free(self) -> int:
        """Number of first reply tokens that need no mask, whatever the pending tokens turn out to be."""
        if self.inner is not None:
            return 0
        if self._state == "after":
            return ALL
        if self._state == "before":  # reasoning may begin with the next token
            return self._seen + 1 + self._limit.budget
        return self._seen + max(0, self._limit.budget - self._count)

    def fork(self) -> "Budget[MatcherT]":
        """Return an independent copy."""
        copied = copy(self)
        copied.inner = None if self.inner is None else self.inner.fork()
        return copied

    def forced(self) -> tuple[int, ...]:
        """Return the next tokens that are determined: the rest of the end marker, or text that the grammar forces."""
        if self.forced_token() is not None:
            return self._limit.close[self._closing :]
        return () if self.inner is None else self.inner.forced()

    def forced_token(self) -> int | None:
        """Return the token that must come next, if it is forced."""
        if self._state != "inside" or self._count < self._limit.budget:
            return None
        return self._limit.close[self._closing]

    def mask(self) -> NDArray[np.uint32] | None:
        return self.limited(None if self.inner is None else self.inner.mask())

    def limited(self, inner: NDArray[np.uint32] | None) -> NDArray[np.uint32] | None:
        """Combine with the grammar's mask. Returns None if all tokens are allowed."""
        token = self.forced_token()
        if token is None or token >= self._vocab:
            return inner
        if inner is not None and not inner[token // _WORD_BITS] >> np.uint32(token % _WORD_BITS) & 1:
            return inner
        mask = np.zeros(-(-self._vocab // _WORD_BITS), np.uint32)
        mask[token // _WORD_BITS] = np.uint32(1 << token % _WORD_BITS)
        return mask

    def advance(self, token: int) -> None:
        if self.inner is not None:
            self.inner.advance(token)
        self._seen += 1
        if self._state == "before":
            self._look_for_start(token)
        elif self._state == "inside":
            self._think(token)

    def _look_for_start(self, token: int) -> None:
        self._text += self._bytes_of(token)
        if self._limit.again:
            if any(start in self._text for start in self._starts):
                self._enter()
            else:
                self._text = self._text[-self._keep :] if self._keep else b""
            return
        bare = self._text.lstrip(_SPACE)
        if any(bare.startswith(start) for start in self._starts):
            self._enter()
        elif not any(start.startswith(bare) for start in self._starts):
            self._state = "after"

    def _enter(self) -> None:
        self._state, self._text, self._count, self._closing = "inside", b"", 0, 0

    def _think(self, token: int) -> None:
        self._may_start = self._may_start and self.forced_token() != token
        self._text += self._bytes_of(token)
        if self._may_start:
            bare = self._text.lstrip(_SPACE)
            if any(bare.startswith(start) for start in self._starts):
                self._may_start = False
                self._enter()
                return
            if any(start.startswith(bare) for start in self._starts):
                return
            self._may_start = False
        self._count += 1
        close = self._limit.close
        self._closing = self._closing + 1 if close[self._closing] == token else int(close[0] == token)
        if self._closing == len(close) or any(end in self._text for end in self._ends):
            self._state, self._text = ("before" if self._limit.again else "after"), b""
        else:
            self._text = self._text[-self._keep :] if self._keep else b""
