"""Rows of the embedding matrix, in the wanted type, times a factor (Gemma √hidden, Granite its multiplier)."""

import torch
from torch import Tensor


def embedding(ids: Tensor, table: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """ids: [tokens] int64; table: [vocab, hidden], of any floating type → [tokens, hidden] of `dtype`."""
    rows = table.index_select(0, ids).to(dtype)
    # The factor is rounded to the type of the rows first, as the models were trained.
    return rows if scale == 1.0 else rows * torch.tensor(scale, dtype=dtype, device=rows.device)
