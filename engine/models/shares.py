"""How ranks share a model: heads, rows and inputs in equal parts, the vocabulary as evenly as it goes.

Free of torch: plans count with the same shares that layers load (engine/distributed/world.py).
"""


def share_of(units: int, rank: int, ranks: int) -> tuple[int, int] | None:
    """First unit and number of units of this rank; None where they cannot be shared evenly. Fewer units than ranks are
    held by several ranks."""
    if units >= ranks and units % ranks == 0:
        return rank * (units // ranks), units // ranks
    if units < ranks and ranks % units == 0:
        return rank * units // ranks, 1
    return None


def rows_of(vocab: int, rank: int, ranks: int) -> tuple[int, int]:
    """First row and number of rows of the embedding and the head: shares differ by a row at most."""
    first = rank * vocab // ranks
    return first, (rank + 1) * vocab // ranks - first
