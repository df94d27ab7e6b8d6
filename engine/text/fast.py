"""Tokenizers of the library `tokenizers`: tokenizer.json, and tekken.json converted to it."""

import json
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Encoding
from tokenizers import Tokenizer as Library

from engine.api.errors import CheckpointError
from engine.text.added import Added, check_ids
from engine.text.backend import Side, divide_room
from engine.text.vocabulary import Vocabulary, read_vocabulary

_PANICS = "pyo3_runtime"  # module of the exceptions for panics in the library, which are not subclasses of Exception
_MANY = 1024  # number of ids above which a batch call pays off, because it releases the interpreter lock


class FastTokenizer:
    """A tokenizer.json. text: its content. added: tokens that are only in the configuration. special: texts that are
    special tokens as well. Raises CheckpointError with the file's name."""

    def __init__(self, path: Path, text: str, added: list[Added], special: list[str]) -> None:
        try:
            self._library = Library.from_str(text)
        except Exception as error:  # the library raises plain Exception for every kind of damage
            raise CheckpointError(f"{path}: is not a tokenizer ({error}); copy the checkpoint again") from error
        self._library.no_truncation()
        self._library.no_padding()
        self._add(added, special)
        check_ids(path, self.names.values())

    def _add(self, added: list[Added], special: list[str]) -> None:
        for token in added:
            if self._library.token_to_id(token.text) is None:
                flags: dict[str, Any] = {"single_word": token.word, "lstrip": token.lstrip, "rstrip": token.rstrip}
                self._library.add_tokens([AddedToken(token.text, special=token.special, **flags)])
        known = {token.content for token in self._library.get_added_tokens_decoder().values() if token.special}
        self._library.add_special_tokens(
            [AddedToken(text, special=True, normalized=False) for text in special if text not in known]
        )

    def _encoding(self, text: str, *, special: bool) -> Encoding:
        """Encode a text. The library's batch calls release the interpreter lock; single calls hold it for their entire
        duration. Raises CheckpointError for a text on which a pattern of the tokenizer fails."""
        try:
            (encoded,) = self._library.encode_batch([text], add_special_tokens=special)
        except BaseException as error:
            if type(error).__module__ != _PANICS:
                raise
            raise CheckpointError(f"the model's tokenizer fails on a text: {error}") from None
        return encoded

    def encode(self, text: str, *, special: bool) -> list[int]:
        return list(self._encoding(text, special=special).ids)

    def bare(self, text: str) -> list[int]:
        return self.encode(text, special=False)

    def encode_within(self, text: str, limit: int, *, side: Side, special: bool) -> list[int]:
        encoded = self._encoding(text, special=False)
        count = self._library.num_special_tokens_to_add(False) if special else 0
        encoded.truncate(max(0, limit - count), direction=side)
        return list(self._library.post_process(encoded, None, special).ids)

    def encode_pair(
        self, first: str, second: str, *, limit: int | None, most: tuple[int | None, int | None], side: Side
    ) -> tuple[list[int], list[int]]:
        one, other = (self._encoding(text, special=False) for text in (first, second))
        for encoded, count in zip((one, other), most, strict=True):
            if count is not None:
                encoded.truncate(count, direction=side)
        if limit is not None:
            room = max(0, limit - self._library.num_special_tokens_to_add(True))
            for encoded, count in zip((one, other), divide_room([len(one.ids), len(other.ids)], room), strict=True):
                encoded.truncate(count, direction=side)
        joined = self._library.post_process(one, other, True)
        return list(joined.ids), list(joined.type_ids)

    def decode(self, ids: list[int], *, skip_special: bool) -> str:
        if len(ids) < _MANY:
            return str(self._library.decode(ids, skip_special_tokens=skip_special))
        (text,) = self._library.decode_batch([ids], skip_special_tokens=skip_special)
        return str(text)

    def id_of(self, text: str) -> int | None:
        return self._library.token_to_id(text)

    def text_of(self, token: int) -> str | None:
        return self._library.id_to_token(token)

    @property
    def names(self) -> dict[str, int]:
        return self._library.get_vocab(with_added_tokens=True)

    @property
    def added(self) -> list[Added]:
        known = self._library.get_added_tokens_decoder()
        return [Added(token, entry.content, entry.special) for token, entry in known.items()]

    @property
    def special_ids(self) -> frozenset[int]:
        return frozenset(token.id for token in self.added if token.special)

    @cached_property
    def _described(self) -> dict[str, Any]:
        described: dict[str, Any] = json.loads(self._library.to_str())
        return described

    @property
    def longest_piece(self) -> int | None:
        """Maximum characters per token; None for WordPiece, Unigram and others, whose unknown token matches any
        word."""
        if self._described["model"]["type"] != "BPE":
            return None
        return max(map(len, self.names), default=1)

    def vocabulary(self) -> Vocabulary:
        return read_vocabulary(self._library, self._described["decoder"])
