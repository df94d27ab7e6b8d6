"""Compare tokenizers in GGUF files, written with the package gguf like llama.cpp's converter, with the originals."""

import io
import json
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from engine.api.errors import CheckpointError
from engine.text import IncrementalDecoder, decode_all
from engine.text import Tokenizer as Ours
from engine.text.templates import chat_templates, template_file
from tests.engine.text.conftest import CORPUS
from tests.tiers import examples

LETTERS = st.sampled_from(
    list("abcdTQ ,.'\n\t0189ä中文日é")
    + ["  ", "\u00a0", "\u2028", "👩‍👩‍👧", "e\u0301", "ﬁ", "’s", "'S", "\r\n", "1234"]
)
TEXT = st.one_of(st.text(max_size=40), st.lists(LETTERS, max_size=30).map("".join), st.sampled_from(CORPUS))
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
PLAIN_ADDED = ["<think>", "</think>", "<tool_call>"]
# From the tokenizer.json of each model.
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
NEMO = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?"
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def byte_level(cut: pre_tokenizers.PreTokenizer, *, whole: bool = False, nfc: bool = False) -> Tokenizer:
    backend = Tokenizer(models.BPE(ignore_merges=whole))
    backend.pre_tokenizer = cut
    if nfc:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=SPECIAL
    )
    backend.train_from_iterator([*CORPUS, "It's 1234, 12345 or 7 items: ÉCOLE école 中文中文"] * 4, trainer)
    # A token that no merges make: only tokenizers that keep whole pieces give it.
    described = json.loads(backend.to_str())
    described["model"]["vocab"]["Ġzebras"] = backend.get_vocab_size()
    backend = Tokenizer.from_str(json.dumps(described))
    backend.add_tokens([AddedToken(text, normalized=False) for text in PLAIN_ADDED])
    return backend


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "gpt-2": lambda: byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "smollm": lambda: byte_level(digits()),
    "qwen2": lambda: byte_level(split(QWEN2), nfc=True),
    "llama-bpe": lambda: byte_level(split(LLAMA3), whole=True),
    "tekken": lambda: byte_level(split(NEMO), whole=True),
}


def begun(backend: Tokenizer, begin: str) -> Tokenizer:
    backend.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", pair=None, special_tokens=[(begin, backend.token_to_id(begin))]
    )
    return backend


def write_bpe(path: Path, backend: Tokenizer, pre: str, **more: object) -> Path:
    """Write a BPE vocabulary like convert_hf_to_gguf.py (get_vocab_base, SpecialVocab), with two unused last ids."""
    described = json.loads(backend.to_str())
    texts = {token: text for text, token in backend.get_vocab().items()}
    kinds = {token["id"]: 3 if token["special"] else 4 for token in described["added_tokens"]}
    size = max(texts) + 3
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([texts.get(token, f"[PAD{token}]") for token in range(size)])
    writer.add_token_types([kinds.get(token, 1) if token in texts else 5 for token in range(size)])
    writer.add_token_merges([" ".join(merge) for merge in described["model"]["merges"]])
    writer.add_bos_token_id(backend.token_to_id("<|im_start|>"))
    writer.add_eos_token_id(backend.token_to_id("<|im_end|>"))
    return finished(writer, path, **more)


def finished(writer: gguf.GGUFWriter, path: Path, **more: object) -> Path:
    for name, value in more.items():
        getattr(writer, name)(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_texts_have_the_ids_of_the_original(tmp_path: Path, kind: str) -> None:
    theirs = KINDS[kind]()
    ours = Ours(write_bpe(tmp_path / "m.gguf", theirs, kind, add_add_bos_token=False))

    @settings(max_examples=examples(300), deadline=None)
    @given(st.one_of(TEXT, st.lists(st.one_of(TEXT, st.sampled_from(SPECIAL + PLAIN_ADDED)), max_size=5).map("".join)))
    def same(text: str) -> None:
        ids = theirs.encode(text).ids
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids)
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids, skip_special_tokens=False)

    same()
    assert ours.encode(" zebras") == theirs.encode(" zebras").ids
    assert (len(ours.encode(" zebras")) == 1) == (kind in ("llama-bpe", "tekken"))
    assert ours.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert ours.special_ids == {theirs.token_to_id(text) for text in SPECIAL}
    assert ours.vocab_size == max(theirs.get_vocab().values()) + 1  # without [PAD…]


