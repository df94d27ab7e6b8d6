"""Incremental detokenization against one-shot decoding by transformers of the same ids."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from engine.text import IncrementalDecoder, Tokenizer, TokenText, decode_all
from tests.tiers import examples

TEXTS = {
    "emoji": "🎉 party 🎉🎉",
    "zwj": "family 👩‍👩‍👧‍👦 and flag 🏳️‍🌈",
    "cjk": "中文和日本語の文字、한국어",
    "devanagari": "हिन्दी में क्षत्रिय",
    "code": "def f(x):\n    return x\t# ünïcode\n",
    "separators": "a\u0085b\u2028c\u2029d",
}
KINDS = ["byte_level", "byte_fallback", "metaspace"]


def pieces(tokenizer: Tokenizer, prompt: list[int], output: list[int], skip: bool = True) -> list[str]:
    decoder = IncrementalDecoder(tokenizer, prompt, skip_special_tokens=skip)
    return [decoder.push(token) for token in output]


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_streamed_text_is_the_full_text_and_never_a_broken_character(
    tokenizer_dirs: dict[str, Path], kind: str, text: str
) -> None:
    """DT-01 DT-03: emoji, joined sequences, CJK and Devanagari, by byte-level and byte-fallback tokenizers."""
    tokenizer = Tokenizer(tokenizer_dirs[kind])
    ids = tokenizer.encode(text, add_special_tokens=False)
    deltas = pieces(tokenizer, [], ids)
    assert "".join(deltas) == text
    assert all("\ufffd" not in delta for delta in deltas)


def test_the_tokenizers_really_cut_characters(tokenizer_dirs: dict[str, Path]) -> None:
    for kind in ("byte_level", "byte_fallback"):
        tokenizer = Tokenizer(tokenizer_dirs[kind])
        assert len(tokenizer.encode("👨🏽‍🚀", add_special_tokens=False)) > 5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip", [True, False])
def test_output_text_is_the_whole_decoded_less_the_prompt_at_every_cut(
    tokenizer_dirs: dict[str, Path], kind: str, skip: bool
) -> None:
    """DT-04: the first space is kept or dropped as in one-shot decoding."""
    tokenizer, oracle = Tokenizer(tokenizer_dirs[kind]), AutoTokenizer.from_pretrained(tokenizer_dirs[kind])
    ids = tokenizer.encode("The quick brown fox, isn't it?  lazy dog")
    for cut in range(len(ids) + 1):
        whole, start = oracle.decode(ids, skip_special_tokens=skip), oracle.decode(ids[:cut], skip_special_tokens=skip)
        assert "".join(pieces(tokenizer, ids[:cut], ids[cut:], skip)) == whole[len(start) :]


def test_special_tokens_are_hidden_shown_or_shown_one_by_one(tokenizer_dirs: dict[str, Path]) -> None:
    tokenizer = Tokenizer(tokenizer_dirs["byte_level"])
    ids = tokenizer.encode("a<|im_start|>b<|im_end|>")
    assert decode_all(IncrementalDecoder(tokenizer), ids) == "ab"
    assert decode_all(IncrementalDecoder(tokenizer, skip_special_tokens=False), ids) == "a<|im_start|>b<|im_end|>"
    assert decode_all(IncrementalDecoder(tokenizer, shown_ids=frozenset({ids[1]})), ids) == "a<|im_start|>b"


@settings(max_examples=examples(300), deadline=None)
@given(data=st.data())
def test_random_byte_level_tokens_decode_as_in_one_piece(tokenizer_dirs: dict[str, Path], data: st.DataObject) -> None:
    """DT-02: no exception and no repeated text for any ids, also ids that no token has."""
    tokenizer = Tokenizer(tokenizer_dirs["byte_level"])
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=12))
    streamed = "".join(pieces(tokenizer, [], ids))
    whole = tokenizer.decode(ids)
    # An unfinished character at the very end is not sent; one-shot decoding shows it as one U+FFFD.
    assert streamed in (whole, whole.removesuffix("\ufffd"))


@settings(max_examples=examples(300), deadline=None)
@given(data=st.data())
def test_random_byte_fallback_tokens_never_repeat_or_fail(tokenizer_dirs: dict[str, Path], data: st.DataObject) -> None:
    """DT-02: wrong byte runs become U+FFFD, all else equals python's own decoding of the bytes."""
    tokenizer = Tokenizer(tokenizer_dirs["byte_fallback"])
    ids = data.draw(st.lists(st.integers(3, tokenizer.vocab_size - 1), max_size=12))
    expected = b"".join(map(tokenizer.token_bytes, ids)).decode(errors="replace").removeprefix(" ")
    streamed = "".join(pieces(tokenizer, [], ids))
    assert streamed in (expected, expected.removesuffix("\ufffd"))


@pytest.mark.parametrize(
    "data", [b"\xed\xa0", b"\xed\xbf", b"a\xed\xa0\x80", b"\xed\xa0\xc3\xa9", b"\xed\x9f\xbf", b"\xed\xed\xa0"]
)
def test_halves_of_surrogates_are_no_characters(tokenizer_dirs: dict[str, Path], data: bytes) -> None:
    """Python's incremental decoder waits for their end, and would show nothing of a reply that ends there."""
    tokenizer = Tokenizer(tokenizer_dirs["byte_fallback"])
    ids = [next(id for id in range(3, 259) if tokenizer.token_bytes(id) == bytes([byte])) for byte in data]
    assert "".join(pieces(tokenizer, [], ids)) == data.decode(errors="replace")
    for cut in range(len(ids) + 1):  # text that the prompt already shows is not repeated
        parts = [*pieces(tokenizer, [], ids[:cut]), *pieces(tokenizer, ids[:cut], ids[cut:])]
        assert "".join(parts) == data.decode(errors="replace")


def test_a_character_begun_by_the_prompt_is_completed_by_the_output(tokenizer_dirs: dict[str, Path]) -> None:
    tokenizer = Tokenizer(tokenizer_dirs["byte_level"])
    ids = tokenizer.encode("👨🏽‍🚀", add_special_tokens=False)
    assert "".join(pieces(tokenizer, ids[:1], ids[1:])) == "👨🏽‍🚀"


@pytest.mark.parametrize("kind", KINDS)
def test_token_strings_have_no_broken_character_and_concatenate_to_the_text(
    tokenizer_dirs: dict[str, Path], kind: str
) -> None:
    tokenizer = Tokenizer(tokenizer_dirs[kind])
    text = "ab" if kind == "metaspace" else "a 中文 🎉 हिन्दी b"
    ids = tokenizer.encode(text, add_special_tokens=False)
    strings = TokenText(tokenizer)
    taken = [strings.push(token) for token in ids]
    assert "".join(taken).removeprefix(" ") == text
    assert not any("\ufffd" in string for string in taken)


def test_a_fragment_is_empty_until_the_character_is_whole_and_other_candidates_are_unharmed(
    tokenizer_dirs: dict[str, Path],
) -> None:
    tokenizer = Tokenizer(tokenizer_dirs["byte_fallback"])
    first, second, third = (tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "€".encode())
    letter = tokenizer.convert_tokens_to_ids("a")
    assert first is not None and second is not None and third is not None and letter is not None
    strings = TokenText(tokenizer)
    assert [strings.push(letter), strings.push(first), strings.push(second)] == ["a", "", ""]
    assert (strings.string(third), strings.string(letter), strings.string(first)) == ("€", "a", "")
    assert TokenText(tokenizer, [letter, first, second]).push(third) == "€"
    assert TokenText(tokenizer, [first, second, letter]).push(third) == ""
