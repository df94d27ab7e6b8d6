"""Select and read the tokenizer file of a checkpoint and the configuration files next to it."""

from pathlib import Path
from typing import Any

from engine.api import files
from engine.api.errors import CheckpointError
from engine.text.added import Added, check_ids, read_added
from engine.text.backend import Backend
from engine.text.fast import FastTokenizer
from engine.text.gguf import gguf_backend, gguf_config, gguf_tokenizer_file
from engine.text.tekken import TEKKEN, tekken_text

T5_PIECES = "spiece.model"
FILES = ("tokenizer.json", TEKKEN, "tokenizer.model", T5_PIECES, "tiktoken.model", "qwen.tiktoken")
"""Tokenizer files in order of precedence. A tokenizer in a GGUF file comes last."""
CONFIG = "tokenizer_config.json"
MAX_SENTINELS = 100_000
# Qwen's first models define in code the added tokens that follow the ranks.
_QWEN_ADDED = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{number}|>" for number in range(205)))


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or {} if it does not exist. Raises CheckpointError with the file's name."""
    try:
        value = files.read_json(path)
    except (FileNotFoundError, NotADirectoryError):  # the latter if the checkpoint is a single file
        return {}
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a {type(value).__name__}, not an object; copy the checkpoint again")
    return value


def has_tokenizer(checkpoint: Path) -> bool:
    """Return whether a checkpoint has a tokenizer in a supported form."""
    return any((checkpoint / name).is_file() for name in FILES) or gguf_tokenizer_file(checkpoint) is not None


def tokenizer_file(directory: Path) -> Path:
    """Return the tokenizer file of a directory. Raises CheckpointError if it has none."""
    found = next((directory / name for name in FILES if (directory / name).is_file()), None)
    found = found or gguf_tokenizer_file(directory)
    if found is None:
        raise CheckpointError(
            f"{directory / FILES[0]}: no such file, and no {', '.join(FILES[1:])}; model.source must hold one of them "
            "(AutoTokenizer's save_pretrained writes a tokenizer.json)"
        )
    return found


def tokenizer_config(directory: Path) -> dict[str, Any]:
    """Return the directory's tokenizer_config.json, completed by its GGUF file. Raises CheckpointError with the file's
    name."""
    return gguf_config(directory) | read_json(directory / CONFIG)


def tokenizer_text(directory: Path) -> str | None:
    """Return the directory's tokenizer as the text of a tokenizer.json, or None if it has another format. Raises
    CheckpointError with the file's name."""
    path = tokenizer_file(directory)
    if path.name == TEKKEN:
        return tekken_text(path)
    if path.name not in FILES or path.suffix != ".json":
        return None
    try:
        return files.read_text(path, files.TOKENIZER_BYTES)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as text ({error}); copy the checkpoint again") from error


def is_ranks(path: Path) -> bool:
    """Return whether a file has tiktoken's format; SentencePiece's may have the same name. Raises CheckpointError."""
    try:
        with files.open_file(path) as file:
            head = file.read(200)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); copy the checkpoint again") from error
    first = head.split(b"\n")[0].split(b" ")
    return len(first) == 2 and first[1].strip().isdigit() and all(33 <= byte < 127 for byte in first[0])


def _plain(path: Path, config: dict[str, Any], named: dict[str, str], extra: list[str]) -> Backend:
    """Load SentencePiece or tiktoken, with added, begin and end tokens from the configuration."""
    directory = path.parent
    added = read_added(config.get("added_tokens_decoder", {}))
    more = read_json(directory / "added_tokens.json")
    listed = {token.text for token in added}
    added += [Added(int(token), text) for text, token in more.items() if text not in listed]
    check_ids(directory / "tokenizer_config.json", (token.id for token in added))
    if is_ranks(path):
        return _ranks(path, config, named, extra, added)
    from engine.text.pieces import SentencePieceTokenizer, read_model

    model = read_model(path)
    size = model.get_piece_size()
    if path.name == T5_PIECES:
        added, config = _t5(path, config, added, size)
    in_file = {model.id_to_piece(token): token for token in range(size)}
    added = _with_named(added, [*named.values(), *extra], in_file, size)
    ids = in_file | {token.text: token.id for token in added}
    begin = ids.get(named["bos_token"]) if "bos_token" in named else None
    if begin is None and model.bos_id() >= 0:
        begin = model.bos_id()
    end = ids.get(named["eos_token"]) if "eos_token" in named else None
    if end is None and model.eos_id() >= 0:
        end = model.eos_id()
    return SentencePieceTokenizer(
        model,
        added,
        begin if config.get("add_bos_token", True) else None,
        end if config.get("add_eos_token", False) else None,
        legacy=bool(config.get("legacy", False)),
    )