@pytest.mark.parametrize("kind", ["llama-bpe", "smollm"])
@pytest.mark.parametrize("said", [None, False, True])
def test_the_begin_token_is_added_as_the_file_says_or_its_kind(tmp_path: Path, kind: str, said: bool | None) -> None:
    theirs = KINDS[kind]()
    more = {} if said is None else {"add_add_bos_token": said}
    ours = Ours(write_bpe(tmp_path / "m.gguf", theirs, kind, **more))
    wanted = said if said is not None else kind == "llama-bpe"
    if wanted:
        theirs = begun(theirs, "<|im_start|>")
    assert ours.encode("17 foxes") == theirs.encode("17 foxes").ids
    assert ours.encode("17 foxes", add_special_tokens=False) == theirs.encode("17 foxes", add_special_tokens=False).ids


def test_an_end_token_is_added_where_the_file_says(tmp_path: Path) -> None:
    theirs = KINDS["smollm"]()
    ours = Ours(write_bpe(tmp_path / "m.gguf", theirs, "smollm", add_add_bos_token=True, add_add_eos_token=True))
    start, end = (theirs.token_to_id(text) for text in SPECIAL[1:])
    assert ours.encode("a fox") == [start, *theirs.encode("a fox").ids, end]
    pair = [start, *theirs.encode("a fox").ids, end, start, *theirs.encode("the dog").ids, end]
    assert ours.encode_pair("a fox", "the dog")[0] == pair


@pytest.mark.parametrize(("rule", "nfc"), [("roberta-bpe", False), ("modern-bert", True)])
def test_texts_of_encoders_have_a_begin_and_an_end_token(tmp_path: Path, rule: str, nfc: bool) -> None:
    """Also without the keys add_bos_token and add_eos_token."""
    theirs = byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False), nfc=nfc)
    start, end = (theirs.token_to_id(text) for text in SPECIAL[1:])
    text, more = "It's an e\u0301cole,  12 foxes", {"add_add_bos_token": False, "add_add_eos_token": False}
    ours = Ours(write_bpe(tmp_path / "m.gguf", theirs, rule))
    assert ours.encode(text) == [start, *theirs.encode(text).ids, end]
    assert Ours(write_bpe(tmp_path / "n.gguf", theirs, rule, **more)).encode(text) == theirs.encode(text).ids


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def word_pieces(*, cased: bool) -> Tokenizer:
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=not cased)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.train_from_iterator(CORPUS * 4, trainers.WordPieceTrainer(vocab_size=300, special_tokens=WORDS))
    around = [(text, backend.token_to_id(text)) for text in ("[CLS]", "[SEP]")]
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=around
    )
    return backend


def write_words(path: Path, backend: Tokenizer, without: str = "") -> Path:
    """Write a WordPiece vocabulary like conversion/bert.py. without: a named token that the file lacks."""
    texts = dict(sorted((token, text) for text, token in backend.get_vocab().items()))

    def phantom(text: str) -> str:
        return text if text in WORDS else text[2:] if text.startswith("##") else f"▁{text}"

    writer = gguf.GGUFWriter(path, "bert")
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([phantom(text) for text in texts.values()])
    writer.add_token_types([3 if text in WORDS else 1 for text in texts.values()])
    for token, name in enumerate(("padding", "unknown", "cls", "seperator")):
        if name != without:
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)
    return finished(writer, path)


@pytest.mark.parametrize("cased", [False, True])
def test_word_pieces_are_those_of_the_original(tmp_path: Path, cased: bool) -> None:
    theirs = word_pieces(cased=cased)
    ours = Ours(write_words(tmp_path / "m.gguf", theirs))

    @settings(max_examples=examples(200), deadline=None)
    @given(TEXT)
    def same(text: str) -> None:
        ids = theirs.encode(text).ids
        assert ours.encode(text) == ids
        assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids)

    same()
    pair = theirs.encode("The fox", "the DOG")
    assert ours.encode_pair("The fox", "the DOG") == (pair.ids, pair.type_ids)
    assert ours.special_tokens["cls_token"] == "[CLS]" and ours.special_tokens["sep_token"] == "[SEP]"


def test_tokens_that_are_no_words_do_not_make_word_pieces_cased(tmp_path: Path) -> None:
    """Chinese BERT has the tokens <S> and <T>, and words in lower case."""
    vocabulary = {text: token for token, text in enumerate([*WORDS, "<S>", "caf", "##e", "中", "文"])}
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    assert Ours(write_words(tmp_path / "m.gguf", backend)).encode("Café中文") == [2, 6, 7, 8, 9, 3]


@pytest.mark.parametrize("name", ["cls", "seperator", "unknown"])
def test_word_pieces_without_a_named_token_are_refused(tmp_path: Path, name: str) -> None:
    backend = Tokenizer(models.WordPiece({text: token for token, text in enumerate([*WORDS, "a"])}, unk_token="[UNK]"))
    path = write_words(tmp_path / "m.gguf", backend, without=name)
    if name == "unknown":  # unless a token has the usual text
        Ours(path)
        path.write_bytes(path.read_bytes().replace(b"[UNK]", b"[ODD]"))
    with pytest.raises(CheckpointError, match=rf"m\.gguf: lacks the key tokenizer\.ggml\.{name}_token_id"):
        Ours(path)


