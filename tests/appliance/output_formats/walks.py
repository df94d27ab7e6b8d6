"""Random replies accepted by a grammar, drawn through llguidance's masks over a small vocabulary."""

import random
from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from appliance.output_formats.declaration import OutputFormat, pieces
from engine.api.messages import Grammar
from engine.structured.definition import definition

_CLOSERS = frozenset(b"\"'}])>,:/\n")
_PLAIN = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789 .{[<")


class Vocabulary:
    """Single bytes, an end, and the texts of a format: each of its markers is one token, a special one if `special`.
    If tags contain the names of `fields`, their closing tags are tokens too."""

    bos_token_id, unk_token_id = None, None

    def __init__(self, form: OutputFormat, special: bool, fields: Sequence[str] = ()) -> None:
        texts = [text.strip() for text in form.markers()]
        closing = next((text for text in texts if text.endswith("</")), None)
        if closing is not None:
            texts += [f"{'</' if special else closing}{name}>" for name in fields]
        marks = [part for text in texts for part, marked in pieces(text) if marked]
        self.marks = list(dict.fromkeys(marks))
        first_word = 256 + len(self.marks)
        # In a vocabulary with special tokens, texts that contain one are not tokens.
        words = [text for text in dict.fromkeys(texts) if len(text) > 3 and text not in self.marks]
        words = [text for text in words if not special or not any(marked for _, marked in pieces(text))]
        closing = [f"\n{text}" for text in [*words, *self.marks] if text.startswith("</")]
        self.marks += [*words, *(text for text in closing if not special or text[1:] in words)]
        self.tokens = [bytes([byte]) for byte in range(256)] + [mark.encode() for mark in self.marks] + [b"<eos>"]
        self.eos_token_id = len(self.tokens) - 1
        self.special_token_ids = [*(range(256, first_word) if special else ()), self.eos_token_id]
        self._special = self.marks[: first_word - 256] if special else []

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)

    def special_id(self, marker: str) -> int | None:
        return 256 + self.marks.index(marker) if marker in self._special else None


def matcher_of(vocabulary: Vocabulary, grammar: Grammar) -> LLMatcher:
    matcher = LLMatcher(LLTokenizer(TokenizerWrapper(vocabulary)), definition(grammar))
    assert not matcher.get_error(), matcher.get_error()
    return matcher


def walk(vocabulary: Vocabulary, matcher: LLMatcher, chance: random.Random, most: int = 4000) -> str:
    """Generate one reply. Free text ends eventually: tokens that may close it are drawn more often the longer it is."""
    matcher.reset()
    found = bytearray()
    size = len(vocabulary.tokens)
    words = np.zeros(-(-size // 32), np.uint32)
    for step in range(most):
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:size]
        allowed = np.flatnonzero(bits).tolist()
        if vocabulary.eos_token_id in allowed:
            allowed.remove(vocabulary.eos_token_id)
            if not allowed or chance.random() < 0.5:
                return found.decode()
        assert allowed, f"no way on behind {bytes(found)!r}"
        marks = [token for token in allowed if token >= 256]
        closers = [token for token in allowed if token in _CLOSERS]
        plain = [token for token in allowed if token in _PLAIN] or [token for token in allowed if token < 256]
        if marks and (not plain or chance.random() < 0.05 + step / most):
            ending = [
                token for token in marks if b"/" in vocabulary.tokens[token] or b"end" in vocabulary.tokens[token]
            ]
            token = chance.choice(ending if ending and chance.random() < 0.7 else marks)
        elif closers and chance.random() < 0.3 + step / most:
            token = chance.choice(closers)
        else:
            token = chance.choice(plain or closers)
        assert matcher.consume_token(token)
        found += vocabulary.tokens[token]
        if matcher.is_stopped():
            return found.decode()
    raise AssertionError(f"no end within {most} tokens: {bytes(found)!r}")
