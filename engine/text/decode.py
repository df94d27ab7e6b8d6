"""Ids to text one by one, never a broken character: bytes of tokens through an incremental UTF-8 decoder.

The texts of all pushes together are decode(prompt + output) without decode(prompt). Bytes that cannot become a
character give one U+FFFD per longest wrong run (the practice of Unicode 3.9 and of Rust and Python); a character that
the output leaves unfinished at its end gives nothing. Cost is linear in the bytes.
"""

import codecs
from collections.abc import Iterable, Sequence

from engine.text.tokenizer import Tokenizer

_CONTEXT_TOKENS = 4  # a character has at most 4 bytes, so at most 3 tokens before its last one; one spare


class IncrementalDecoder:
    """Text of one reply. `prompt_ids` decide whether the first space is kept. `shown_ids` are special tokens that stay
    visible although special tokens are skipped: the markers of an output format."""

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
        self._rest = b""  # of a character that is not whole
        self._strip = self._pieces.strip
        self._prime(prompt_ids)

    def _prime(self, prompt_ids: Sequence[int]) -> None:
        """Takes over the unfinished character at the prompt's end, and whether a leading space is still to be
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
        """The text that this token completes; "" while a character is unfinished or for a hidden token."""
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
    """The text of some bytes, and what may yet become a character."""
    text, used = codecs.utf_8_decode(data, "replace", False)
    rest = data[used:]
    if rest[:1] == b"\xed" and rest[1:] >= b"\xa0":  # half of a surrogate, for which Python's decoder waits
        return text + "\ufffd" * len(rest), b""
    return text, rest


class TokenText:
    """Strings of single tokens for logprobs. A fragment of a character is completed with up to four tokens before it;
    one that is still incomplete is "". So no string has U+FFFD, and strings of valid text concatenate to it."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = ()) -> None:
        self._pieces = tokenizer.vocabulary
        self._fragments: list[bytes] = []
        for token in prompt_ids[-_CONTEXT_TOKENS:]:
            self.push(token)

    def string(self, token: int) -> str:
        """The string of a token that would come next."""
        text = self._completed(self._pieces.bytes_of(token))
        return "" if text is None else text

    def push(self, token: int) -> str:
        """The string of the token that came next."""
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
    """The text of several tokens at once."""
    return "".join(map(decoder.push, ids))
