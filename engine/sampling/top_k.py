"""top_k: keep the k most likely tokens."""

import numpy as np
from torch import Tensor

from engine.sampling.candidates import Candidates
from engine.sampling.rows import Rows
from engine.sampling.truncation import Shorten


def top_k(rows: Rows, chosen: np.ndarray) -> Shorten | None:
    counts = rows.columns.top_k[rows.slots[chosen]]
    if not counts.any():
        return None
    limit = rows.to_device(np.where(counts == 0, rows.columns.vocab, counts))

    def shorten(found: Candidates, keep: Tensor) -> Tensor:
        return found.tighten(keep, limit)

    return shorten
