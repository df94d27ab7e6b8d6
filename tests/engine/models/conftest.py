"""Tokenizers of every kind, as the tests of texts make them."""

from tests.engine.text.conftest import plain_dirs, tokenizer_dirs

__all__ = ["plain_dirs", "tokenizer_dirs"]
