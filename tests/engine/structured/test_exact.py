"""Tests that masks are exact.

In every reachable state and for all kinds of vocabularies, a token is allowed exactly if some text of the language
continues with it. The reference lists the texts of the language."""

import base64
import itertools
import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from engine.api.messages import Grammar
from engine.structured.grammar import Compiler
from engine.structured.vocabulary import read_vocabulary
from engine.text import Tokenizer as Text
from engine.text import decode_all
from engine.text.decode import IncrementalDecoder

CORPUS = ["the cat said 你好 to 120 dogs 😀😀", '{"a": true, "b": [1, 2, 300]}', "ab abc 你你好 \n\n <tool_call>"] * 30
PLACES = 400  # that are looked at in each language


def trained_byte_level() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=["<|end|>"])
    made.train_from_iterator(CORPUS, trainer)
    made.add_special_tokens([AddedToken("abc", special=True)])  # a special token that looks like text
    made.add_tokens([AddedToken("<tool_call>", normalized=False), AddedToken("好😀", normalized=False)])
    return made


def unigram_with_bytes() -> Tokenizer:
    """Return a SentencePiece-style tokenizer: pieces with ▁, and bytes for all other text."""
    pieces = ["▁", "▁the", "a", "b", "ab", "cat", "1", "12", "2", "0", "true", '"', ":", "你", "▁你", "tr", "rue", "e"]
    scores = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((f"<0x{byte:02X}>", -9.0) for byte in range(256))]
    made = Tokenizer(models.Unigram([*scores, *((piece, -2.0) for piece in pieces)], unk_id=0, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    return made


def tekken() -> str:
    """Return a tekken.json: special tokens first, then the byte sequences in merge order."""
    pieces = [bytes([byte]) for byte in range(256)]
    pieces += [text.encode() for text in ("ab", "abc", "12", "true", " a", "你", "你好", '{"', '":')]
    pieces += ["😀".encode()[:2], "😀".encode()[:3], "好".encode()[1:]]
    count = 20
    return json.dumps(
        {
            "config": {
                "pattern": r"\p{L}+|\p{N}{1,3}|[^\s\p{L}\p{N}]+|\s+",
                "num_vocab_tokens": len(pieces),
                "default_vocab_size": len(pieces) + count,
                "default_num_special_tokens": count,
                "version": "v3",
            },
            "vocab": [
                {"rank": rank, "token_bytes": base64.b64encode(piece).decode(), "token_str": None}
                for rank, piece in enumerate(pieces)
            ],
        }
    )


@pytest.fixture(scope="session")
def vocabularies(
    tokenizer_directory: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    made = {name: tokenizer_directory(name) for name in ("byte level", "byte fallback")}
    for name, tokenizer in {"trained byte level": trained_byte_level(), "unigram": unigram_with_bytes()}.items():
        made[name] = tmp_path_factory.mktemp("tokenizer")
        tokenizer.save(str(made[name] / "tokenizer.json"))
    made["tekken"] = tmp_path_factory.mktemp("tokenizer")
    (made["tekken"] / "tekken.json").write_text(tekken())
    return made


VOCABULARIES = ("byte level", "byte fallback", "trained byte level", "unigram", "tekken")


def texts(parts: Iterable[str], least: int, most: int, end: str = "") -> list[str]:
    parts = list(parts)
    counts = range(least, most + 1)
    return ["".join(each) + end for count in counts for each in itertools.product(parts, repeat=count)]


NUMBERS = [*map(str, range(-12, 121)), "-0"]
CHARACTERS = ["\u4f60", "\u4f61", "é"]
LANGUAGES: dict[str, tuple[Grammar, list[str]]] = {
    "four bytes": (Grammar("regex", "(你|好|😀|ab){1,3}!"), texts(["你", "好", "😀", "ab"], 1, 3, "!")),
    "class": (Grammar("regex", "[\u4f60-\u4f61é]{1,2}"), texts(CHARACTERS, 1, 2)),
    "choice": (
        Grammar("lark", 'start: "abc" | "ab" | " the cat" | "true" | "😀" | "<tool_call>"'),
        ["abc", "ab", " the cat", "true", "😀", "<tool_call>"],
    ),
    "enum": (
        Grammar("json_schema", '{"enum": ["a", "你好", true, 120, "é"]}'),
        ['"a"', '"你好"', "true", "120", '"é"'],
    ),
    "integers": (Grammar("json_schema", '{"type": "integer", "minimum": -12, "maximum": 120}'), NUMBERS),
    "lark": (
        Grammar("lark", 'start: item (" " item){0,2}\nitem: /[ab]{1,2}/ | "12" "0"?'),
        [" ".join(each) for n in (1, 2, 3) for each in itertools.product([*texts("ab", 1, 2), "12", "120"], repeat=n)],
    ),
}


class Places:
    """All places of a language over a vocabulary, each reached by some tokens, and the oracle's masks there."""

    def __init__(self, directory: Path, language: str, extra: int) -> None:
        self.grammar, members = LANGUAGES[language]
        self.members = [member.encode() for member in members]
        self.beginnings = {member[:cut] for member in self.members for cut in range(len(member) + 1)}
        self.tokenizer = Text(directory)
        self.vocab = self.tokenizer.vocab_size + extra
        self.end = self.vocab - 1
        hidden = self.tokenizer.special_ids | {self.end}
        self.pieces = {
            token: piece
            for token in range(self.vocab)
            if token not in hidden and (piece := self.tokenizer.token_bytes(token))
        }
        self.compiler = Compiler(directory, self.vocab)

    def allowed(self, text: bytes) -> set[int]:
        found = {token for token, piece in self.pieces.items() if text + piece in self.beginnings}
        return found | {self.end} if text in self.members else found

    def walk(self) -> int:
        """Compares the masks of all places; how many there were."""
        seen, paths = {b""}, [(b"", [])]
        while paths and len(seen) < PLACES:
            text, ids = paths.pop(0)
            matcher = self.compiler.compile(self.grammar, [self.end])
            for token in ids:
                matcher.advance(token)
            expected = self.allowed(text)
            assert members(matcher.mask()) == expected, text
            for token in expected - {self.end}:
                longer = text + self.pieces[token]
                if longer not in seen:
                    seen.add(longer)
                    paths.append((longer, [*ids, token]))
        return len(seen)


def members(mask: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("language", LANGUAGES)
def test_masks_are_exact_in_every_reachable_state(
    vocabularies: dict[str, Path], vocabulary: str, language: str
) -> None:
    """SO-01, SO-03, STR-01. The logits are as wide as the tokenizer and one end token, or wider."""
    places = Places(vocabularies[vocabulary], language, extra=1 if len(language) % 2 else 40)
    assert places.walk() > 5
    places.compiler.close()


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_logits_may_be_narrower_than_the_tokenizer(vocabularies: dict[str, Path], vocabulary: str) -> None:
    for fewer in (-1, -2, -33):
        places = Places(vocabularies[vocabulary], "integers", extra=fewer)
        assert places.walk() > 5
        places.compiler.close()


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("language", LANGUAGES)
def test_uniform_random_replies_decode_to_members(
    vocabularies: dict[str, Path], vocabulary: str, language: str
) -> None:
    """SO-01: sample allowed tokens uniformly after a prompt, and decode them as the gateway does."""
    places = Places(vocabularies[vocabulary], language, extra=1)
    rng, decoded = random.Random(5), set()
    prompt = places.tokenizer.encode("cat ab")
    for _ in range(12):
        matcher, ids = places.compiler.compile(places.grammar, [places.end]), list[int]()
        while not matcher.finished:
            token = rng.choice(sorted(members(matcher.mask())))
            matcher.advance(token)
            ids += [token] * (token != places.end)
        text = decode_all(IncrementalDecoder(places.tokenizer, prompt), ids)
        assert text.encode() in places.members, text
        decoded.add(text)
    assert len(decoded) > 2
    places.compiler.close()


RUNS = [
    r"[a-z]{2,40}",
    r"[A-Za-z]{0,35}\.",
    r"[A-Za-z ]{3,33}",
    r"([a-z]{1,31} ){1,2}[A-Z]",
    r"[a-y]{1,40}",
    r"\w{1,32}!",
]


def with_words() -> Tokenizer:
    """Return a tokenizer with runs of letters of all lengths that vocabulary slices cover, and near misses."""
    made = trained_byte_level()
    words = [
        "".join("abzyQ"[(at + step) % kinds] for at in range(size))
        for size in (2, 3, 5, 9, 10, 11, 29, 30, 31, 34)
        for kinds in (2, 3, 4, 5)
        for step in (0, 1)
    ]
    more = ["ab ", " a b", "a1", "1a", "_ab", "ab_", "Ab", "aB", "AB", "ab.", "a.b", "éa", "aé", "a!", 'a"', "a\n"]
    for word in dict.fromkeys([*words, *(f" {word}" for word in words), *more]):
        made.add_tokens([AddedToken(word, normalized=False)])
    return made


@pytest.mark.parametrize("expression", RUNS)
def test_slices_of_the_vocabulary_change_no_mask(tmp_path: Path, expression: str) -> None:
    """Masks that set whole slices are those that try every token."""
    with_words().save(str(tmp_path / "tokenizer.json"))
    grammar, vocab = Grammar("regex", expression), Text(tmp_path).vocab_size
    sliced, plain = Compiler(tmp_path, vocab), Compiler(tmp_path, vocab)
    plain.__dict__["_tokenizer"] = read_vocabulary(tmp_path, vocab).with_slices([])
    rng, seen = random.Random(3), 0
    for _ in range(20):
        one, other = (compiler.compile(grammar, []) for compiler in (sliced, plain))
        while not one.finished:
            allowed = members(one.mask())
            assert allowed == members(other.mask())
            token = rng.choice(sorted(allowed))
            one.advance(token)
            other.advance(token)
            seen = max(seen, len(allowed))
    assert seen > 40, "whole slices are allowed somewhere"
    sliced.close()
    plain.close()
