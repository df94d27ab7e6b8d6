"""Compare SentencePiece and tiktoken files with these libraries and transformers on all kinds of texts."""

import json
import shutil
from pathlib import Path

import pytest
import sentencepiece
import tiktoken
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.tokenization_utils_sentencepiece import SentencePieceBackend

from engine.api.errors import CheckpointError, RequestError
from engine.text import IncrementalDecoder, Tokenizer, decode_all
from engine.text.ranks import _KIMI, PATTERN, PATTERNS, read_ranks
from tests.engine.text.conftest import CORPUS, sentence_pieces
from tests.tiers import examples

# Letters that the vocabularies have and lack, all kinds of space, joined emoji, and whatever Unicode has.
LETTERS = st.sampled_from(
    list("abcdTQ ,.'\n\t0189ä中文日é") + ["  ", "\u00a0", "\u2028", "👩‍👩‍👧", "é", "ﬁ", "’s", "'S"]
)
TEXT = st.one_of(st.text(max_size=40), st.lists(LETTERS, max_size=30).map("".join), st.sampled_from(CORPUS))
RANKS = ["ranks", "ranks_bos", "qwen"]
PIECES = ["pieces", "pieces_legacy", "pieces_unigram"]


@pytest.fixture(scope="module")
def loaded(plain_dirs: dict[str, Path]) -> dict[str, Tokenizer]:
    return {name: Tokenizer(path) for name, path in plain_dirs.items()}


def library(path: Path) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_file=str(path / "tokenizer.model"))


@pytest.mark.parametrize("kind", PIECES)
def test_a_text_has_the_ids_of_sentencepiece(
    loaded: dict[str, Tokenizer], plain_dirs: dict[str, Path], kind: str
) -> None:
    theirs, ours = library(plain_dirs[kind]), loaded[kind]

    @settings(max_examples=examples(200), deadline=None)
    @given(TEXT)
    def same(text: str) -> None:
        if not any(marker in text for marker in ("<s>", "</s>", "<unk>", "<|im_start|>", "<pad>")):
            assert ours.encode(text, add_special_tokens=False) == theirs.encode(text)

    same()
    assert ours.encode("fox", add_special_tokens=True) == [
        *([theirs.bos_id()] * (kind != "pieces_unigram")),
        *theirs.encode("fox"),
        *([theirs.eos_id()] * (kind == "pieces_legacy")),
    ]


@pytest.mark.parametrize("kind", PIECES)
def test_ids_have_the_text_of_sentencepiece(
    loaded: dict[str, Tokenizer], plain_dirs: dict[str, Path], kind: str
) -> None:
    """DT-03 byte fallback; DT-04 the first space"""
    theirs, ours = library(plain_dirs[kind]), loaded[kind]
    pieces = [token for token in range(theirs.get_piece_size()) if token not in ours.special_ids]

    @settings(max_examples=examples(200), deadline=None)
    @given(st.lists(st.sampled_from(pieces), max_size=12))
    def same(ids: list[int]) -> None:
        whole = ours.decode(ids)
        streamed = decode_all(IncrementalDecoder(ours), ids)
        assert streamed in (whole, whole.removesuffix("\ufffd"))
        if "\ufffd" in whole:  # of wrong bytes the library makes one sign each, Unicode's practice one a run
            return
        # The library takes off a first space that is a piece; tokenizer.json's decoders, and ours, a byte's as well.
        bytewise = bool(ids) and theirs.id_to_piece(ids[0]) == "<0x20>"
        assert " " * bytewise + whole == theirs.decode(ids)

    same()


def test_a_model_that_tidies_up_takes_all_space_from_a_start(
    loaded: dict[str, Tokenizer], plain_dirs: dict[str, Path]
) -> None:
    """DT-04"""
    for kind, left in (("pieces_unigram", ""), ("pieces", " ")):
        theirs, ours = library(plain_dirs[kind]), loaded[kind]
        ids = [theirs.piece_to_id("▁")] * 2 + [theirs.piece_to_id("a")]
        assert ours.decode(ids) == theirs.decode(ids) == decode_all(IncrementalDecoder(ours), ids) == left + "a"


def test_transformers_cuts_at_special_tokens_alike(plain_dirs: dict[str, Path], loaded: dict[str, Tokenizer]) -> None:
    """Compare texts that contain special tokens with transformers' slow tokenizer."""
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    file = str(plain_dirs["pieces_legacy"] / "tokenizer.model")
    theirs = SentencePieceBackend(vocab_file=file, legacy=True, **names)
    ours = loaded["pieces_legacy"]
    for text in ("a</s>b c", "</s></s>", "<s>the fox </s> dog<unk>", "x <s> y", "quick</s>"):
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False), text


