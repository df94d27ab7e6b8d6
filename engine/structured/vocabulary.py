"""A model's vocabulary as llguidance wants it: the bytes of every token, and how text is cut into tokens.

llguidance knows one set of end tokens per vocabulary and mixes them into its masks. Ours belong to a request, so the
vocabulary gets an extra end token that no model has (id `vocab`), and `grammar.Matcher` sets the real ones itself.
"""

from pathlib import Path
from typing import Any

from llguidance import LLTokenizer, TokenizerWrapper


class _Vocabulary:
    """What TokenizerWrapper asks for. Calling it cuts forced text into tokens the way the tokenizer does."""

    bos_token_id = None

    def __init__(self, source: Any, vocab: int) -> None:
        known = min(source.vocab_size, vocab)
        self.tokens = [source.decode_bytes([token]) for token in range(known)]
        # ids that the model has and the tokenizer does not: no text, so never allowed
        self.tokens += [b""] * (vocab - known) + [b"<end of text>"]
        self.special_token_ids = [*filter(source.is_special_token, range(known)), vocab]
        self.eos_token_id = vocab
        self._source = source

    def __call__(self, text: bytes) -> list[int]:
        return list(self._source.tokenize_bytes(text))


def read_vocabulary(directory: Path, vocab: int) -> Any:
    """The LLTokenizer of `directory`'s tokenizer.json with `vocab` + 1 tokens. Raises OSError or ValueError."""
    text = (directory / "tokenizer.json").read_text(encoding="utf-8")
    source = LLTokenizer(text, slices=[])
    return LLTokenizer(TokenizerWrapper(_Vocabulary(source, vocab)), n_vocab=vocab + 1, eos_token=vocab)
