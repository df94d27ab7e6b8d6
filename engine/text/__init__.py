"""Tokenization, incremental detokenization and stop strings. Does not import torch or transformers."""

from engine.text.decode import IncrementalDecoder, TokenText, decode_all
from engine.text.stop import Stopped, StopStrings
from engine.text.tokenizer import Tokenizer, tokenizer_text
from engine.text.vocabulary import Vocabulary

__all__ = [
    "IncrementalDecoder",
    "StopStrings",
    "Stopped",
    "TokenText",
    "Tokenizer",
    "Vocabulary",
    "decode_all",
    "tokenizer_text",
]
