"""Fast check that a checkpoint's tokenizer is complete, without importing tokenizer libraries."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from engine.api.errors import CheckpointError
from engine.api.files import TOKENIZER_BYTES, read_file
from engine.gguf.file import root_of
from engine.text.added import check_ids
from engine.text.files import read_json
from engine.text.gguf import check_gguf_tokenizer, gguf_tokenizer_file


class _Token(msgspec.Struct):
    id: int = 0


class _TokenizerModel(msgspec.Struct):
    vocab: dict[str, int] | list[Any] = {}


class _TokenizerFile(msgspec.Struct):
    """Fields of tokenizer.json that show it is complete, and its token ids."""

    model: _TokenizerModel
    added_tokens: list[_Token] = []

    def ids(self) -> Iterator[int]:
        yield from (token.id for token in self.added_tokens)
        vocab = self.model.vocab
        yield from vocab.values() if isinstance(vocab, dict) else range(len(vocab))


class _TekkenFile(msgspec.Struct):
    """Fields of tekken.json that show it is complete."""

    config: msgspec.Raw
    vocab: msgspec.Raw

    def ids(self) -> Iterator[int]:
        """Return no ids: the file lists tokens in the order of their ids."""
        return iter(())


DESCRIBED: dict[str, type[_TokenizerFile | _TekkenFile]] = {
    "tokenizer.json": _TokenizerFile,
    "tekken.json": _TekkenFile,
}
PLAIN = ("tokenizer.model", "spiece.model", "tiktoken.model", "qwen.tiktoken")
"""SentencePiece and tiktoken files, in the order of engine/text. Read only if no file in `DESCRIBED` exists."""
_RANK = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?(\n|$)")
_RANKS = re.compile(rb" (\d{7,})\r?$", re.MULTILINE)
_PIECES = b"\x0a"  # a SentencePiece model starts with its first piece, field 1 of the message


def tokenizer_name(checkpoint: Path) -> str:
    """Return the name of the checkpoint's tokenizer file; tokenizer.json if it has none."""
    named = next((name for name in (*DESCRIBED, *PLAIN) if (checkpoint / name).exists()), "")
    if named:
        return named
    inside = gguf_tokenizer_file(checkpoint)
    return "tokenizer.json" if inside is None else inside.name


def check_tokenizer(folder: Path) -> None:
    """Raise CheckpointError that names the missing or damaged file."""
    path = root_of(folder) / tokenizer_name(folder)
    if path.suffix == ".gguf":
        check_gguf_tokenizer(path)
        return
    config = folder / "tokenizer_config.json"
    added = read_json(config).get("added_tokens_decoder")
    if isinstance(added, dict):
        check_ids(config, (int(token) for token in added if token.isdecimal()))
    try:
        if path.name in DESCRIBED:
            check_ids(path, msgspec.json.decode(read_file(path, TOKENIZER_BYTES), type=DESCRIBED[path.name]).ids())
            return
        data = read_file(path, TOKENIZER_BYTES)
    except FileNotFoundError as error:
        hint = (
            "; vocab.json alone is not supported, convert it with transformers"
            if (folder / "vocab.json").exists()
            else ""
        )
        raise CheckpointError(f"{path}: missing; it is required to tokenize texts{hint}") from error
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{path}: cannot be read: {why}") from error
    if _RANK.match(data[:512]):
        check_ids(path, (int(rank[:20]) for rank in _RANKS.findall(data)))
    elif not data.startswith(_PIECES):
        raise CheckpointError(
            f"{path}: is neither a SentencePiece model nor a file of tiktoken's ranks; copy the checkpoint again"
        )
