"""Structured output: mask the tokens that the grammar does not allow."""

import numpy as np
import torch
from torch import Tensor

from engine.sampling.rows import LogitProcessor, Rows


def grammar(rows: Rows) -> LogitProcessor | None:
    if not rows.masks:
        return None
    users = rows.to_device(np.fromiter(rows.masks, np.int64))
    words = rows.to_device(np.stack(list(rows.masks.values())).view(np.int32))

    def process(logits: Tensor) -> None:
        bits = torch.arange(32, dtype=torch.int32, device=logits.device)
        allowed = (words[:, :, None] >> bits & 1).flatten(1)[:, : logits.shape[1]].bool()
        logits[users] = torch.where(allowed, logits[users], -torch.inf)

    return process