def trained_pieces() -> sentencepiece.SentencePieceProcessor:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=model, model_type="bpe", vocab_size=430, byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, character_coverage=0.985, minloglevel=2,
    )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def write_pieces(path: Path, model: sentencepiece.SentencePieceProcessor, **more: object) -> Path:
    """Write pieces like convert_hf_to_gguf.py's _create_vocab_sentencepiece, with three tokens of added_tokens.json."""
    size = model.get_piece_size()

    def kind(token: int) -> int:
        tests = {2: model.is_unknown, 3: model.is_control, 5: model.is_unused, 6: model.is_byte}
        return next((number for number, test in tests.items() if test(token)), 1)

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([*map(model.id_to_piece, range(size)), "<|im_start|>", "<tool_call>", "[PAD432]"])
    writer.add_token_scores([*map(model.get_score, range(size)), -1000.0, -1000.0, -10000.0])
    writer.add_token_types([*map(kind, range(size)), 3, 4, 5])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    return finished(writer, path, **more)


def test_pieces_are_those_of_sentencepiece(tmp_path: Path) -> None:
    theirs = trained_pieces()
    ours = Ours(write_pieces(tmp_path / "m.gguf", theirs))
    size = theirs.get_piece_size()

    @settings(max_examples=examples(300), deadline=None)
    @given(TEXT)
    def same(text: str) -> None:
        if any(special in text for special in ("<s>", "</s>", "<unk>", "<tool_call>", "<|im_start|>")):
            return
        ids = theirs.encode(text)
        assert ours.encode(text) == [theirs.bos_id(), *ids]
        assert ours.decode(ids) == theirs.decode(ids)
        assert decode_all(IncrementalDecoder(ours), ids) == theirs.decode(ids)

    same()
    assert ours.encode("fox<|im_start|>dog<tool_call> x", add_special_tokens=False) == [
        *theirs.encode("fox"), size, *theirs.encode("dog"), size + 1, *theirs.encode(" x"),
    ]  # fmt: skip
    assert ours.special_ids == {0, 1, 2, size}
    assert ours.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def test_a_file_says_whether_pieces_begin_with_a_space(tmp_path: Path) -> None:
    theirs = trained_pieces()
    path = write_pieces(tmp_path / "m.gguf", theirs, add_add_space_prefix=False, add_add_bos_token=False)
    ours = Ours(path)
    assert ours.encode(" fox") == theirs.encode("fox") != ours.encode("fox")
    assert ours.decode(ours.encode(" fox")) == " fox"


def trained_characters() -> Tokenizer:
    """A tokenizer like GemmaTokenizer of transformers."""
    texts = [text.replace(" ", "▁") for text in CORPUS] * 4
    learned = Tokenizer(models.BPE())
    letters = sorted({letter for text in texts for letter in text})[::2]  # the others become bytes
    learned.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=300, initial_alphabet=letters, limit_alphabet=40))
    described = json.loads(learned.to_str())["model"]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<tool>", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {
        text: token for token, text in enumerate([*tokens, *sorted(described["vocab"], key=described["vocab"].get)])
    }
    merges = [tuple(merge) for merge in described["merges"]]
    backend = Tokenizer(models.BPE(vocab, merges, fuse_unk=True, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(tokens[:4])
    backend.add_tokens([AddedToken("<tool>", normalized=False)])
    return begun(backend, "<bos>")


def test_characters_are_merged_as_by_gemma(tmp_path: Path) -> None:
    """Written like Gemma4Model of convert_hf_to_gguf.py, whose types come from LlamaHfVocab."""
    theirs = trained_characters()
    texts = sorted(theirs.get_vocab(), key=theirs.get_vocab().__getitem__)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "gemma4")
    writer.add_tokenizer_model("gemma4")
    writer.add_token_list(texts)
    writer.add_token_scores([-1000.0] * len(texts))
    writer.add_token_types([3] * 4 + [4] + [6] * 256 + [1] * (len(texts) - 261))
    writer.add_token_merges([" ".join(merge) for merge in json.loads(theirs.to_str())["model"]["merges"]])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_add_space_prefix(False)
    ours = Ours(finished(writer, tmp_path / "m.gguf"))

    @settings(max_examples=examples(300), deadline=None)
    @given(st.one_of(TEXT, st.lists(st.one_of(TEXT, st.sampled_from(["<tool>", "<eos>"])), max_size=5).map("".join)))
    def same(text: str) -> None:
        ids = theirs.encode(text).ids
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids)
        assert decode_all(IncrementalDecoder(ours), ids) == theirs.decode(ids)

    same()
    assert ours.encode("fox")[0] == 2
    assert ours.special_ids == {0, 1, 2, 3}


