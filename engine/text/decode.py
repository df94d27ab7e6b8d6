"""Incremental detokenization without broken characters, by an incremental UTF-8 decoder of the tokens' bytes.

The concatenated texts of all pushes equal decode(prompt + output) without decode(prompt). Invalid bytes give one U+FFFD
per maximal invalid subsequence (the practice of Unicode 3.9, Rust and Python). An incomplete character at the end of
the
output gives nothing. The cost is linear in the number of bytes.
"""

import codecs
from collections.abc import Iterable, Sequence

from engine.text.tokenizer import Tokenizer

_CONTEXT_TOKENS = 4  # a character has at most 4 bytes, so at most 3 tokens precede its last one; one spare


class IncrementalDecoder:
    """Text of one reply. `prompt_ids` determine whether the first space is kept. `shown_ids`: special tokens that stay
    visible when special tokens are skipped, such as the markers of an output format."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        shown_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._pieces = tokenizer.vocabulary
        self._hidden = tokenizer.special_ids - shown_ids if skip_special_tokens else frozenset[int]()
        self._rest = b""  # of an incomplete character
        self._strip = self._pieces.strip
        self._prime(prompt_ids)

    def _prime(self, prompt_ids: Sequence[int]) -> None:
        """Start with the incomplete character at the prompt's end, and determine whether a leading space has to be
        stripped."""
        if self._strip and any(self._pieces.bytes_of(token) for token in prompt_ids if token not in self._hidden):
            self._strip = 0
        tail: list[bytes] = []
        for token in reversed(prompt_ids):
            if token not in self._hidden and (piece := self._pieces.bytes_of(token)):
                tail.append(piece)
                if len(tail) == _CONTEXT_TOKENS:
                    break
        self._rest = _decoded(b"".join(reversed(tail)))[1]

    def push(self, token: int) -> str:
        """Return the text that this token completes; "" for an incomplete character or a hidden token."""
        if token in self._hidden:
            return ""
        text, self._rest = _decoded(self._rest + self._pieces.bytes_of(token))
        while self._strip and text:
            if text[0] != self._pieces.strip_character:
                self._strip = 0
                break
            text, self._strip = text[1:], self._strip - 1
        return text


def _decoded(data: bytes) -> tuple[str, bytes]:
    """Return the text of some bytes, and the bytes of an incomplete character at the end."""
    text, used = codecs.utf_8_decode(data, "replace", False)
    rest = data[used:]
    if rest[:1] == b"\xed" and rest[1:] >= b"\xa0":  # half of a surrogate, which Python's decoder does not finish
        return text + "\ufffd" * len(rest), b""
    return text, rest


class TokenText:
    """Strings of single tokens for logprobs. A fragment of a character is completed with up to four preceding tokens;
    if
    it is still incomplete, its string is "". No string contains U+FFFD, and strings of valid text concatenate to it."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = ()) -> None:
        self._pieces = tokenizer.vocabulary
        self._fragments: list[bytes] = []
        for token in prompt_ids[-_CONTEXT_TOKENS:]:
            self.push(token)

    def string(self, token: int) -> str:
        """Return the string of a possible next token."""
        text = self._completed(self._pieces.bytes_of(token))
        return "" if text is None else text

    def push(self, token: int) -> str:
        """Add the next token and return its string."""
        piece = self._pieces.bytes_of(token)
        text = self._completed(piece)
        self._fragments = [*self._fragments, piece][-_CONTEXT_TOKENS:] if text is None else []
        return "" if text is None else text

    def _completed(self, piece: bytes) -> str | None:
        text = _strict(piece)
        for first in range(len(self._fragments) - 1, -1, -1):
            if text is not None:
                break
            text = _strict(b"".join(self._fragments[first:]) + piece)
        return text


def _strict(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def decode_all(decoder: IncrementalDecoder, ids: Iterable[int]) -> str:
    """Return the text of several tokens."""
    return "".join(map(decoder.push, ids))
