"""The most likely tokens of each row in descending order, and how many of them may be sampled.

min_p, top_k and top_p each keep a prefix of that order (equal logits: lower id first), so together they are one number
per row. Most prefixes are short, so only the first `width` tokens are sorted. A row whose prefix may be longer is
marked
as unknown and repeated with the entire vocabulary. The result is exact and the same for every width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Candidates:
    """Sorted tokens of each row."""

    values: Tensor  # [rows, width] logits, descending
    ids: Tensor  # [rows, width]
    vocab: int
    normaliser: Tensor | None  # [rows] float64, sum of exp(logit - largest logit) over the vocabulary, if needed

    @property
    def width(self) -> int:
        return self.values.shape[1]

    @property
    def unknown(self) -> int:
        """Length of a prefix that may exceed `width`."""
        return self.vocab + 1

    @property
    def weights(self) -> Tensor:
        """exp(logit - largest logit), float64 [rows, width]."""
        return (self.values - self.values[:, :1]).double().exp()

    def tighten(self, keep: Tensor, limit: Tensor) -> Tensor:
        """Return the shorter of two prefixes, which may be `unknown`; at least one token."""
        shorter = torch.minimum(keep, limit).clamp(min=1)
        open_end = (shorter > self.width) & ((keep == self.unknown) | (limit == self.unknown))
        return torch.where(open_end, self.unknown, shorter)

    def resolved(self, keep: Tensor) -> Tensor:
        """Return which rows are exact: the prefix is within `width` and does not end between equal logits of which one
        is not sorted."""
        if self.width == self.vocab:
            return torch.ones_like(keep, dtype=torch.bool)
        last = self.values.gather(1, (keep.clamp(max=self.width) - 1)[:, None])[:, 0]
        return (keep <= self.width) & (last > self.values[:, -1])


def candidates(logits: Tensor, width: int, *, normalise: bool) -> Candidates:
    vocab = logits.shape[1]
    if width >= vocab:
        values, ids = logits.sort(dim=1, descending=True, stable=True)
    else:
        ids = logits.topk(width, dim=1, sorted=False).indices.sort(dim=1).values
        values, order = logits.gather(1, ids).sort(dim=1, descending=True, stable=True)
        ids = ids.gather(1, order)
    # 1 / largest probability: softmax computes the sum, several times faster than logsumexp on a CPU.
    normaliser = logits.softmax(1).amax(1).double().reciprocal() if normalise else None
    return Candidates(values, ids, vocab, normaliser)
