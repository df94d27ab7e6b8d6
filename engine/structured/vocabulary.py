"""A model's vocabulary in llguidance's form: the bytes of every token.

These are the bytes used to decode replies (engine/text), so the text that a mask allows is the text that is sent.
llguidance has one set of end tokens per vocabulary and includes them in its masks. Here end tokens belong to a request,
so the vocabulary gets an extra end token that no model has (id `vocab`), and `grammar.Matcher` sets the real ones.
"""

from pathlib import Path
from typing import Any, Final

from llguidance import LLTokenizer, TokenizerWrapper

from engine.text import Tokenizer

# Character classes whose tokens are precomputed: where a language accepts any such text, they are set at once. They are
# added to llguidance's own for JSON strings: a mask of [A-Za-z ]{10,500} takes a fifth of the time.
LETTERS: Final = ("[a-z]{1,30}", "[A-Za-z]{1,30}", "[A-Za-z ]{1,30}")


class _Vocabulary:
    """Interface for TokenizerWrapper. Special tokens have names and are never text."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        special = tokenizer.special_ids
        self.tokens = [
            (tokenizer.token_string(token) or "").encode() if token in special else tokenizer.token_bytes(token)
            for token in range(vocab)  # ids without a token have no text, so they are never allowed
        ]
        self.tokens.append(b"<end of text>")
        self.special_token_ids = [*(token for token in special if token < vocab), vocab]
        self.eos_token_id = vocab

    def __call__(self, text: bytes) -> list[int]:
        """Return nothing. It is called only to test that bytes are accepted, because forced text is not tokenized."""
        return []


def read_vocabulary(directory: Path, vocab: int) -> Any:
    """Return the LLTokenizer for `directory` with `vocab` + 1 tokens. Raises CheckpointError or ValueError."""
    made = _Vocabulary(Tokenizer(directory), vocab)
    slices = [*LETTERS, *LLTokenizer.general_slices()]
    return LLTokenizer(TokenizerWrapper(made), n_vocab=vocab + 1, eos_token=vocab, slices=slices)
