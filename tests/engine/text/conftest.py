"""Small tokenizers of the kinds that checkpoints have, trained here, each also loaded by transformers as the oracle."""

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. What is 17 + 25? It's 42, isn't it?",
    "def add(a, b):\n    return a + b\n\n# 中文 characters, 日本語の文字, हिन्दी, and emoji 👩‍👩‍👧 🎉\n",
    'héllo wörld, ein Satz mit Umlauten: äöüß. <tool_call>{"name": "f"}</tool_call>',
] * 8


def byte_level() -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(r"\p{N}|\s*[\p{L}\p{M}]+|[^\s\p{L}\p{N}]+|\s+"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=331,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>", "<|im_start|>", "<|im_end|>"],
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(
        [AddedToken(text, normalized=False) for text in ("<think>", "</think>", "<tool_call>", "</tool_call>")]
    )
    backend.add_tokens([AddedToken("two words", normalized=False), AddedToken("漢字", normalized=False)])
    return backend


def byte_fallback() -> Tokenizer:
    """Return a tokenizer like Llama 2's: ▁ for spaces, <0xNN> for unknown bytes, one leading space stripped."""
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        limit_alphabet=60,
    )
    backend.train_from_iterator([text.replace(" ", "▁") for text in CORPUS], trainer)
    data = json.loads(backend.to_str())
    byte_tokens = {f"<0x{byte:02X}>" for byte in range(256)}
    data["added_tokens"] = [token for token in data["added_tokens"] if token["content"] not in byte_tokens]
    backend = Tokenizer.from_str(json.dumps(data))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", pair=None, special_tokens=[("<s>", 1)])
    return backend


def metaspace() -> Tokenizer:
    """A decoder that is not a rule per token: it must be asked."""
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


KINDS: dict[str, tuple[Callable[[], Tokenizer], dict[str, Any]]] = {
    "byte_level": (byte_level, {"eos_token": "<|im_end|>"}),
    "byte_level_bos": (byte_level, {"eos_token": "<|im_end|>", "bos_token": "<|end|>", "add_bos_token": True}),
    "byte_fallback": (byte_fallback, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}),
    "byte_fallback_eos": (
        byte_fallback,
        {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": False, "add_eos_token": True},
    ),
    "metaspace": (metaspace, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}),
    "late_tokens": (byte_level, {"eos_token": "<|late_end|>", "additional_special_tokens": ["<|late|>"]}),
}


def sentence_pieces(**options: Any) -> bytes:
    """A tokenizer.model."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(" ".join(CORPUS).split("\n")), model_writer=model, minloglevel=2, **options
    )
    return model.getvalue()


def llama_pieces() -> bytes:
    """Return a SentencePiece model like Llama 2's: BPE with byte fallback that keeps all spaces."""
    kept = {"remove_extra_whitespaces": False, "normalization_rule_name": "identity"}
    return sentence_pieces(model_type="bpe", vocab_size=400, byte_fallback=True, character_coverage=0.98, **kept)


def unigram_pieces() -> bytes:
    """Return a SentencePiece model like T5's: unigram with an unknown token and normalized whitespace."""
    return sentence_pieces(model_type="unigram", vocab_size=85, character_coverage=0.98)


def rank_lines() -> bytes:
    """A file of tiktoken's, with the joins that a byte-level tokenizer learnt."""
    backend = byte_level()
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    names = sorted(backend.get_vocab(with_added_tokens=False).items(), key=lambda item: item[1])
    pieces = [spelled(text) for text, _ in names if text not in added]
    pieces.sort(key=lambda piece: len(piece) > 1)  # bytes first; joins stay in their order
    return b"".join(b"%s %d\n" % (base64.b64encode(piece), rank) for rank, piece in enumerate(pieces))


def spelled(text: str) -> bytes:
    """Return the bytes that a byte-level token text encodes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in plain}
    table |= {chr(256 + place): byte for place, byte in enumerate(sorted(set(range(256)) - set(plain)))}
    return bytes(table[letter] for letter in text)


def added(*texts: str, first: int) -> dict[str, Any]:
    return {str(first + place): {"content": text, "special": True} for place, text in enumerate(texts)}


_ENDS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
# File name, contents, tokenizer_config.json.
PLAIN: dict[str, tuple[str, Callable[[], bytes], dict[str, Any]]] = {
    "pieces": (
        "tokenizer.model",
        llama_pieces,
        _ENDS | {"added_tokens_decoder": added("<|im_start|>", "<pad>", first=400)},
    ),
    "pieces_legacy": ("tokenizer.model", llama_pieces, _ENDS | {"legacy": True, "add_eos_token": True}),
    "pieces_unigram": ("tokenizer.model", unigram_pieces, _ENDS | {"add_bos_token": False}),
    "ranks": (
        "tokenizer.model",
        rank_lines,
        {"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]},
    ),
    "ranks_bos": ("tiktoken.model", rank_lines, {"bos_token": "[BOS]", "eos_token": "[EOS]", "add_bos_token": True}),
    "qwen": ("qwen.tiktoken", rank_lines, {"eos_token": "<|im_end|>", "tokenizer_class": "QWenTokenizer"}),
}


@pytest.fixture(scope="session")
def plain_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A directory per kind of SentencePiece's and tiktoken's files."""
    root = tmp_path_factory.mktemp("plain")
    contents: dict[Callable[[], bytes], bytes] = {}
    for name, (file, make, config) in PLAIN.items():
        (root / name).mkdir()
        contents.setdefault(make, b"")
        contents[make] = contents[make] or make()
        (root / name / file).write_bytes(contents[make])
        (root / name / "tokenizer_config.json").write_text(json.dumps(config))
    return {name: root / name for name in PLAIN}


@pytest.fixture(scope="session")
def tokenizer_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A directory per kind, as a checkpoint has it."""
    root = tmp_path_factory.mktemp("tokenizers")
    for name, (build, config) in KINDS.items():
        directory = root / name
        directory.mkdir()
        build().save(str(directory / "tokenizer.json"))
        (directory / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config})
        )
    return {name: root / name for name in KINDS}
