"""A model's vocabulary as llguidance wants it: the bytes of every token, and how text is cut into tokens.

llguidance knows one set of end tokens per vocabulary and mixes them into its masks. Ours belong to a request, so the
vocabulary gets an extra end token that no model has (id `vocab`), and `grammar.Matcher` sets the real ones itself.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llguidance import LLTokenizer, TokenizerWrapper

from engine.text import Tokenizer, tokenizer_text

Cut = Callable[[bytes], list[int]]


@dataclass(frozen=True)
class _Source:
    """A tokenizer of any format: bytes by id, which ids are no text, and how forced text is cut."""

    pieces: list[bytes]
    special: list[int]
    cut: Cut


class _Vocabulary:
    """What TokenizerWrapper asks for. Calling it cuts forced text into tokens the way the tokenizer does."""

    bos_token_id = None

    def __init__(self, source: _Source, vocab: int) -> None:
        pieces = source.pieces[:vocab]
        # ids that the model has and the tokenizer does not: no text, so never allowed
        self.tokens = [*pieces, *[b""] * (vocab - len(pieces)), b"<end of text>"]
        self.special_token_ids = [*(token for token in source.special if token < vocab), vocab]
        self.eos_token_id = vocab
        self._cut = source.cut

    def __call__(self, text: bytes) -> list[int]:
        return self._cut(text)


def _described(text: str, vocab: int) -> _Source:
    """Of a tokenizer.json, which llguidance reads itself. Added tokens that are text stay text, whatever they look
    like: llguidance takes every `<…>` for special, but a model's `<tool_call>` may be an ordinary token."""
    library = LLTokenizer(text, slices=[])
    added = json.loads(text).get("added_tokens") or ()
    texts = {token["id"]: token["content"] for token in added if not token.get("special")}
    known = range(min(library.vocab_size, vocab))
    pieces = [texts[token].encode() if token in texts else library.decode_bytes([token]) for token in known]
    special = [token for token in known if token not in texts and library.is_special_token(token)]
    return _Source(pieces, special, lambda forced: list(library.tokenize_bytes(forced)))


def _read(directory: Path) -> _Source:
    """Of SentencePiece's and tiktoken's files. Bytes that no tokens have are not cut: llguidance then forces less."""
    tokenizer = Tokenizer(directory)

    def cut(forced: bytes) -> list[int]:
        try:
            return tokenizer.encode_bytes(forced)
        except ValueError:
            return []

    return _Source(list(tokenizer.vocabulary.pieces), sorted(tokenizer.special_ids), cut)


def read_vocabulary(directory: Path, vocab: int) -> Any:
    """The LLTokenizer of `directory`'s tokenizer with `vocab` + 1 tokens. Raises CheckpointError or ValueError."""
    text = tokenizer_text(directory)
    source = _read(directory) if text is None else _described(text, vocab)
    return LLTokenizer(TokenizerWrapper(_Vocabulary(source, vocab)), n_vocab=vocab + 1, eos_token=vocab)
