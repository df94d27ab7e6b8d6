"""Words of a transcript and their times.

The alignment has a weight for each token and each position of audio (engine/worker/alignment.py). Dynamic time warping
finds the path with the largest sum of weights. A token begins at its first position in the path. Words are separated at
spaces, or in languages without spaces between characters. Punctuation is part of a neighbouring word.

Source: Whisper's reference implementation (timing.py), transformers generation_whisper.py (`_dynamic_time_warping`) and
tokenization_whisper.py (`_combine_tokens_into_words`).
"""

import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from appliance.server.speech.formats import Word

WITHOUT_SPACES = frozenset(("zh", "ja", "th", "lo", "my", "yue"))
"""Languages whose words are not separated by spaces."""
OPENING = "\"'“¡¿([{-"  # punctuation before a word
CLOSING = "\"'.。,，!！?？:：”)]}、"  # punctuation after a word
_UNKNOWN = "\ufffd"  # text of the bytes of an incomplete character

Decode = Callable[[list[int]], str]


@dataclass
class WordTokens:
    """A word, and the number of its tokens."""

    text: str
    count: int


def token_starts(alignment: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return the position at which each token begins. alignment: [tokens, positions]."""
    tokens, positions = alignment.shape
    steps = _warped(-alignment.astype(np.float64))
    starts = np.zeros(tokens, np.int64)
    token, position = tokens, positions
    while token > 0 and position > 0:
        starts[token - 1] = position - 1
        step = steps[token, position]
        token -= step != 2
        position -= step != 1
    return starts


def _warped(matrix: NDArray[np.float64]) -> NDArray[np.int8]:
    """Return the last step of the cheapest path to each cell, [tokens + 1, positions + 1]: 1 to the next token, 2 to
    the next position, 0 to both. All cells of a diagonal are computed at once: they depend on the last two
    diagonals."""
    tokens, positions = matrix.shape
    row = positions + 1
    cost = np.full((tokens + 1) * row, np.inf, np.float32)
    steps = np.full((tokens + 1) * row, 2, np.int8)
    wide = np.zeros((tokens + 1, row))
    wide[1:, 1:] = matrix
    values = wide.reshape(-1)
    cost[0] = 0
    for diagonal in range(2, tokens + row):
        first, last = max(1, diagonal - positions), min(tokens, diagonal - 1)
        # Cells (token, diagonal - token): the next one is a row further and a column back.
        begin, end = first * row + diagonal - first, last * row + diagonal - last + 1
        both, token, position = (cost[begin - back : end - back : positions] for back in (row + 1, row, 1))
        step = np.where((both < token) & (both < position), 0, np.where((token < both) & (token < position), 1, 2))
        least = np.where(step == 0, both, np.where(step == 1, token, position))
        cost[begin:end:positions] = values[begin:end:positions] + least
        steps[begin:end:positions] = step
    return steps.reshape(tokens + 1, row)


def words_of(tokens: Sequence[int], decode: Decode, language: str) -> list[WordTokens]:
    """Group the text tokens of a transcript to words."""
    pieces = list(_characters(tokens, decode))
    if language not in WITHOUT_SPACES:
        pieces = _between_spaces(pieces)
    return _with_punctuation(pieces)


def _characters(tokens: Sequence[int], decode: Decode) -> Iterator[WordTokens]:
    """Yield the shortest pieces whose text has complete characters."""
    text, at, first = decode(list(tokens)), 0, 0
    for end in range(1, len(tokens) + 1):
        piece = decode(list(tokens[first:end]))
        unknown = at + piece.index(_UNKNOWN) if _UNKNOWN in piece else -1
        # Bytes that are no character anywhere have this text in the whole transcript too.
        if unknown < 0 or unknown >= len(text) or text[unknown] == _UNKNOWN:
            yield WordTokens(piece, end - first)
            at, first = at + len(piece), end


def _between_spaces(pieces: Sequence[WordTokens]) -> list[WordTokens]:
    words: list[WordTokens] = []
    for piece in pieces:
        if not words or piece.text.startswith(" ") or piece.text.strip() in string.punctuation:
            words.append(WordTokens(piece.text, piece.count))
        else:
            words[-1].text += piece.text
            words[-1].count += piece.count
    return words


def _with_punctuation(words: Sequence[WordTokens]) -> list[WordTokens]:
    """Join punctuation with the word that it belongs to."""
    joined: list[WordTokens] = []
    for word in reversed(words):
        if joined and word.text.startswith(" ") and word.text.strip() in OPENING:
            joined[-1] = WordTokens(word.text + joined[-1].text, word.count + joined[-1].count)
        else:
            joined.append(word)
    found: list[WordTokens] = []
    for word in reversed(joined):
        if found and not found[-1].text.endswith(" ") and word.text in CLOSING:
            found[-1] = WordTokens(found[-1].text + word.text, found[-1].count + word.count)
        else:
            found.append(word)
    return found


def timed_words(words: Sequence[WordTokens], starts: Sequence[float]) -> list[Word]:
    """Return the words with their times. starts: seconds at which each token begins, and the end of the last one."""
    found: list[Word] = []
    at = 0
    for word in words:
        if text := word.text.strip():
            found.append(Word(text, starts[at], starts[at + word.count]))
        at += word.count
    return found
