"""tiktoken files: lines with a token's bytes in base64 and its rank, read by the tiktoken library.

The file contains neither the splitting pattern nor special tokens. The pattern follows from the names of the file and
the tokenizer class, special tokens come from tokenizer_config.json.
"""

import base64
import binascii
from pathlib import Path

from engine.api.errors import CheckpointError, RequestError
from engine.api.files import TOKENIZER_BYTES, read_file
from engine.text.added import Added, check_ids
from engine.text.plain import PlainTokenizer
from engine.text.vocabulary import byte_level_text

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _letters_and(digits: str) -> str:
    return rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}|{_REST}"


# Up to three digits per token: GPT-4, Llama 3, GLM 4.
PATTERN = _letters_and(r"\p{N}{1,3}")
QWEN_PATTERN = _letters_and(r"\p{N}")
_UPPER, _LOWER = (rf"[{kinds}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for kinds in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
_KIMI = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}?",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}?",
        r"\p{N}{1,3}",
        _REST,
    )
)
PATTERNS = {"QWenTokenizer": QWEN_PATTERN, "qwen.tiktoken": QWEN_PATTERN, "TikTokenTokenizer": _KIMI}
"""Patterns by tokenizer class or file name."""


def read_ranks(path: Path) -> dict[bytes, int]:
    """Return the ranks in a file. Raises CheckpointError with the file's name and the line."""
    ranks: dict[bytes, int] = {}
    try:
        lines = read_file(path, TOKENIZER_BYTES).splitlines()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); copy the checkpoint again") from error
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            text, rank = line.split()
            ranks[base64.b64decode(text, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise CheckpointError(
                f"{path}: line {number} is not a token in base64 with its rank ({error}); copy the checkpoint again"
            ) from error
    check_ids(path, ranks.values())
    if len(set(ranks.values())) < len(ranks) or any(bytes((byte,)) not in ranks for byte in range(256)):
        raise CheckpointError(f"{path}: must rank all 256 bytes without duplicates; copy the checkpoint again")
    return ranks


class RanksTokenizer(PlainTokenizer):
    """A tiktoken tokenizer. Raises CheckpointError with the file's name."""

    def __init__(self, path: Path, pattern: str, added: list[Added], begin: int | None, end: int | None) -> None:
        super().__init__(added, begin, end)
        try:
            from tiktoken import Encoding
        except ImportError as error:
            raise CheckpointError(f"{path}: needs the package tiktoken, which is not installed") from error
        self._ranks = read_ranks(path)
        self._encoding = Encoding(path.name, pat_str=pattern, mergeable_ranks=self._ranks, special_tokens={})

    def tokenize(self, text: str, *, first: bool) -> list[int]:
        try:
            return self._encoding.encode(text, disallowed_special=())
        except ValueError as error:  # e.g. a run of a million spaces exceeds the pattern's limit
            raise RequestError(f"The text cannot be tokenized: {error}", "input_text") from error

    def base_names(self) -> dict[str, int]:
        return {byte_level_text(piece): rank for piece, rank in self._ranks.items()}

    def base_pieces(self) -> list[bytes]:
        pieces = [b""] * (max(self._ranks.values()) + 1)
        for piece, rank in self._ranks.items():
            pieces[rank] = piece
        return pieces
