"""Text notation for batches of a step, on which attention is timed.

    8q1s4096          8 rows of 1 new token each, which read 4,096 positions
    q512              one prompt of 512 tokens
    q2ks32k           the last 2,048 tokens of 32,768
    q512+8q1s2k       both of these in one step

A part consists of the number of rows (default: 1), q and the new tokens of each, s and the number of positions up to
its last one (default: the new tokens); k is 1,024.
"""

import re
from collections.abc import Sequence
from typing import Literal

Rows = tuple[tuple[int, int], ...]  # tokens to compute, and length, of each
Kind = Literal["prefill", "decode", "spec", "extend", "mixed"]
FEW = 8  # maximum number of drafted tokens of a row; a row with more new tokens is a chunk of a prompt
_PART = re.compile(r"(\d*)q(\d+k?)(?:s(\d+k?))?")


def batch(text: str) -> Rows:
    """Parse a batch such as 8q1s4096+q512. Raise ValueError that describes the syntax if `text` is invalid."""
    rows: list[tuple[int, int]] = []
    for part in text.split("+"):
        found = _PART.fullmatch(part)
        if found is None:
            raise ValueError(f"{text}: {part!r} is not a batch; write 8q1s4096, q512 or q2ks32k, joined by +")
        number, tokens, length = int(found[1] or 1), _count(found[2]), _count(found[3] or found[2])
        if not 1 <= tokens <= length or number < 1:
            raise ValueError(f"{text}: {part!r} has {number} rows of {tokens} tokens that read {length}; use 1 ≤ q ≤ s")
        rows += [(tokens, length)] * number
    return tuple(rows)


def _count(text: str) -> int:
    return int(text.removesuffix("k")) * (1024 if text.endswith("k") else 1)


def kind(rows: Sequence[tuple[int, int]]) -> Kind:
    """Return the kind that all rows have: prefill (a whole prompt), decode (one token), spec (a few tokens after
    others, such as drafted ones), extend (a later chunk of a prompt); or mixed if kinds differ."""
    kinds = {_row_kind(*row) for row in rows}
    return kinds.pop() if len(kinds) == 1 else "mixed"


def _row_kind(count: int, length: int) -> Kind:
    if count == 1:
        return "decode"
    if count == length:
        return "prefill"
    return "spec" if count <= FEW else "extend"
