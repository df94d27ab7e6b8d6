"""Conversion of Mistral's tekken.json to an equivalent tokenizer.json.

The file has `config` (pattern, default_vocab_size, default_num_special_tokens, version), `vocab` (base64 bytes in rank
order) and `special_tokens`. A text is split by the pattern. Within a piece, the adjacent pair whose concatenation has
the
lowest rank is merged repeatedly; a piece that is a token is kept (tiktoken's rule). An id is a rank plus the number of
special tokens, whose unnamed entries are <SPECIAL_n>. A byte-level BPE is equivalent if its merges list, in rank order,
every pair of tokens that forms each token. Source: mistral_common.tokenizers.tekken.
"""

import base64
from pathlib import Path
from typing import Any

import msgspec

from engine.api.errors import CheckpointError
from engine.api.files import TOKENIZER_BYTES, read_file
from engine.text.vocabulary import byte_level_text

TEKKEN = "tekken.json"
BEGIN = "<s>"
NAMED = {"bos_token": BEGIN, "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
# Default special tokens of files up to version 7, which may omit special_tokens.
UNWRITTEN = (
    *("<unk>", BEGIN, "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)


class _Config(msgspec.Struct):
    pattern: str
    default_vocab_size: int
    default_num_special_tokens: int


class _Version(msgspec.Struct):
    version: str = ""


class _Versioned(msgspec.Struct):
    config: _Version


class _Token(msgspec.Struct):
    rank: int
    token_bytes: str


class _Special(msgspec.Struct):
    rank: int
    token_str: str
    is_control: bool = True


class _File(msgspec.Struct):
    config: _Config
    vocab: list[_Token]
    special_tokens: list[_Special] | None = None


def tekken_version(directory: Path) -> str | None:
    """Return the version of the directory's tekken.json, such as "v13", or None without a valid one."""
    try:
        return msgspec.json.decode(read_file(directory / TEKKEN, TOKENIZER_BYTES), type=_Versioned).config.version
    except (OSError, ValueError, RecursionError):
        return None


def tekken_text(path: Path) -> str:
    """Return the text of a tokenizer.json. Raises CheckpointError with the file's name."""
    try:
        file = msgspec.json.decode(read_file(path, TOKENIZER_BYTES), type=_File)
        pieces = [base64.b64decode(token.token_bytes, validate=True) for token in file.vocab]
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not a tekken tokenizer ({error}); copy the checkpoint again") from error
    count = file.config.default_num_special_tokens
    pieces = pieces[: file.config.default_vocab_size - count]
    ordered = all(token.rank == rank for rank, token in enumerate(file.vocab))
    if not ordered or len(set(pieces)) < len(pieces) or pieces[:256] != [bytes([byte]) for byte in range(256)]:
        raise CheckpointError(
            f"{path}: vocab must list tokens by rank without duplicates, the 256 bytes first; copy the checkpoint again"
        )
    special = _special_tokens(file, path)
    names = [token.token_str for token in special]
    vocabulary = {name: place for place, name in enumerate(names)}
    vocabulary |= {byte_level_text(piece): count + rank for rank, piece in enumerate(pieces)}
    return msgspec.json.encode(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [_added(token) for token in special],
            "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": pre_tokenizers(file.config.pattern)},
            "post_processor": _begin(names.index(BEGIN)) if BEGIN in names else None,
            "decoder": BYTE_LEVEL,
            "model": {"type": "BPE", "vocab": vocabulary, "merges": _merges(pieces), "ignore_merges": True},
        }
    ).decode()


def _special_tokens(file: _File, path: Path) -> list[_Special]:
    """Return one token for each id before the vocabulary."""
    count = file.config.default_num_special_tokens
    written = file.special_tokens
    if written is None:
        written = [_Special(rank, text) for rank, text in enumerate(UNWRITTEN[:count])]
    named = {token.rank: token for token in written}
    if len(named) < len(written) or any(not 0 <= rank < count for rank in named):
        raise CheckpointError(
            f"{path}: special_tokens must have ranks from 0 to {count - 1}, none twice; copy the checkpoint again"
        )
    return [named.get(rank, _Special(rank, f"<SPECIAL_{rank}>")) for rank in range(count)]


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def pre_tokenizers(pattern: str) -> list[dict[str, Any]]:
    """Return the pre-tokenizers that split a text by a pattern and convert its bytes to characters."""
    return [{"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}, BYTE_LEVEL]


def _begin(token: int) -> dict[str, Any]:
    """Return the post-processor that adds the begin token to a text."""
    begin = {"SpecialToken": {"id": BEGIN, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    known = {BEGIN: {"id": BEGIN, "ids": [token], "tokens": [BEGIN]}}
    template = {"single": [begin, first], "pair": [begin, first, second], "special_tokens": known}
    return {"type": "TemplateProcessing", **template}


def _added(token: _Special) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": token.is_control}
    return {"id": token.rank, "content": token.token_str, **flags}


def _merges(pieces: list[bytes]) -> list[tuple[str, str]]:
    """Return every pair of tokens that forms a token, in rank order of the result."""
    ranks = {piece: rank for rank, piece in enumerate(pieces)}
    text = {piece: byte_level_text(piece) for piece in pieces}
    found = []
    for piece in pieces:
        halves = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        pairs = [(left, right) for left, right in halves if left in ranks and right in ranks]
        pairs.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        found += [(text[left], text[right]) for left, right in pairs]
    return found
