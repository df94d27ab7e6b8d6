"""Added tokens of a tokenizer's configuration: they are split off before a text is tokenized."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.api.errors import CheckpointError

MAX_TOKENS = 2**22  # limit of ids, because tables have an entry for each id up to the highest


@dataclass(frozen=True)
class Added:
    """An added token."""

    id: int
    text: str
    special: bool = True
    lstrip: bool = False  # includes white space before it
    rstrip: bool = False  # includes white space after it
    word: bool = False  # matches only as a separate word


def read_added(decoder: Mapping[str, Any]) -> list[Added]:
    """Read the added tokens of tokenizer_config.json (`added_tokens_decoder`)."""
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
    """Raise CheckpointError for an id out of range. `path`: the file with the ids."""
    wrong = next((token for token in ids if not 0 <= token < MAX_TOKENS), None)
    if wrong is not None:
        raise CheckpointError(f"{path}: has a token with the id {wrong}; ids are from 0 to {MAX_TOKENS - 1:,}")


class AddedTokens:
    """Splits texts at added tokens. The longer of two tokens at the same position matches."""

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
        """Yield the parts of the text between added tokens, and the ids of the added tokens."""
        at = 0
        for match in self._pattern.finditer(text) if self._pattern else ():
            if match.start() > at:
                yield text[at : match.start()]
            assert match.lastindex is not None
            yield self.tokens[self._names[match.lastindex - 1]].id
            at = match.end()
        if at < len(text):
            yield text[at:]
