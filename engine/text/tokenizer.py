"""A checkpoint's tokenizer: text to ids as transformers gives them, ids to text, and what each id stands for.

Reads tokenizer.json, Mistral's tekken.json, SentencePiece's tokenizer.model, a file of tiktoken's or the tokenizer
inside a GGUF file, each by its own library, with tokenizer_config.json, special_tokens_map.json, added_tokens.json and
the files of chat templates. Begin and end tokens come from the post-processor of tokenizer.json alone: transformers,
too, drops add_bos_token and add_eos_token of tokenizer_config.json where a tokenizer.json lies beside it. Files that
have no post-processor get them as that configuration says; SentencePiece's have a begin token unless it says no.
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
    """The text of a token as configurations spell it: a string, or an object with `content`."""
    return token.get("content") if isinstance(token, dict) else token


class Tokenizer:
    """The tokenizer in a checkpoint's directory, read from `file`. Raises CheckpointError naming the file that is
    missing or damaged."""

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
        """At most `limit` ids: what is too long is cut on `side`, and the special tokens stay around the rest."""
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
        """Two texts as the tokenizer joins them: ids, and the token type of each. `most` ids of either text; and of all
        at most `limit`, for which the longer one gives way until both are as long (transformers' longest_first)."""
        return self._backend.encode_pair(first, second, limit=limit, most=most, side=side)

    def encode_bytes(self, data: bytes) -> list[int]:
        """Ids whose bytes are just these: cut as in a text where that keeps them, else the longest token goes first.
        Raises ValueError where no tokens have them."""
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
        """One more than the highest id that has a token; the model's logits may be more."""
        return max(self._backend.names.values(), default=-1) + 1

    @cached_property
    def special_ids(self) -> frozenset[int]:
        return self._backend.special_ids

    @cached_property
    def longest_piece(self) -> int | None:
        """Most characters one token stands for: a text of more than n times that many has more than n tokens. None:
        any number of them."""
        return self._backend.longest_piece

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for; b"" for an id without a token."""
        return self.vocabulary.bytes_of(token)

    def token_string(self, token: int) -> str | None:
        """The vocabulary's own spelling of a token; None for an id without one."""
        return self._backend.text_of(token)

    @overload
    def convert_tokens_to_ids(self, tokens: str) -> int | None: ...
    @overload
    def convert_tokens_to_ids(self, tokens: list[str]) -> list[int | None]: ...
    def convert_tokens_to_ids(self, tokens: str | list[str]) -> int | None | list[int | None]:
        """The id of a token by its spelling (None: no such token), or a list of them for a list."""
        if isinstance(tokens, str):
            return self._backend.id_of(tokens)
        return [self._backend.id_of(token) for token in tokens]
