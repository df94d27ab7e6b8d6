"""min_p: keep tokens with at least `min_p` times the largest probability (Nguyen et al. 2024)."""

import numpy as np
import torch
from torch import Tensor

from engine.sampling.candidates import Candidates
from engine.sampling.rows import Rows
from engine.sampling.truncation import Shorten


def min_p(rows: Rows, chosen: np.ndarray) -> Shorten | None:
    fractions = rows.columns.min_p[rows.slots[chosen]]
    if not fractions.any():
        return None
    with np.errstate(divide="ignore"):  # min_p 0: log gives -inf, which keeps every token
        drop = rows.to_device(np.log(fractions))

    def shorten(found: Candidates, keep: Tensor) -> Tensor:
        likely = (found.values.double() >= found.values[:, :1].double() + drop[:, None]).sum(1)
        if found.width < found.vocab:
            likely = torch.where(likely == found.width, found.unknown, likely)
        return found.tighten(keep, torch.where(drop == -torch.inf, found.vocab, likely))

    return shorten