def test_the_first_part_alone_gets_a_space(loaded: dict[str, Tokenizer], plain_dirs: dict[str, Path]) -> None:
    model, ours = library(plain_dirs["pieces"]), loaded["pieces"]
    start = ours.convert_tokens_to_ids("<|im_start|>")
    got = ours.encode("the fox<|im_start|>user", add_special_tokens=False)
    rest = got[got.index(start) + 1 :]
    assert got[: got.index(start)] == model.encode("the fox")
    assert "".join(model.id_to_piece(token) for token in rest) == "user" and start == 400
    assert ours.decode(got, skip_special_tokens=False) == "the fox<|im_start|>user"
    assert ours.decode(got) == "the foxuser"


def test_a_named_token_that_the_file_lacks_comes_behind_all(tmp_path: Path, plain_dirs: dict[str, Path]) -> None:
    shutil.copy(plain_dirs["pieces"] / "tokenizer.model", tmp_path)
    config = {"bos_token": "<s>", "pad_token": "[PAD]", "additional_special_tokens": ["<|x|>"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<extra>": 400}))
    tokenizer = Tokenizer(tmp_path)
    assert [tokenizer.convert_tokens_to_ids(text) for text in ("<extra>", "[PAD]", "<|x|>")] == [400, 401, 402]
    assert tokenizer.special_ids >= {401, 402} and tokenizer.vocab_size == 403
    assert tokenizer.token_bytes(402) == b"<|x|>"


def encoding(path: Path, pattern: str, special: dict[str, int]) -> tiktoken.Encoding:
    file = next(path.glob("*.model"), path / "qwen.tiktoken")
    return tiktoken.Encoding("x", pat_str=pattern, mergeable_ranks=read_ranks(file), special_tokens=special)


@pytest.mark.parametrize("kind", RANKS)
def test_a_text_has_the_ids_of_tiktoken(loaded: dict[str, Tokenizer], plain_dirs: dict[str, Path], kind: str) -> None:
    ours = loaded[kind]
    special = {text: token for token in ours.special_ids if (text := ours.token_string(token))}
    theirs = encoding(plain_dirs[kind], PATTERNS["qwen.tiktoken"] if kind == "qwen" else PATTERN, special)
    markers = st.lists(st.one_of(TEXT, st.sampled_from(sorted(special))), max_size=4).map("".join)

    @settings(max_examples=examples(200), deadline=None)
    @given(markers)
    def same(text: str) -> None:
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text, allowed_special="all")
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids) == text
        assert b"".join(map(ours.token_bytes, ids)) == theirs.decode_bytes(ids)

    same()


@pytest.mark.parametrize("kind", RANKS)
def test_wrong_bytes_stream_as_they_decode(loaded: dict[str, Tokenizer], kind: str) -> None:
    """DT-02 ids that make no characters"""
    ours = loaded[kind]

    @settings(max_examples=examples(200), deadline=None)
    @given(st.lists(st.integers(0, ours.vocab_size + 3), max_size=12))
    def same(ids: list[int]) -> None:
        streamed, whole = decode_all(IncrementalDecoder(ours), ids), ours.decode(ids)
        assert streamed in (whole, whole.removesuffix("\ufffd"))

    same()


def test_special_tokens_of_ranks_come_behind_them(loaded: dict[str, Tokenizer], plain_dirs: dict[str, Path]) -> None:
    count = len(read_ranks(plain_dirs["qwen"] / "qwen.tiktoken"))
    qwen = loaded["qwen"]
    assert [qwen.token_string(count + place) for place in (0, 1, 2, 3, 207)] == [
        *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|extra_0|>", "<|extra_204|>")
    ]
    assert qwen.eos_id == count + 2 and qwen.vocab_size == count + 208
    begins = loaded["ranks_bos"]
    assert (
        begins.encode("fox")[0] == begins.bos_id and begins.encode("fox", add_special_tokens=False)[0] != begins.bos_id
    )


