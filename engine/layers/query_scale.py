"""Factors of queries by position (Llama 4's temperature tuning, arXiv:2501.19399)."""

import torch
from torch import Tensor

from engine.models.parts import QueryScale


def query_factors(scale: QueryScale, positions: Tensor) -> Tensor:
    """Return the factor of each token, [tokens, 1, 1] fp32. positions: [tokens] integers."""
    steps = torch.div(positions + scale.offset, scale.length, rounding_mode="floor").float()
    return (steps.log1p() * scale.scale + 1.0).view(-1, 1, 1)
