"""What a tokenizer of any format can do. `Tokenizer` chooses one by the file that a checkpoint has."""

from typing import Literal, Protocol

from engine.text.added import Added
from engine.text.vocabulary import Vocabulary

Side = Literal["left", "right"]


class Backend(Protocol):
    """Ids and texts of one tokenizer. `special_ids` are hidden where special tokens are skipped. `longest_piece`: most
    characters of one token, or None where a token can stand for any number of them."""

    def encode(self, text: str, *, special: bool) -> list[int]:
        """The ids of a text; `special`: with those that begin and end every text."""

    def bare(self, text: str) -> list[int]:
        """The ids of a text that goes on with another, with nothing put in front where the tokenizer can do so."""

    def encode_within(self, text: str, limit: int, *, side: Side, special: bool) -> list[int]:
        """At most `limit` ids: what is too long is cut on `side`, and the special tokens stay around the rest."""

    def encode_pair(
        self, first: str, second: str, *, limit: int | None, most: tuple[int | None, int | None], side: Side
    ) -> tuple[list[int], list[int]]:
        """Two texts joined: ids, and the token type of each."""

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


def shared(lengths: list[int], room: int) -> list[int]:
    """How much of two lengths goes into `room`: the shorter keeps up to half of it, the longer has the rest."""
    if sum(lengths) <= room:
        return lengths
    short = 0 if lengths[0] <= lengths[1] else 1
    kept = [0, 0]
    kept[short] = min(lengths[short], room // 2)
    kept[1 - short] = room - kept[short]
    return kept


def cut(ids: list[int], most: int | None, side: Side) -> list[int]:
    """At most so many ids; the cut is on `side`."""
    if most is None or len(ids) <= most:
        return ids
    return ids[len(ids) - most :] if side == "left" else ids[:most]
