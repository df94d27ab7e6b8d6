"""Tokens that a tokenizer's configuration adds to its vocabulary: found in a text before the rest of it is cut."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.api.errors import CheckpointError

MAX_TOKENS = 2**22  # ids of a tokenizer; tables have a place for each up to the highest


@dataclass(frozen=True)
class Added:
    """One token. `lstrip` and `rstrip` take the white space around it along; `word`: only as a whole word."""

    id: int
    text: str
    special: bool = True
    lstrip: bool = False
    rstrip: bool = False
    word: bool = False


def read_added(decoder: Mapping[str, Any]) -> list[Added]:
    """Those of tokenizer_config.json (`added_tokens_decoder`)."""
    return [
        Added(
            int(token),
            entry["content"],
            bool(entry.get("special", False)),
            bool(entry.get("lstrip", False)),
            bool(entry.get("rstrip", False)),
            bool(entry.get("single_word", False)),
        )
        for token, entry in sorted(decoder.items(), key=lambda item: int(item[0]))
    ]


def check_ids(path: Path, ids: Iterable[int]) -> None:
    """Raise CheckpointError for an id that no vocabulary has; `path`: the file with the ids."""
    wrong = next((token for token in ids if not 0 <= token < MAX_TOKENS), None)
    if wrong is not None:
        raise CheckpointError(f"{path}: has a token with the id {wrong}; ids are from 0 to {MAX_TOKENS - 1:,}")


class AddedTokens:
    """Cuts texts at added tokens. Of two that begin at the same place the longer one counts."""

    def __init__(self, tokens: list[Added]) -> None:
        self.tokens = {token.text: token for token in tokens if token.text}
        parts = []
        for text in sorted(self.tokens, key=lambda text: (-len(text), text)):
            token = self.tokens[text]
            pattern = re.escape(text)
            if token.word:
                pattern = rf"(?<!\w){pattern}(?!\w)"
            parts.append(("\\s*" if token.lstrip else "") + f"({pattern})" + ("\\s*" if token.rstrip else ""))
        self._names = sorted(self.tokens, key=lambda text: (-len(text), text))
        self._pattern = re.compile("|".join(parts)) if parts else None

    def split(self, text: str) -> Iterator[str | int]:
        """Pieces of the text that are none, and the ids of those between them."""
        at = 0
        for match in self._pattern.finditer(text) if self._pattern else ():
            if match.start() > at:
                yield text[at : match.start()]
            assert match.lastindex is not None
            yield self.tokens[self._names[match.lastindex - 1]].id
            at = match.end()
        if at < len(text):
            yield text[at:]
