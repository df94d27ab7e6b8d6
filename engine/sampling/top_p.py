"""top_p: keep the smallest prefix whose probability, relative to earlier truncation, reaches p (Holtzman et al.
2019)."""

import numpy as np
import torch
from torch import Tensor

from engine.sampling.candidates import Candidates
from engine.sampling.rows import Rows
from engine.sampling.truncation import Shorten


def top_p(rows: Rows, chosen: np.ndarray) -> Shorten | None:
    fractions = rows.columns.top_p[rows.slots[chosen]]
    if (fractions >= 1.0).all():
        return None
    wanted = rows.to_device(fractions)

    def shorten(found: Candidates, keep: Tensor) -> Tensor:
        sums = found.weights.cumsum(1)
        within = sums.gather(1, (keep.clamp(max=found.width) - 1)[:, None])[:, 0]
        assert found.normaliser is not None, "top_p needs the sum over the vocabulary"
        mass = torch.where(keep == found.vocab, found.normaliser, within)
        reached = (sums < (wanted * mass)[:, None]).sum(1) + 1
        if found.width < found.vocab:
            mass_unknown = (keep > found.width) & (keep != found.vocab)
            reached = torch.where((reached > found.width) | mass_unknown, found.unknown, reached)
        return found.tighten(keep, torch.where(wanted >= 1.0, found.vocab, reached))

    return shorten