def test_digits_and_scripts_are_cut_as_the_models_were_trained(plain_dirs: dict[str, Path]) -> None:
    ranks = read_ranks(plain_dirs["qwen"] / "qwen.tiktoken")
    big = ranks | {piece: len(ranks) + place for place, piece in enumerate((b"12", b"123", "中".encode() + b"a"))}

    def cut(pattern: str, text: str) -> list[bytes]:
        made = tiktoken.Encoding("x", pat_str=pattern, mergeable_ranks=big, special_tokens={})
        return made.decode_tokens_bytes(made.encode_ordinary(text))

    assert cut(PATTERN, "123") == [b"123"]
    assert cut(PATTERNS["qwen.tiktoken"], "123") == [b"1", b"2", b"3"]
    assert "中".encode() + b"a" in cut(PATTERN, "中a")
    assert "中".encode() + b"a" not in cut(_KIMI, "中a")


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("tokenizer.model", b"no model at all \x00\xff", "is not a SentencePiece model"),
        ("tokenizer.model", b"", "is not a SentencePiece model"),
        ("tokenizer.model", b"IQ== 0\nIg== one\n", "line 2 is not a token"),
        ("qwen.tiktoken", b"IQ== 0\n", "must rank all 256 bytes"),
        ("tiktoken.model", b"\xff\xfe", "is not a SentencePiece model"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: bytes, told: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{name}.*{told}"):
        Tokenizer(tmp_path)


def test_a_text_that_no_pattern_can_look_at_is_refused(loaded: dict[str, Tokenizer]) -> None:
    with pytest.raises(RequestError, match="cannot be tokenized"):
        loaded["ranks"].encode(" " * 3_000_000)


def test_a_tokenizer_json_goes_first(
    tmp_path: Path, plain_dirs: dict[str, Path], tokenizer_dirs: dict[str, Path]
) -> None:
    shutil.copy(plain_dirs["pieces"] / "tokenizer.model", tmp_path)
    assert Tokenizer(tmp_path).file.name == "tokenizer.model"
    shutil.copy(tokenizer_dirs["byte_level"] / "tokenizer.json", tmp_path)
    assert Tokenizer(tmp_path).file.name == "tokenizer.json"


def test_white_space_around_an_added_token_goes_with_it(tmp_path: Path, plain_dirs: dict[str, Path]) -> None:
    shutil.copy(plain_dirs["ranks"] / "tokenizer.model", tmp_path)
    count = len(read_ranks(tmp_path / "tokenizer.model"))
    flags = [
        {"content": "<mask>", "lstrip": True},
        {"content": "<end>", "rstrip": True},
        {"content": "word", "single_word": True},
    ]
    decoder = {str(count + place): one for place, one in enumerate(flags)}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder}))
    tokenizer = Tokenizer(tmp_path)

    def shown(text: str) -> list[str]:
        return [tokenizer.decode([token]) for token in tokenizer.encode(text)]

    assert "".join(shown("a \n <mask> b")) == "a<mask> b"
    assert "".join(shown("a <end>  b")) == "a <end>b"
    assert tokenizer.encode("a word.").count(count + 2) == 1 and count + 2 not in tokenizer.encode("a words")


@settings(max_examples=examples(200), deadline=None)
@given(data=st.one_of(st.binary(max_size=20), TEXT.map(str.encode)))
def test_any_bytes_have_ids_where_every_byte_has_one(loaded: dict[str, Tokenizer], data: bytes) -> None:
    for kind in ("pieces", "ranks"):
        ids = loaded[kind].encode_bytes(data)
        assert b"".join(map(loaded[kind].token_bytes, ids)) == data


def test_bytes_that_no_token_has_are_an_error(loaded: dict[str, Tokenizer]) -> None:
    with pytest.raises(ValueError, match="no token has the byte 0xf0"):
        loaded["pieces_unigram"].encode_bytes("🎉".encode())


@pytest.fixture(scope="module")
def t5_dir(tmp_path_factory):
    """A checkpoint of T5 without tokenizer.json."""
    path = tmp_path_factory.mktemp("t5")
    ids = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
    pieces = sentence_pieces(model_type="unigram", vocab_size=85, character_coverage=0.98, **ids)
    (path / "spiece.model").write_bytes(pieces)
    named = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    (path / "tokenizer_config.json").write_text(
        json.dumps({**named, "tokenizer_class": "T5Tokenizer", "extra_ids": 10})
    )
    (path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    return path


def test_pieces_of_t5_equal_transformers(t5_dir):
    """Sentinels follow the pieces in reverse order; every text ends with an end token."""
    ours, theirs = Tokenizer(t5_dir), transformers.T5Tokenizer.from_pretrained(t5_dir)
    for text in (
        *CORPUS,
        "The quick  brown fox",
        " over <extra_id_0> the dog<extra_id_9>.",
        "",
        "a</s> b",
        "dog <pad>x",
    ):
        assert ours.encode(text) == theirs.encode(text), text
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)
    assert ours.vocab_size == len(theirs) == 95
    assert ours.convert_tokens_to_ids("<extra_id_0>") == 94


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"tokenizer_class": "AlbertTokenizer"}, "belongs to a AlbertTokenizer; supported are those of T5"),
        ({"extra_ids": -1}, "extra_ids is -1; it must be a whole number below 100,000"),
    ],
)
def test_pieces_of_other_models_are_refused(config, message, t5_dir, tmp_path):
    shutil.copy(t5_dir / "spiece.model", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        Tokenizer(tmp_path)
