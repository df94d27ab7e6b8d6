"""Interface of tokenizers of all formats. `Tokenizer` selects one by the checkpoint's tokenizer file."""

from typing import Literal, Protocol

from engine.text.added import Added
from engine.text.vocabulary import Vocabulary

Side = Literal["left", "right"]


class Backend(Protocol):
    """Ids and texts of one tokenizer.

    special_ids: tokens that are hidden when special tokens are skipped.
    longest_piece: maximum characters per token, or None if it is unlimited."""

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Return the ids of a text. `special`: with the tokens that begin and end every text."""

    def bare(self, text: str) -> list[int]:
        """Return the ids of a text that continues another one, without anything prepended if possible."""

    def encode_within(self, text: str, limit: int, *, side: Side, special: bool) -> list[int]:
        """Return at most `limit` ids: longer texts are truncated on `side`, special tokens are kept."""

    def encode_pair(
        self, first: str, second: str, *, limit: int | None, most: tuple[int | None, int | None], side: Side
    ) -> tuple[list[int], list[int]]:
        """Return two joined texts: ids, and the token type of each."""

    def decode(self, ids: list[int], *, skip_special: bool) -> str: ...

    def id_of(self, text: str) -> int | None: ...

    def text_of(self, token: int) -> str | None: ...

    @property
    def names(self) -> dict[str, int]: ...

    @property
    def special_ids(self) -> frozenset[int]: ...

    @property
    def added(self) -> list[Added]: ...

    @property
    def longest_piece(self) -> int | None: ...

    def vocabulary(self) -> Vocabulary: ...


def divide_room(lengths: list[int], room: int) -> list[int]:
    """Divide `room` between two lengths: the shorter keeps up to half of it, the longer gets the rest."""
    if sum(lengths) <= room:
        return lengths
    short = 0 if lengths[0] <= lengths[1] else 1
    kept = [0, 0]
    kept[short] = min(lengths[short], room // 2)
    kept[1 - short] = room - kept[short]
    return kept


def truncate(ids: list[int], most: int | None, side: Side) -> list[int]:
    """Truncate ids to at most `most`, on `side`."""
    if most is None or len(ids) <= most:
        return ids
    return ids[len(ids) - most :] if side == "left" else ids[:most]
