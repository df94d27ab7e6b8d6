"""Small tokenizers of the kinds that checkpoints have, trained here, each also loaded by transformers as the oracle."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
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
    """Llama 2's pipeline: ▁ for spaces, <0xNN> for what the vocabulary lacks, one leading space stripped."""
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
