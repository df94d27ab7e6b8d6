"""Byte-level BPE of about 1,300 tokens: digits apart, words cut the same way with and without a space in front.

The merges are learned with the space apart, so ` Oslo` and `Oslo` are the same pieces and copying a value from prose
into JSON copies tokens. Afterwards the most frequent pieces after a space get a merge with it (` the`), last in rank:
it never changes how the rest of a word is cut.
"""

import json
from collections import Counter
from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END, PAD, START = "<|im_end|>", "<|endoftext|>", "<|im_start|>"
SPECIAL = (PAD, START, END)
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
SPACE = "\u0120"  # a space in the byte alphabet
_APART = r"\p{L}+|\p{N}| |[^\s\p{L}\p{N}]+|\s"
_JOINED = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s"


def _splitter(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _without_markers(text: str) -> str:
    for marker in (*SPECIAL, *MARKERS):
        text = text.replace(marker, "\n")
    return text


def train_tokenizer(texts: Iterable[str], pieces: int = 900, joined: int = 350) -> Tokenizer:
    """A tokenizer of 256 bytes, up to `pieces - 256` merges in words, `joined` merges with a space, 7 added tokens."""
    corpus = [_without_markers(text) for text in texts]
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = _splitter(_APART)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=pieces, initial_alphabet=alphabet, show_progress=False)
    )
    data = json.loads(inner.to_str())
    vocabulary, merges = data["model"]["vocab"], [tuple(merge) for merge in data["model"]["merges"]]
    for piece in _most_spaced(inner, corpus, joined):
        vocabulary[SPACE + piece] = len(vocabulary)
        merges.append((SPACE, piece))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = _splitter(_JOINED)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKERS])
    return tokenizer


def _most_spaced(tokenizer: Tokenizer, corpus: list[str], count: int) -> list[str]:
    """The pieces that most often follow a space."""
    after: Counter[str] = Counter()
    for encoding in tokenizer.encode_batch(corpus):
        tokens = encoding.tokens
        after.update(
            b
            for a, b in zip(tokens, tokens[1:], strict=False)
            if a == SPACE and not b.isdigit() and b[0] not in "\u0120\u010a"
        )
    ranked = sorted(after.items(), key=lambda item: (-item[1], item[0]))
    return [piece for piece, _ in ranked[:count]]


def spell(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text byte by byte."""
    alphabet = _byte_names()
    return [tokenizer.token_to_id(alphabet[byte]) for byte in text.encode()]


def _byte_names() -> list[str]:
    """Return the byte alphabet of GPT-2: printable bytes represent themselves, other bytes code points from 256."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]
