"""Hidden states in several streams (AltUp, arXiv:2301.13310), and sparse activations. Source: transformers
modeling_gemma3n.py.

For streams s_j with coefficients c, and rms(x) = √max(mean(x²), 1e-5):

spread     s_0 = x, s_j = p_j · √mean(x²) / rms(p_j) for projections p of x
predict    p_j = s_j + Σ_i c[j, i] · s_i
correct    s_j = p_j + (1 + c_j) · (x - p_0)
collect    (x + Σ_j u_j · √mean(x²) / rms(u_j)) / count
sparsify   max(x - mean - multiplier · deviation, 0) over all columns of a row, also those of other ranks

All are sums over a few terms in a fixed order, so a row does not depend on others.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

LEAST_SQUARE = 1e-5


def spread(x: Tensor, projected: Tensor) -> Tensor:
    """x: [tokens, hidden]; projected: [tokens, (count - 1) · hidden] → [tokens, count · hidden]."""
    others = projected.unflatten(1, (-1, x.shape[1]))
    return torch.cat((x.unsqueeze(1), _as_large(others, x.unsqueeze(1))), 1).flatten(1)


def predict(streams: Tensor, coefficients: Tensor, count: int) -> Tensor:
    """streams: [tokens, count · hidden]; coefficients: [tokens, count · count], the row c[j] after c[j - 1]."""
    own, factors = streams.unflatten(1, (count, -1)), coefficients.unflatten(1, (count, count)).unsqueeze(3)
    found = torch.zeros_like(own)
    for i in range(count):
        found += factors[:, :, i] * own[:, i : i + 1]
    return (found + own).flatten(1)


def correct(predictions: Tensor, x: Tensor, coefficients: Tensor) -> Tensor:
    """predictions: [tokens, count · hidden]; x: [tokens, hidden]; coefficients: [tokens, count]."""
    own = predictions.unflatten(1, (coefficients.shape[1], -1))
    change = (x - own[:, 0]).unsqueeze(1)
    return (change * (coefficients + 1.0).unsqueeze(2) + own).flatten(1)


def collect(x: Tensor, others: Sequence[Tensor]) -> Tensor:
    """x, others: [tokens, hidden] → [tokens, hidden]."""
    total = x.clone()
    for one in others:
        total += _as_large(one, x)
    return total / (1 + len(others))


def sparsify(x: Tensor, multiplier: float, size: int, total: Callable[[Tensor], Tensor]) -> Tensor:
    """x: [tokens, columns of this rank]; size: columns of all ranks; total: sum over the ranks."""
    wide = x.float()
    mean = total(wide.sum(1, keepdim=True)) / size
    deviation = (total((wide - mean).square().sum(1, keepdim=True)) / size).sqrt()
    return (wide - (mean + deviation * multiplier)).clamp(min=0).to(x.dtype)


def tanh(x: Tensor, factor: float) -> Tensor:
    """Return tanh(factor · x), rounded once: the last digit does not depend on the position in a vector register."""
    return (x.double() * factor).tanh().to(x.dtype)


def _as_large(x: Tensor, as_x: Tensor) -> Tensor:
    wanted = as_x.square().mean(-1, keepdim=True).sqrt()
    return x * wanted / x.square().mean(-1, keepdim=True).clamp(min=LEAST_SQUARE).sqrt()
