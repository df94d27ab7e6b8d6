"""Base of tokenizers that consist of a vocabulary and a splitting algorithm, with added, begin and end tokens.

SentencePiece and tiktoken lack the latter, which come from Hugging Face's configuration files.
"""

from abc import ABC, abstractmethod
from functools import cached_property

from engine.text.added import Added, AddedTokens
from engine.text.backend import Side, divide_room, truncate
from engine.text.vocabulary import Vocabulary


class PlainTokenizer(ABC):
    """Adds the optional tokens `begin` and `end` to every text."""

    def __init__(self, added: list[Added], begin: int | None, end: int | None) -> None:
        self._added = AddedTokens(added)
        self._begin = [] if begin is None else [begin]
        self._end = [] if end is None else [end]

    # Implemented for each library

    @abstractmethod
    def tokenize(self, text: str, *, first: bool) -> list[int]:
        """Return the ids of a text without added tokens. `first`: it begins the entire text."""

    @abstractmethod
    def base_names(self) -> dict[str, int]:
        """Return the library's own vocabulary, in its spelling."""

    @abstractmethod
    def base_pieces(self) -> list[bytes]:
        """Return the bytes of each of the library's tokens, by id."""

    def bare(self, text: str) -> list[int]:
        """Return the ids of a text that continues another one, without anything prepended."""
        return self.tokenize(text, first=False)

    strip = 0  # maximum number of spaces that decoding removes at a text's start
    base_special: frozenset[int] = frozenset()
    bounded = True  # every character is in a token with its text

    # Encoding and decoding

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = []
        for at, part in enumerate(self._added.split(text)):
            ids += [part] if isinstance(part, int) else self.tokenize(part, first=at == 0)
        return ids

    def encode(self, text: str, *, special: bool) -> list[int]:
        ids = self._ids(text)
        return [*self._begin, *ids, *self._end] if special else ids

    def encode_within(self, text: str, limit: int, *, side: Side, special: bool) -> list[int]:
        if not special:
            return truncate(self._ids(text), limit, side)
        room = max(0, limit - len(self._begin) - len(self._end))
        return [*self._begin, *truncate(self._ids(text), room, side), *self._end]

    def encode_pair(
        self, first: str, second: str, *, limit: int | None, most: tuple[int | None, int | None], side: Side
    ) -> tuple[list[int], list[int]]:
        pair = [truncate(self._ids(text), count, side) for text, count in zip((first, second), most, strict=True)]
        if limit is not None:
            room = max(0, limit - 2 * len(self._begin) - 2 * len(self._end))
            lengths = divide_room([len(ids) for ids in pair], room)
            pair = [truncate(ids, count, side) for ids, count in zip(pair, lengths, strict=True)]
        one, other = ([*self._begin, *ids, *self._end] for ids in pair)
        return one + other, [0] * len(one) + [1] * len(other)

    def decode(self, ids: list[int], *, skip_special: bool) -> str:
        pieces, hidden = self.vocabulary(), self.special_ids if skip_special else frozenset[int]()
        text = b"".join(pieces.bytes_of(token) for token in ids if token not in hidden).decode("utf-8", "replace")
        start = len(text) - len(text.lstrip(pieces.strip_character))
        return text[min(start, pieces.strip) :]

    @cached_property
    def names(self) -> dict[str, int]:
        return self.base_names() | {token.text: token.id for token in self.added}

    @cached_property
    def _texts(self) -> dict[int, str]:
        return {token: text for text, token in self.names.items()}

    def id_of(self, text: str) -> int | None:
        return self.names.get(text)

    def text_of(self, token: int) -> str | None:
        return self._texts.get(token)

    @property
    def added(self) -> list[Added]:
        return list(self._added.tokens.values())

    @cached_property
    def special_ids(self) -> frozenset[int]:
        return self.base_special | {token.id for token in self.added if token.special}

    @cached_property
    def longest_piece(self) -> int | None:
        return max(map(len, self.names), default=1) if self.bounded else None

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        pieces = self.base_pieces()
        for token in self.added:
            pieces += [b""] * (token.id + 1 - len(pieces))
            pieces[token.id] = token.text.encode()
        return Vocabulary(tuple(pieces), self.strip)

    def vocabulary(self) -> Vocabulary:
        return self._vocabulary
