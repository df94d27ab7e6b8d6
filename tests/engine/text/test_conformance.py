"""Every public method and property of a tokenizer, on every kind of tokenizer file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.text import Tokenizer

GOLDEN = Path(__file__).parent / "golden"
KINDS = ["byte_level", "byte_level_bos", "byte_fallback", "byte_fallback_eos", "metaspace", "late_tokens", "tekken"]
PLAIN = ["pieces", "pieces_legacy", "pieces_unigram", "ranks", "ranks_bos", "qwen"]
TEXT = "The quick brown fox"


@pytest.fixture(params=KINDS + PLAIN)
def tokenizer(
    request: pytest.FixtureRequest, tokenizer_dirs: dict[str, Path], plain_dirs: dict[str, Path]
) -> Tokenizer:
    return Tokenizer({**tokenizer_dirs, **plain_dirs, "tekken": GOLDEN}[request.param])


def encode(t: Tokenizer) -> bool:
    ids = t.encode(TEXT, add_special_tokens=False)
    return t.encode("", add_special_tokens=False) == [] and 0 < len(ids) <= len(t.encode(TEXT)) <= len(ids) + 2


def decode(t: Tokenizer) -> bool:
    ids = t.encode(TEXT)
    return t.decode(ids) == t.decode(tuple(ids)) == TEXT and t.decode([]) == ""


def convert_tokens_to_ids(t: Tokenizer) -> bool:
    names = [name for token in range(t.vocab_size) if (name := t.token_string(token)) is not None]
    single = [t.convert_tokens_to_ids(name) for name in names]
    several = t.convert_tokens_to_ids(names)
    unknown = t.convert_tokens_to_ids("no such token\0"), t.convert_tokens_to_ids(["no such token\0"])
    pairs = zip(names, single, strict=True)
    right = all(isinstance(token, int) and t.token_string(token) == name for name, token in pairs)
    return right and several == single and t.convert_tokens_to_ids([]) == [] and unknown == (None, [None])


def token_bytes(t: Tokenizer) -> bool:
    joined = b"".join(t.token_bytes(token) for token in t.encode(TEXT, add_special_tokens=False))
    return joined.decode().removeprefix(" ") == TEXT and t.token_bytes(t.vocab_size) == b"" == t.token_bytes(-1)


def token_string(t: Tokenizer) -> bool:
    return all(isinstance(t.token_string(token), str) for token in t.encode(TEXT)) and t.token_string(10**6) is None


def vocabulary(t: Tokenizer) -> bool:
    return [t.vocabulary.bytes_of(token) for token in range(t.vocab_size)] == [
        t.token_bytes(token) for token in range(t.vocab_size)
    ]


def vocab_size(t: Tokenizer) -> bool:
    return t.token_string(t.vocab_size - 1) is not None and t.token_string(t.vocab_size) is None


def special_ids(t: Tokenizer) -> bool:
    named = {t.convert_tokens_to_ids(text) for text in t.special_tokens.values()}
    return named <= t.special_ids and all(not t.decode([token]) for token in t.special_ids)


def special_tokens(t: Tokenizer) -> bool:
    texts = t.special_tokens.values()
    return all(len(t.encode(text, add_special_tokens=False)) == 1 for text in texts) and len(texts) > 0


def named(key: str) -> Callable[[Tokenizer], bool]:
    def agrees(t: Tokenizer) -> bool:
        text = t.special_tokens.get(f"{key}_token")
        return getattr(t, f"{key}_id") == (None if text is None else t.convert_tokens_to_ids(text))

    return agrees


def encode_within(t: Tokenizer) -> bool:
    whole, plain = t.encode(TEXT), t.encode(TEXT, add_special_tokens=False)
    around = len(whole) - len(plain)
    cut = {side: t.encode_within(TEXT, around + 3, side=side) for side in ("left", "right")}
    bare = {side: t.encode_within(TEXT, 3, side=side, add_special_tokens=False) for side in ("left", "right")}
    ends = all(ids[: ids.index(bare[side][0])] == whole[: whole.index(plain[0])] for side, ids in cut.items())
    kept = bare == {"left": plain[-3:], "right": plain[:3]} and all(len(ids) == around + 3 for ids in cut.values())
    return ends and kept and t.encode_within(TEXT, 1000) == whole


def encode_bytes(t: Tokenizer) -> bool:
    def joined(data: bytes) -> bool:
        ids = t.encode_bytes(data)
        return b"".join(map(t.token_bytes, ids)) == data and not t.special_ids & set(ids)

    if t.longest_piece is None:  # missing characters become the unknown token
        return joined(b"") and joined(b" ")
    return all(map(joined, (b"fox", b" The quick", b"", b"the  dog")))


def encode_pair(t: Tokenizer) -> bool:
    one, other = (t.encode(text, add_special_tokens=False) for text in (TEXT, "dog"))
    ids, types = t.encode_pair(TEXT, "dog")
    inside = [token for token in ids if token not in t.special_ids]
    cut, _ = t.encode_pair(TEXT, "dog", most=(2, 1), limit=1000)
    few, kinds = t.encode_pair(TEXT, "dog", limit=len(ids) - 2)
    right = (
        inside == one + other and types == sorted(types) and (1 not in types or types.count(0) - len(one) in (0, 1, 2))
    )
    return right and len(ids) - len(cut) == len(inside) - 3 and len(few) == len(kinds) == len(ids) - 2


def longest_piece(t: Tokenizer) -> bool:
    if t.longest_piece is None:
        return t.file.name == "tokenizer.model" or not t.encode("\u2603" * 50, add_special_tokens=False)[2:]
    return t.longest_piece == max(len(t.token_string(token) or "") for token in range(t.vocab_size))


CHECKS: dict[str, Callable[[Tokenizer], Any]] = {
    "encode": encode,
    "decode": decode,
    "convert_tokens_to_ids": convert_tokens_to_ids,
    "token_bytes": token_bytes,
    "token_string": token_string,
    "vocabulary": vocabulary,
    "vocab_size": vocab_size,
    "special_ids": special_ids,
    "special_tokens": special_tokens,
    "bos_id": named("bos"),
    "eos_id": named("eos"),
    "encode_within": encode_within,
    "encode_bytes": encode_bytes,
    "encode_pair": encode_pair,
    "longest_piece": longest_piece,
    "file": lambda t: t.file.is_file(),
    "truncation_side": lambda t: t.truncation_side == "right",
    "chat_template": lambda t: t.chat_template is None,
}


@pytest.mark.parametrize("name", CHECKS)
def test_a_tokenizer_of_every_kind_does_what_the_name_says(tokenizer: Tokenizer, name: str) -> None:
    assert CHECKS[name](tokenizer)


def test_no_public_name_is_left_out(tokenizer: Tokenizer) -> None:
    assert {name for name in dir(tokenizer) if not name.startswith("_")} == set(CHECKS)
