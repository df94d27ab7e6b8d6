"""A model's vocabulary as llguidance wants it: the bytes of every token, and how text is cut into tokens.

llguidance knows one set of end tokens per vocabulary and mixes them into its masks. Ours belong to a request, so the
vocabulary gets an extra end token that no model has (id `vocab`), and `grammar.Matcher` sets the real ones itself.
"""

import json
from pathlib import Path
from typing import Any

from llguidance import LLTokenizer, TokenizerWrapper

from engine.text import tokenizer_text


class _Vocabulary:
    """What TokenizerWrapper asks for. Calling it cuts forced text into tokens the way the tokenizer does."""

    bos_token_id = None

    def __init__(self, source: Any, texts: dict[int, str], vocab: int) -> None:
        """`texts` are the added tokens that are text, whatever they look like: llguidance takes every `<…>` for
        special, but a model's `<tool_call>` may be an ordinary token."""
        known = min(source.vocab_size, vocab)
        self.tokens = [
            texts[token].encode() if token in texts else source.decode_bytes([token]) for token in range(known)
        ]
        # ids that the model has and the tokenizer does not: no text, so never allowed
        self.tokens += [b""] * (vocab - known) + [b"<end of text>"]
        special = (token for token in range(known) if token not in texts and source.is_special_token(token))
        self.special_token_ids = [*special, vocab]
        self.eos_token_id = vocab
        self._source = source

    def __call__(self, text: bytes) -> list[int]:
        return list(self._source.tokenize_bytes(text))


def read_vocabulary(directory: Path, vocab: int) -> Any:
    """The LLTokenizer of `directory`'s tokenizer with `vocab` + 1 tokens. Raises CheckpointError or ValueError."""
    text = tokenizer_text(directory)
    source = LLTokenizer(text, slices=[])
    added = json.loads(text).get("added_tokens") or ()
    texts = {token["id"]: token["content"] for token in added if not token.get("special")}
    return LLTokenizer(TokenizerWrapper(_Vocabulary(source, texts, vocab)), n_vocab=vocab + 1, eos_token=vocab)