@pytest.mark.parametrize("signed", [False, True])
def test_unigrams_are_those_of_sentencepiece(tmp_path: Path, signed: bool) -> None:
    """Written like T5Model of convert_hf_to_gguf.py."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=model, model_type="unigram", vocab_size=110, pad_id=0, eos_id=1,
        unk_id=2, bos_id=-1, hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    theirs = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    size = theirs.get_piece_size()
    normalizer = sentencepiece_model_pb2.ModelProto.FromString(model.getvalue()).normalizer_spec
    octets = normalizer.precompiled_charsmap
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "t5")
    writer.add_tokenizer_model("t5")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([*map(theirs.id_to_piece, range(size)), "<extra_id_0>", "[PAD]"])
    writer.add_token_scores([*map(theirs.get_score, range(size)), -1000.0, -10000.0])
    writer.add_token_types([3, 3, 2, *[1] * (size - 3), 4, 5])
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_add_space_prefix(normalizer.add_dummy_prefix)
    writer.add_remove_extra_whitespaces(normalizer.remove_extra_whitespaces)
    writer.add_precompiled_charsmap([byte - 256 * (byte > 127) for byte in octets] if signed else octets)
    ours = Ours(finished(writer, tmp_path / "m.gguf"))
    assert octets

    @settings(max_examples=examples(300), deadline=None)
    @given(TEXT)
    def same(text: str) -> None:
        if any(special in text for special in ("<pad>", "</s>", "<unk>", "<extra_id_0>")):
            return
        ids = theirs.encode(text)
        assert ours.encode(text) == [*ids, theirs.eos_id()]
        known = [token for token in ids if token != theirs.unk_id()]
        assert ours.decode(known) == theirs.decode(known)

    same()
    assert ours.encode("fox<extra_id_0>dog") == [*theirs.encode("fox"), size, *theirs.encode("dog"), 1]


def test_templates_are_those_of_the_file_unless_another_lies_beside(tmp_path: Path) -> None:
    path = write_bpe(tmp_path / "m.gguf", KINDS["smollm"](), "smollm", add_chat_template="{{ messages }}")
    assert Ours(path).chat_template == chat_templates(path) == "{{ messages }}"
    assert (template_file(path), template_file(tmp_path)) == ("m.gguf", "m.gguf")
    (tmp_path / "chat_template.jinja").write_text("other")
    assert Ours(tmp_path).chat_template == chat_templates(tmp_path) == "other"
    assert chat_templates(path) == "{{ messages }}"  # the file alone


def test_named_templates_are_read(tmp_path: Path) -> None:
    several = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]
    path = write_bpe(tmp_path / "m.gguf", KINDS["smollm"](), "smollm", add_chat_template=several)
    assert chat_templates(path) == {"default": "one", "tool_use": "two"}


def test_a_tokenizer_beside_the_file_wins_over_the_one_inside(tmp_path: Path) -> None:
    write_bpe(tmp_path / "m.gguf", KINDS["smollm"](), "smollm")
    other = KINDS["qwen2"]()
    other.save(str(tmp_path / "tokenizer.json"))
    assert Ours(tmp_path).encode("1234 e\u0301") == other.encode("1234 e\u0301").ids


def test_a_tokenizer_of_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    path = write_bpe(tmp_path / "m.gguf", KINDS["smollm"](), "viking")
    with pytest.raises(
        CheckpointError,
        match=r"m\.gguf: tokenizer\.ggml\.pre is 'viking', which is not a known pre-tokenizer\. Put the file",
    ):
        Ours(path)
    path.write_bytes(path.read_bytes().replace(b"gpt2", b"t5v1"))
    known = "gpt2, gemma4, llama, t5 and bert"
    with pytest.raises(CheckpointError, match=rf"m\.gguf: tokenizer\.ggml\.model is 't5v1'; supported are {known}"):
        Ours(path)


def test_arrays_of_different_lengths_are_refused(tmp_path: Path) -> None:
    path = write_bpe(tmp_path / "m.gguf", KINDS["smollm"](), "smollm")
    count = len(gguf.GGUFReader(path).fields["tokenizer.ggml.token_type"].data)
    short = tmp_path / "short.gguf"
    writer = gguf.GGUFWriter(short, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([f"t{token}" for token in range(count)])
    writer.add_token_types([1] * (count - 1))
    writer.add_token_merges(["t 1"])
    with pytest.raises(CheckpointError, match=r"short\.gguf: tokenizer\.ggml\.tokens, .* must be arrays of one length"):
        Ours(finished(writer, short))
