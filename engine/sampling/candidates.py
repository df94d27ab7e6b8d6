"""The most likely tokens of each row in descending order, and how many of them may be drawn.

min_p, top_k and top_p each keep a prefix of that order (equal logits: the lower id first), so together they are one
number a row. Most prefixes are short, so only the first `width` tokens are sorted; a row whose prefix might be longer
says so and is done again over the whole vocabulary: the result is exact and the same for any width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Candidates:
    """`values` descending, with their `ids`, both [rows, width]. `normaliser` [rows] float64: the sum of
    exp(logit - largest logit) over the vocabulary, where a cut asked for it."""

    values: Tensor
    ids: Tensor
    vocab: int
    normaliser: Tensor | None

    @property
    def width(self) -> int:
        return self.values.shape[1]

    @property
    def unknown(self) -> int:
        """A prefix of at least `width` tokens, maybe more."""
        return self.vocab + 1

    @property
    def weights(self) -> Tensor:
        """exp(logit - largest logit), float64 [rows, width]."""
        return (self.values - self.values[:, :1]).double().exp()

    def tighten(self, keep: Tensor, limit: Tensor) -> Tensor:
        """The shorter of two prefixes, each maybe `unknown`; at least one token."""
        shorter = torch.minimum(keep, limit).clamp(min=1)
        open_end = (shorter > self.width) & ((keep == self.unknown) | (limit == self.unknown))
        return torch.where(open_end, self.unknown, shorter)

    def resolved(self, keep: Tensor) -> Tensor:
        """Rows whose prefix lies within `width` and does not end between equal logits of which one is unsorted."""
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
    # 1 / the largest probability: softmax's own sum, several times cheaper than logsumexp on a CPU
    normaliser = logits.softmax(1).amax(1).double().reciprocal() if normalise else None
    return Candidates(values, ids, vocab, normaliser)
