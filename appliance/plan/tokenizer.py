"""Whether a checkpoint's tokenizer is whole, without the libraries that read it: a check must be quick."""

import re
from pathlib import Path

import msgspec

from engine.api.errors import CheckpointError
from engine.gguf.file import root_of
from engine.text.gguf import check_gguf_tokenizer, gguf_tokenizer_file


class _TokenizerFile(msgspec.Struct):
    """Enough of tokenizer.json to know that it is whole."""

    model: msgspec.Raw


class _TekkenFile(msgspec.Struct):
    """Enough of tekken.json to know that it is whole."""

    config: msgspec.Raw
    vocab: msgspec.Raw


DESCRIBED = {"tokenizer.json": _TokenizerFile, "tekken.json": _TekkenFile}
PLAIN = ("tokenizer.model", "tiktoken.model", "qwen.tiktoken")
"""Files of SentencePiece's and tiktoken's, read where there is none that describes all; in order, as engine/text reads
them."""
_RANK = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?(\n|$)")
_PIECES = b"\x0a"  # a SentencePiece model begins with its first piece: field 1 of its message


def tokenizer_name(checkpoint: Path) -> str:
    """The name of the file that the checkpoint's tokenizer is read from; tokenizer.json if it has none."""
    named = next((name for name in (*DESCRIBED, *PLAIN) if (checkpoint / name).exists()), "")
    if named:
        return named
    inside = gguf_tokenizer_file(checkpoint)
    return "tokenizer.json" if inside is None else inside.name


def check_tokenizer(folder: Path) -> None:
    """Raises CheckpointError naming the file that is missing or damaged."""
    path = root_of(folder) / tokenizer_name(folder)
    if path.suffix == ".gguf":
        check_gguf_tokenizer(path)
        return
    try:
        if path.name in DESCRIBED:
            msgspec.json.decode(path.read_bytes(), type=DESCRIBED[path.name])
            return
        with path.open("rb") as file:
            head = file.read(512)
    except FileNotFoundError as error:
        hint = (
            "; vocab.json alone is not read: convert it with transformers" if (folder / "vocab.json").exists() else ""
        )
        raise CheckpointError(f"{path}: missing, so that texts cannot become tokens{hint}") from error
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    if not head.startswith(_PIECES) and _RANK.match(head) is None:
        raise CheckpointError(
            f"{path}: is neither a SentencePiece model nor a file of tiktoken's ranks; copy the checkpoint again"
        )
