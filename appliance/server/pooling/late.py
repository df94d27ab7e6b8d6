"""Late interaction: prompts of queries and documents, and the document vectors that are compared.

A marker after the first token tells the model if it reads a query or a document. Source: pylate/models/colbert.py.
"""

from collections.abc import Sequence
from typing import Literal

from appliance.config.gateway import LateReading
from appliance.server.chat.parsed import Served
from engine.api.errors import RequestError
from engine.api.messages import Pooled
from engine.text import Tokenizer

Side = Literal["query", "document"]
SIDES: tuple[Side, Side] = ("query", "document")
_NAMES: dict[str, Side] = {"query": "query", "search_query": "query"}
_NAMES |= dict.fromkeys(("document", "search_document", "passage"), "document")


def side_of(input_type: str | None) -> Side:
    """Return the side for an input type.

    Raise RequestError without a valid one, since the wrong vectors would be compared.
    """
    if input_type is None or input_type not in _NAMES:
        given = "is missing" if input_type is None else f"is {input_type!r}"
        raise RequestError(
            f"input_type {given}: this model uses different prompts for queries and documents. Set it to query or "
            "document.",
            "input_type",
        )
    return _NAMES[input_type]


def late_ids(
    text: str, side: Side, late: LateReading, served: Served, *, keep: int | None, cut: Literal["left", "right"]
) -> list[int]:
    """Return the token IDs of a text, cut to the model's trained length, and to `keep` tokens if that is less."""
    tokenizer, at = served.text.tokenizer, SIDES.index(side)
    marker, longest = late.markers[at], min(late.lengths[at], served.config.max_context)
    most = longest if keep is None else min(keep, longest)
    ids = tokenizer.encode_within(text, most - (marker != ""), side=cut)
    if marker:
        ids = [*ids[:1], _id(tokenizer, marker), *ids[1:]]
    if side == "query" and late.expands:
        ids += [_id(tokenizer, tokenizer.special_tokens.get("mask_token", "[MASK]"))] * (longest - len(ids))
    return ids


def _id(tokenizer: Tokenizer, token: str) -> int:
    found = tokenizer.convert_tokens_to_ids(token)
    if found is None:
        raise RequestError(f"The model needs the token {token!r}, but its tokenizer does not have it.")
    return found


def compared(pooled: Pooled, ids: Sequence[int], late: LateReading, tokenizer: Tokenizer) -> Pooled:
    """Return the vectors of a document without those of skipped tokens."""
    import numpy as np

    skipped = {tokenizer.convert_tokens_to_ids(word) for word in late.skipped}
    kept = np.array([token not in skipped for token in ids])
    rows = np.frombuffer(pooled.values, "<f4").reshape(pooled.shape)[kept]
    return Pooled(rows.shape, rows.tobytes())