def _t5(path: Path, config: dict[str, Any], added: list[Added], size: int) -> tuple[list[Added], dict[str, Any]]:
    """Return T5's added tokens, with the sentinels that follow the pieces in reverse order, and its settings. Raises
    CheckpointError for other models, whose files have the same name."""
    kind, count = str(config.get("tokenizer_class", "T5Tokenizer")), config.get("extra_ids", 100)
    if not kind.removesuffix("Fast").endswith("T5Tokenizer"):
        raise CheckpointError(f"{path}: belongs to a {kind}; supported are those of T5, save it as tokenizer.json")
    if not isinstance(count, int) or not 0 <= count < MAX_SENTINELS:
        raise CheckpointError(
            f"{path.parent / CONFIG}: extra_ids is {count!r}; it must be a whole number below {MAX_SENTINELS:,}"
        )
    known = {token.text for token in added}
    sentinels = (Added(size + count - 1 - number, f"<extra_id_{number}>") for number in range(count))
    added = [*added, *(token for token in sentinels if token.text not in known)]
    return added, {"legacy": True, **config, "add_bos_token": False, "add_eos_token": True}


def _ranks(path: Path, config: dict[str, Any], named: dict[str, str], extra: list[str], added: list[Added]) -> Backend:
    from engine.text.ranks import PATTERN, PATTERNS, RanksTokenizer, read_ranks

    ranks = read_ranks(path)
    size = max(ranks.values()) + 1
    kind = str(config.get("tokenizer_class", ""))
    if not added and (kind == "QWenTokenizer" or path.name == "qwen.tiktoken"):
        added = [Added(size + place, text) for place, text in enumerate(_QWEN_ADDED)]
    added = _with_named(added, [*named.values(), *extra], {}, size)
    ids = {token.text: token.id for token in added}
    begin, end = (ids.get(named.get(key, "")) for key in ("bos_token", "eos_token"))
    pattern = PATTERNS.get(kind) or PATTERNS.get(path.name) or PATTERN
    return RanksTokenizer(
        path,
        pattern,
        added,
        begin if config.get("add_bos_token", False) else None,
        end if config.get("add_eos_token", False) else None,
    )


def _with_named(added: list[Added], named: list[str], in_file: dict[str, int], size: int) -> list[Added]:
    """Add the named tokens, which are special, with their id in the file or after all other ids."""
    known = {token.text: token for token in added}
    behind = max([size - 1, *(token.id for token in added)]) + 1
    for text in named:
        if text in known:
            token = known[text]
            known[text] = Added(token.id, text, True, token.lstrip, token.rstrip, token.word)
            continue
        if text in in_file:
            known[text] = Added(in_file[text], text)
            continue
        known[text] = Added(behind, text)
        behind += 1
    return list(known.values())


def load_backend(directory: Path, config: dict[str, Any], named: dict[str, str], extra: list[str]) -> Backend:
    """Load the tokenizer of a directory. config: its tokenizer_config.json. named: texts of its named tokens. extra:
    texts of further special tokens. Raises CheckpointError."""
    path, text = tokenizer_file(directory), tokenizer_text(directory)
    if path.suffix == ".gguf":
        return gguf_backend(path, [*named.values(), *extra])
    if text is None:
        return _plain(path, config, named, extra)
    added = read_added(config.get("added_tokens_decoder", {}))
    return FastTokenizer(path, text, added, [*named.values(), *extra])
