"""Two tokenizers, one of byte-level pieces and one with byte fallback, saved as tokenizer.json."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

WORDS = ['{"', '":', '", "', "true", "false", "null", "ab", "abc", " a", "你", "好", "12", "3.5"]


def byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    to_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        pieces = [*to_letters.pre_tokenize_str(word)[0][0]]
        whole = pieces[0]
        for piece in pieces[1:]:
            if (whole, piece) not in merges:
                merges.append((whole, piece))
            whole += piece
            vocabulary.setdefault(whole, len(vocabulary))
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    made.pre_tokenizer, made.decoder = to_letters, decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("<|call|>", special=True)])
    made.add_tokens([AddedToken("<tool_call>", normalized=False)])
    return made


def byte_fallback() -> Tokenizer:
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": byte + 3 for byte in range(256)}
    for piece in ["▁", *'abcdefgh{}[]:,"0123456789', "你", "▁a"]:
        vocabulary.setdefault(piece, len(vocabulary))
    made = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[("▁", "a")], byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    return made


@pytest.fixture(scope="session")
def tokenizer_directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made = {"byte level": byte_level(), "byte fallback": byte_fallback()}

    def get(name: str) -> Path:
        path = tmp_path_factory.mktemp("tokenizer")
        made[name].save(str(path / "tokenizer.json"))
        return path

    return get


@pytest.fixture(scope="session")
def allowed() -> Callable[[np.ndarray], list[int]]:
    """The ids in a mask, counted one by one."""
    return lambda mask: [i for i in range(32 * len(mask)) if int(mask[i // 32]) >> i % 32 & 1]
