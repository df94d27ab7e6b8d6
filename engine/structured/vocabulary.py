"""A model's vocabulary as llguidance wants it: the bytes of every token.

They are the bytes that replies are decoded by (engine/text), so a text that a mask allows is the text that is sent.
llguidance knows one set of end tokens per vocabulary and mixes them into its masks. Ours belong to a request, so the
vocabulary gets an extra end token that no model has (id `vocab`), and `grammar.Matcher` sets the real ones itself.
"""

from pathlib import Path
from typing import Any, Final

from llguidance import LLTokenizer, TokenizerWrapper

from engine.text import Tokenizer

# Where a language takes any text of such a kind, its tokens are set at once and not walked through one by one. Beside
# llguidance's own, which are for strings of JSON, letters: a mask of [A-Za-z ]{10,500} takes a fifth of the time.
LETTERS: Final = ("[a-z]{1,30}", "[A-Za-z]{1,30}", "[A-Za-z ]{1,30}")


class _Vocabulary:
    """What TokenizerWrapper asks for. Special tokens go by their names and are never text."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        special = tokenizer.special_ids
        self.tokens = [
            (tokenizer.token_string(token) or "").encode() if token in special else tokenizer.token_bytes(token)
            for token in range(vocab)  # ids that the model has and the tokenizer does not: no text, so never allowed
        ]
        self.tokens.append(b"<end of text>")
        self.special_token_ids = [*(token for token in special if token < vocab), vocab]
        self.eos_token_id = vocab

    def __call__(self, text: bytes) -> list[int]:
        """Only asked once, whether it takes bytes: nothing is forced, so nothing is cut into tokens."""
        return []


def read_vocabulary(directory: Path, vocab: int) -> Any:
    """The LLTokenizer of `directory`'s tokenizer with `vocab` + 1 tokens. Raises CheckpointError or ValueError."""
    made = _Vocabulary(Tokenizer(directory), vocab)
    slices = [*LETTERS, *LLTokenizer.general_slices()]
    return LLTokenizer(TokenizerWrapper(made), n_vocab=vocab + 1, eos_token=vocab, slices=slices)
