"""A checkpoint's tokenizer: text to ids as in transformers, ids to text, and the bytes of each id.

Reads tokenizer.json, Mistral's tekken.json, SentencePiece's tokenizer.model, T5's spiece.model, a tiktoken file or the
tokenizer in a GGUF file, each with its own library, and tokenizer_config.json, special_tokens_map.json,
added_tokens.json and chat template files. With a tokenizer.json, begin and end tokens come only from its
post-processor: transformers, too, ignores add_bos_token and add_eos_token of tokenizer_config.json then. Formats
without a post-processor use these settings; SentencePiece has a begin token by default.
"""

from functools import cached_property
from pathlib import Path
from typing import Any, overload

from engine.text.backend import Side
from engine.text.files import load_backend, read_json, tokenizer_config, tokenizer_file, tokenizer_text
from engine.text.tekken import NAMED, TEKKEN
from engine.text.templates import chat_templates, read_templates
from engine.text.vocabulary import Vocabulary

__all__ = ["Tokenizer", "chat_templates", "tokenizer_file", "tokenizer_text"]

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def _content(token: Any) -> str | None:
    """Return the text of a token in a configuration: a string, or an object with `content`."""
    return token.get("content") if isinstance(token, dict) else token


class Tokenizer:
    """The tokenizer in a checkpoint's directory, read from `file`. Raises CheckpointError with the name of a missing or
    damaged file."""

    def __init__(self, path: str | Path) -> None:
        directory = Path(path)
        config = tokenizer_config(directory)
        named = read_json(directory / "special_tokens_map.json") | config
        self.file = tokenizer_file(directory)
        self.special_tokens = {key: text for key in _NAMED if (text := _content(named.get(key)))}
        extra = named.get("additional_special_tokens") or named.get("extra_special_tokens") or []
        extra_texts = [_content(token) for token in (extra.values() if isinstance(extra, dict) else extra)]
        self._backend = load_backend(directory, config, self.special_tokens, [text for text in extra_texts if text])
        if self.file.name == TEKKEN:  # such a checkpoint has no tokenizer_config.json
            known = {key: text for key, text in NAMED.items() if self._backend.id_of(text) is not None}
            self.special_tokens = known | self.special_tokens
        self.bos_id = self._named_id("bos_token")
        self.eos_id = self._named_id("eos_token")
        self.truncation_side: Side = "left" if config.get("truncation_side") == "left" else "right"
        self.chat_template = read_templates(directory, config)

    def _named_id(self, key: str) -> int | None:
        text = self.special_tokens.get(key)
        return None if text is None else self._backend.id_of(text)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._backend.encode(text, special=add_special_tokens)

    def encode_within(
        self, text: str, limit: int, *, side: Side = "right", add_special_tokens: bool = True
    ) -> list[int]:
        """Return at most `limit` ids: longer texts are truncated on `side`, special tokens are kept."""
        return self._backend.encode_within(text, limit, side=side, special=add_special_tokens)

    def encode_pair(
        self,
        first: str,
        second: str,
        *,
        limit: int | None = None,
        most: tuple[int | None, int | None] = (None, None),
        side: Side = "right",
    ) -> tuple[list[int], list[int]]:
        """Return two joined texts: ids, and the token type of each. most: maximum ids of each text. limit: maximum of
        both together, for which the longer one is truncated first (transformers' longest_first)."""
        return self._backend.encode_pair(first, second, limit=limit, most=most, side=side)

    def encode_bytes(self, data: bytes) -> list[int]:
        """Return ids with exactly these bytes: tokenized as text if that preserves the bytes, else greedily by the
        longest token. Raises ValueError if no tokens have these bytes."""
        try:
            ids = self._backend.bare(data.decode())
        except UnicodeDecodeError:
            ids = []
        return ids if b"".join(map(self.token_bytes, ids)) == data else self._longest_first(data)

    def _longest_first(self, data: bytes) -> list[int]:
        ids, at = [], 0
        while at < len(data):
            ends = range(min(len(data), at + self._longest), at, -1)
            end = next((end for end in ends if data[at:end] in self._of_bytes), None)
            if end is None:
                raise ValueError(f"no token has the byte {data[at]:#04x}")
            ids.append(self._of_bytes[data[at:end]])
            at = end
        return ids

    @cached_property
    def _of_bytes(self) -> dict[bytes, int]:
        pieces = enumerate(self.vocabulary.pieces)
        return {piece: token for token, piece in pieces if piece and token not in self.special_ids}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._of_bytes), default=0)

    def decode(self, ids: list[int] | tuple[int, ...], *, skip_special_tokens: bool = True) -> str:
        return self._backend.decode(list(ids), skip_special=skip_special_tokens)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return self._backend.vocabulary()

    @cached_property
    def vocab_size(self) -> int:
        """The highest id with a token plus one; the model may have more logits."""
        return max(self._backend.names.values(), default=-1) + 1

    @cached_property
    def special_ids(self) -> frozenset[int]:
        return self._backend.special_ids

    @cached_property
    def longest_piece(self) -> int | None:
        """Maximum characters per token: a text of more than n times as many has more than n tokens. None if it is
        unlimited."""
        return self._backend.longest_piece

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token; b"" for an id without a token."""
        return self.vocabulary.bytes_of(token)

    def token_string(self, token: int) -> str | None:
        """Return the vocabulary's spelling of a token; None for an id without a token."""
        return self._backend.text_of(token)

    @overload
    def convert_tokens_to_ids(self, tokens: str) -> int | None: ...
    @overload
    def convert_tokens_to_ids(self, tokens: list[str]) -> list[int | None]: ...
    def convert_tokens_to_ids(self, tokens: str | list[str]) -> int | None | list[int | None]:
        """Return the id of a token by its spelling (None if it does not exist), or a list of ids for a list."""
        if isinstance(tokens, str):
            return self._backend.id_of(tokens)
        return [self._backend.id_of(token) for token in tokens]
